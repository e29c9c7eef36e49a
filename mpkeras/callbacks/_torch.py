"""Copies of single numbers around a step of `fit`, on torch."""

import torch


def steps_ahead(model, optimizers):
    """As in `_jax.py`: `None`."""
    del model, optimizers


class NumberCopies:
    """As in `_jax.py`; the numbers are in the variables, and `after_step` returns how many more steps were skipped."""

    def __init__(self, model, variables, skip_counts):
        del model
        self._variables = variables
        self._skip_counts = skip_counts

    @torch.no_grad()
    def before_step(self):
        # One tensor for each dtype: a copy of a single variable takes as long as one of all.
        groups: dict = {}
        for variable in self._variables:
            value = variable.value
            groups.setdefault((value.device, value.dtype), []).append(value)
        return {key: torch.stack(values) for key, values in groups.items()}, self._skip_count()

    @torch.no_grad()
    def after_step(self, before):
        return self._skip_count() - before[1]

    def skipped(self, before, after) -> bool:
        del before
        return int(after) > 0

    def read(self, copies) -> list:
        rows = {key: iter(values.cpu().numpy()) for key, values in copies[0].items()}
        values = (variable.value for variable in self._variables)
        return [next(rows[value.device, value.dtype]) for value in values]

    def _skip_count(self):
        # A sum is a tensor of its own, which no step overwrites.
        return torch.stack([variable.value for variable in self._skip_counts]).sum()
