"""Says at the end of an epoch that its steps were skipped, and why."""

import dataclasses
import warnings

import keras

from mpkeras.policies.loss_scaling import number
from mpkeras.scaling.optimizer import LossScaleOptimizer
from mpkeras.training import inventory


class SkipWatch(keras.callbacks.Callback):
    """Warns, once of each kind, when an epoch learned nothing, lost steps to a loss that is not finite, or is stuck.

    `prepare` lets `fit` take one along, and `MixedPrecision` is one.
    """

    def __init__(self):
        super().__init__()
        self._warned = set()
        self._warns_at_min_scale = True

    def on_epoch_begin(self, epoch, logs=None):
        self._at_epoch_begin = [_Counts.of(optimizer) for optimizer in self._optimizers()]

    def on_epoch_end(self, epoch, logs=None):
        for optimizer, before in zip(self._optimizers(), self._at_epoch_begin, strict=True):
            counts = _Counts.of(optimizer).since(before)
            if counts.skipped and not counts.accepted:
                self._warn_once(
                    "only skips",
                    f"All {counts.skipped} steps of epoch {epoch + 1} were skipped, nothing was learned: "
                    + counts.cause(optimizer.loss_scale_rule),
                )
            elif counts.nonfinite_losses:
                self._warn_once(
                    "losses",
                    f"{counts.skipped} of {counts.skipped + counts.accepted} steps skipped in epoch {epoch + 1}: "
                    + counts.cause(optimizer.loss_scale_rule),
                )
            overflows = counts.skipped > counts.nonfinite_losses
            if self._warns_at_min_scale and overflows and self._is_stuck(optimizer):
                self._warn_once("min scale", self._stuck_message(optimizer))

    def _optimizers(self):
        return [
            optimizer for optimizer in inventory.all_optimizers(self.model) if isinstance(optimizer, LossScaleOptimizer)
        ]

    @staticmethod
    def _is_stuck(optimizer) -> bool:
        """Whether steps are skipped in a row although the scale is as low as it may go."""
        min_scale = getattr(optimizer.loss_scale_rule, "min_scale", None)
        if min_scale is None or number(optimizer.consecutive_skips) < 2:
            return False
        return number(optimizer.loss_scale) <= min_scale

    @staticmethod
    def _stuck_message(optimizer) -> str:
        steps = int(number(optimizer.consecutive_skips))
        return (
            f"{steps} steps in a row were skipped with the loss scale at its lowest, "
            f"{optimizer.loss_scale_rule.min_scale}: gradients still overflow, and training does not move. Train "
            "in 'mixed_bfloat16', keep the overflowing layers in float32 with `keep_float32`, or lower "
            "`min_scale` in `mpkeras.DynamicLossScale`."
        )

    def _warn_once(self, key: str, message: str):
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(message, stacklevel=3)


@dataclasses.dataclass
class _Counts:
    """Steps of one optimizer: skipped ones, those of them whose loss was not finite, and accepted ones."""

    skipped: int
    nonfinite_losses: int
    accepted: int

    @classmethod
    def of(cls, optimizer):
        counters = (optimizer.skipped_steps, optimizer.nonfinite_losses, optimizer.accepted_steps)
        return cls(*(int(number(counter)) for counter in counters))

    def since(self, before):
        return _Counts(
            self.skipped - before.skipped,
            self.nonfinite_losses - before.nonfinite_losses,
            self.accepted - before.accepted,
        )

    def cause(self, rule) -> str:
        if not self.nonfinite_losses:
            if rule.dynamic:
                remedy = "The loss scale has come down after each; if it goes on, train"
            elif rule.initial_scale > 1:
                remedy = f"The loss scale is fixed at {rule.initial_scale:.15g}: lower it, or train"
            else:
                remedy = "Train"
            return (
                f"the loss was finite, but gradients overflowed. {remedy} in 'mixed_bfloat16' or keep the overflowing "
                "layers in float32 with `keep_float32`."
            )
        if self.nonfinite_losses == self.skipped:
            which = "each time"
        else:
            which = "once" if self.nonfinite_losses == 1 else f"{self.nonfinite_losses} times"
        return (
            f"{which} the loss itself was not finite: the forward pass is at fault and no loss scale cures it. "
            "Look for inf or NaN in the data, keep more layers in float32, or lower the learning rate."
        )
