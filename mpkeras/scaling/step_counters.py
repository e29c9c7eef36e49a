"""Counts the steps that an optimizer has left out, and says why."""

from keras import ops

from mpkeras._typing import OptimizerMixin
from mpkeras.policies import scalars


class CountsSteps(OptimizerMixin):
    """Goes before `keras.optimizers.LossScaleOptimizer` in the bases of our wrapper: its counters."""

    def _make_counters(self):
        # Not in `build`: a train step is traced with these counters before it builds the optimizer.
        self._skipped_steps = self._add_scalar("skipped_steps", 0)
        self._consecutive_skips = self._add_scalar("consecutive_skips", 0)
        self._last_step_skipped = self._add_scalar("last_step_skipped", False)
        self._nonfinite_losses = self._add_scalar("nonfinite_losses", 0)
        self._skipped_in_step = self._add_scalar("skipped_in_step", False)
        self._accepted_in_step = self._add_scalar("accepted_in_step", False)

    @property
    def skipped_steps(self):
        """Steps left out so far: integer variable of shape `()`."""
        return self._skipped_steps

    @property
    def consecutive_skips(self):
        """Steps left out since the last applied one: integer variable of shape `()`."""
        return self._consecutive_skips

    @property
    def nonfinite_losses(self):
        """Steps left out as the unscaled loss itself was not finite: integer variable of shape `()`."""
        return self._nonfinite_losses

    @property
    def last_step_skipped(self):
        """Whether the last step was left out: bool scalar tensor of shape `()`."""
        # A value: a Keras variable cannot be asked `if optimizer.last_step_skipped`. Copied: the next step assigns it.
        return ops.copy(self._last_step_skipped.value)

    @property
    def step_outcome(self) -> tuple:
        """Whether a call of `apply` was skipped, and whether one was not, since the guarded step was opened.

        Two bool variables of shape `()`. Whoever guards the step sets them to `False` as it begins, and reads them at
        its end. Variables, and no part of `StepFacts`: an update may happen in a function, a branch or a loop that is
        compiled by itself, from which nothing else reaches the step around.
        """
        return self._skipped_in_step, self._accepted_in_step

    def _counted(self, facts, is_accepted, lost_its_loss) -> list:
        """Returns `(variable, value)` for each counter after a step.

        Args:
            facts: The `StepFacts` of the step.
            is_accepted: bool scalar, shape `()`.
            lost_its_loss: bool scalar, shape `()`, whether the loss was computed and is not finite; `None` if unknown.
        """
        is_skipped = scalars.logical_not(is_accepted)
        skipped, row, lost = self._skipped_steps, self._consecutive_skips, self._nonfinite_losses
        values = [(skipped, skipped.value + ops.cast(is_skipped, skipped.dtype))]
        values.append((row, scalars.where(is_accepted, scalars.zeros_like(row.value), row.value + 1)))
        values.append((self._last_step_skipped, is_skipped))
        if lost_its_loss is not None:
            values.append((lost, lost.value + ops.cast(lost_its_loss, lost.dtype)))
        if facts.is_guarded:
            pairs = zip(self.step_outcome, (is_skipped, is_accepted), strict=True)
            values += [(variable, scalars.logical_or(variable.value, flag)) for variable, flag in pairs]
        return values
