"""Copies of single numbers around a step of `fit`, on torch."""

import torch


class NumberCopies:
    """As in `_jax.py`; the numbers are in the variables, which a step overwrites."""

    def __init__(self, model, variables, skip_counts):
        del model
        self._variables = variables
        self._skip_counts = skip_counts

    @torch.no_grad()
    def before_step(self):
        """Returns copies of the numbers: one tensor for each dtype, and the number of skipped steps by itself."""
        # Not by variable: a copy of each takes as long as one of all.
        groups: dict = {}
        for variable in self._variables:
            value = variable.value
            groups.setdefault((value.device, value.dtype), []).append(value)
        return {key: torch.stack(values) for key, values in groups.items()}, self._skip_count()

    @torch.no_grad()
    def after_step(self, before):
        """Returns by how much the number of skipped steps has changed, as a tensor that `skipped` reads."""
        return self._skip_count() - before[1]

    def skipped(self, before, after) -> bool:
        """Whether the step was skipped; waits for it."""
        del before
        return int(after) > 0

    def read(self, copies) -> list:
        """Returns the numbers as NumPy arrays of shape `()`, in the order of the variables."""
        rows = {key: iter(values.cpu().numpy()) for key, values in copies[0].items()}
        values = (variable.value for variable in self._variables)
        return [next(rows[value.device, value.dtype]) for value in values]

    def _skip_count(self):
        # A sum is a tensor of its own, which no step overwrites.
        return torch.stack([variable.value for variable in self._skip_counts]).sum()
