"""Steps of `fit` on JAX, of which somebody looks at each: copies of single numbers, and steps that run ahead."""

import math

import numpy as np

from mpkeras.training._jax import can_run_ahead, numbers_of


def steps_ahead(model, optimizers):
    """Returns what runs the steps of `fit` ahead; `None` where each is to be looked at before the next one."""
    return StepsAhead(model) if can_run_ahead(model, optimizers) else None


class StepsAhead:
    """Runs each step before anybody has looked at the last one; `_step_ahead` says how.

    Args:
        model: A model in `fit`, of which `can_run_ahead` is true.
    """

    def __init__(self, model):
        self._numbers = numbers_of(model)
        self._skips = model.optimizer.skipped_steps
        self._place = [variable is self._skips for variable in model.optimizer.variables].index(True)
        self._known_skips = np.int32(0)
        self._left: list = []

    def goes_on_with(self, state) -> bool:
        """Whether `state` is what the last step has left: not in a new epoch, nor where a callback sets variables."""
        # As a rule the same object: a second look at all of its arrays takes as long as the rest on the host.
        return state is self._left or (
            len(self._left) == len(state)
            and all(
                value is own for pair in zip(state, self._left, strict=True) for value, own in zip(*pair, strict=True)
            )
        )

    def begin(self, state):
        """Begins anew with `state`; waits for what computes it."""
        self._known_skips = np.array(state[2][self._place])

    def run(self, run_step, state) -> tuple:
        """Runs a step by `run_step(state)`; returns its logs, the state, and what `skipped` and `read` are given."""
        logs, (*state, seen) = run_step((*state, self._known_skips))
        self._left = state
        for value in seen.values():
            if not _is_on_cpu(value):
                value.copy_to_host_async()
        return logs, state, seen

    def skipped(self, seen) -> bool:
        """Whether the step was skipped; waits for it. The one that was run since did nothing then."""
        known, self._known_skips = self._known_skips, np.array(seen[self._skips.dtype])[-1]
        return bool(self._known_skips != known)

    def read(self, seen) -> dict:
        """Returns the numbers before the step as arrays, by `id` of the variable."""
        rest = {dtype: np.array(values) for dtype, values in seen.items()}
        numbers = {}
        for variable in self._numbers:
            size = math.prod(variable.shape)
            numbers[id(variable)] = rest[variable.dtype][:size].reshape(variable.shape)
            rest[variable.dtype] = rest[variable.dtype][size:]
        return numbers


class NumberCopies:
    """Copies what a skipped step changes, as the step is given its state to overwrite.

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
        self._counts = [i for i, v in enumerate(variables) if any(v is count for count in skip_counts)]
        # Those of the last step, after it: as a rule the next one is given the same arrays.
        self._last: _Numbers | None = None

    def before_step(self, state):
        """Returns the numbers in `state`; waits for the step that computes them."""
        values = self._values(state)
        if self._last is None or not self._last.are_of(values):
            # The first step of an epoch, or a callback has set a variable.
            self._last = _Numbers(values)
        # The step overwrites what has not been copied by then.
        self._last.copies()
        return self._last

    def after_step(self, before, state):
        """Returns what `skipped` needs; nothing is waited for."""
        del before
        self._last = _Numbers(self._values(state))
        self._last.send()
        return self._last

    def skipped(self, before, after) -> bool:
        """Whether the step was skipped; waits for it."""
        return any(after.copies()[i] > before.copies()[i] for i in self._counts)

    def read(self, copies) -> list:
        """Returns the numbers as NumPy arrays of shape `()`, in the order of the variables."""
        return copies.copies()

    def _values(self, state) -> list:
        return [variable.value if place is None else state[place[0]][place[1]] for variable, place in self._places]


class _Numbers:
    def __init__(self, values):
        self._values = values
        self._copies: list | None = None

    def are_of(self, values) -> bool:
        return all(value is own for value, own in zip(values, self._values, strict=True))

    def send(self):
        """Lets the device send the numbers to the host as soon as it has them; on a CPU they are there."""
        for value in self._values:
            if not _is_on_cpu(value):
                value.copy_to_host_async()

    def copies(self) -> list:
        """Returns the numbers as NumPy arrays; the first call waits for them."""
        if self._copies is None:
            # One by one: a CPU takes a tenth of the time of `jax.device_get`, and no program has to run on the device.
            self._copies = [np.array(value) for value in self._values]
        return self._copies


def _is_on_cpu(value) -> bool:
    return all(device.platform == "cpu" for device in value.devices())
