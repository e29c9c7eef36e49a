"""Copies of single numbers in the state that `fit` hands on, on JAX."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np


class NumberCopies:
    """Copies what a skipped step changes, as the step is given its state to overwrite; the host reads one array of it.

    Args:
        model: A model in `fit`.
        variables: Its variables that hold the numbers, each of shape `()`.
        skip_counts: Those of them that count skipped steps.
    """

    def __init__(self, model, variables, skip_counts):
        groups = {1: model.non_trainable_variables, 2: model.optimizer.variables, 3: model.metrics_variables}
        places = {id(v): (i, j) for i, group in groups.items() for j, v in enumerate(group)}
        # `fit` hands on no state of optimizers beside `model.optimizer`: a step that runs op by op assigns it.
        self._places = [(variable, places.get(id(variable))) for variable in variables]
        counts = {id(variable) for variable in skip_counts}
        self._is_count = [id(variable) in counts for variable in variables]
        # Those of the last step, after it: as a rule the next one is given the same arrays.
        self._last: _Copies | None = None

    def before_step(self, state):
        """Returns copies of the numbers in `state`, which are still to be computed or were copied already."""
        values = self._values(state)
        if self._last is None or not self._last.are_of(values):
            # The first step of an epoch, or a callback has set a variable.
            self._last = _Copies(values, self._is_count)
        return self._last

    def after_step(self, before, state):
        """Returns what `skipped` needs. The device makes it right behind the step; nothing is waited for."""
        del before
        self._last = _Copies(self._values(state), self._is_count)
        return self._last

    def skipped(self, before, after) -> bool:
        """Whether the step was skipped; waits for it."""
        return after.skip_count > before.skip_count

    def read(self, copies) -> list:
        """Returns the numbers as NumPy arrays of shape `()`, in the order of the variables."""
        return copies.read()

    def _values(self, state) -> list:
        return [variable.value if place is None else state[place[0]][place[1]] for variable, place in self._places]


@dataclasses.dataclass
class _Copies:
    values: list
    is_count: list

    def __post_init__(self):
        self.packed = _packed(self.values)
        self.dtypes = [value.dtype.name for value in self.values]

    def are_of(self, values) -> bool:
        return all(value is own for value, own in zip(values, self.values, strict=True))

    @functools.cached_property
    def skip_count(self) -> int:
        (dtype,) = {dtype for dtype, is_count in zip(self.dtypes, self.is_count, strict=True) if is_count}
        numbers = np.asarray(self.packed[dtype])
        of_dtype = [is_count for own, is_count in zip(self.dtypes, self.is_count, strict=True) if own == dtype]
        return int(numbers[np.array(of_dtype)].sum())

    def read(self) -> list:
        rows = {dtype: iter(np.asarray(values)) for dtype, values in self.packed.items()}
        return [np.asarray(next(rows[dtype])) for dtype in self.dtypes]


# Compiled: one call for all numbers. JAX hands on outputs that are inputs, without a copy, which none of these is.
@jax.jit
def _packed(values):
    groups: dict = {}
    for value in values:
        groups.setdefault(value.dtype.name, []).append(value)
    return {dtype: jnp.stack(group) for dtype, group in groups.items()}
