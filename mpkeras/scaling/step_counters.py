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

    def _counted(self, is_accepted, loss_is_finite) -> list:
        """Returns `(variable, value)` for each counter after a step; `loss_is_finite` is `None` if not known."""
        is_skipped = scalars.logical_not(is_accepted)
        skipped, row, lost = self._skipped_steps, self._consecutive_skips, self._nonfinite_losses
        values = [(skipped, skipped.value + ops.cast(is_skipped, skipped.dtype))]
        values.append((row, scalars.where(is_accepted, scalars.zeros_like(row.value), row.value + 1)))
        values.append((self._last_step_skipped, is_skipped))
        if loss_is_finite is not None:
            values.append((lost, lost.value + ops.cast(scalars.logical_not(loss_is_finite), lost.dtype)))
        return values
