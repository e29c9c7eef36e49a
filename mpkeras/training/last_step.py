"""A step that was skipped just now: what it was given, and all state before it and after it.

After a skipped step all state is what it was before, but for what the step notes of itself: the loss scale's own
state, counters, and the trackers that show the losses of skipped steps. These few single numbers are read before a
step; all else is read after it, and only of a step that was skipped.
"""

import dataclasses
from typing import Any

import numpy as np

from mpkeras import _keras
from mpkeras.training.inventory import initial_values, moving_variables
from mpkeras.training.state import named_variables, state_dict

# The key of the values of `moving_variables` before a step, in what the step returns inside mpkeras.
BEFORE = "before the step"


@dataclasses.dataclass(frozen=True)
class SkippedStep:
    """A step that was skipped, until the next one.

    Attributes:
        model, optimizers, metrics: Their variables hold the values after the step.
        moving_before: The values of `moving_variables` before the step, as arrays by `id` of the variable.
        batch: What the step was given.
        of_state: The arguments of `state_dict` for all that the step changes.
    """

    model: Any
    optimizers: list
    metrics: list
    moving_before: dict
    batch: Any
    of_state: tuple

    @classmethod
    def of_fit(cls, model, optimizers, moving_before: dict, batch) -> "SkippedStep":
        """Returns the last step of `fit`."""
        return cls(model, optimizers, model.metrics, moving_before, batch, (model,))

    @classmethod
    def of_parts(cls, parts, moving_before: dict, batch) -> "SkippedStep":
        """Returns the last step of a `TrainStep` that is made of `parts`."""
        optimizers = [parts.optimizer]
        of_metrics = [variable for metric in parts.metrics for variable in metric.variables]
        of_state = parts.model, optimizers, of_metrics
        return cls(parts.model, optimizers, parts.metrics, moving_before, batch, of_state)

    def states(self) -> tuple[dict, dict, bool]:
        """Returns the state before the step and after it, as `state_dict` does, and whether the first is exact.

        It is not where the step has moved the weights all the same: as the last call of a window of accumulated
        gradients, or by another optimizer.

        Raises:
            ValueError: If an optimizer is not held by the model.
        """
        names = {id(variable): name for name, variable in named_variables(*self.of_state).items()}
        state_after = state_dict(*self.of_state)
        state_before = dict(state_after)
        values = initial_values(self.optimizers) | self.moving_before
        unnamed = [o.name for o in self.optimizers if id(o.skipped_steps) not in names]
        if unnamed:
            raise ValueError(
                "Expected optimizers that the model itself holds, whose state a capsule has. Received: "
                f"{unnamed[:3]}, of a part of model '{self.model.name}' or an object that it holds. Give them to the "
                "model."
            )
        for variable in moving_variables(self.optimizers, self.metrics):
            name = names[id(variable)]
            state_before[name] = np.asarray(values.get(id(variable), 0), state_after[name].dtype)
        counts = [names[id(_keras.step_count(optimizer.inner_optimizer))] for optimizer in self.optimizers]
        return state_before, state_after, all(state_before[name] == state_after[name] for name in counts)
