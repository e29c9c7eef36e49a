"""Warnings about the epochs of `fit`: that nothing was learned, that a loss or a validation is not finite."""

import warnings
from typing import NamedTuple

import keras

from mpkeras.conversion.plan import computes_in
from mpkeras.policies.loss_scaling import number
from mpkeras.training import retake
from mpkeras.training.data_layers import warn_of_layers_for_the_data
from mpkeras.training.first_batch import is_looked_at, looking_at_batch
from mpkeras.training.inventory import checking_optimizers
from mpkeras.training.unguarded import UnguardedWatch
from mpkeras.training.validations import Validations


class SkipWatch(keras.callbacks.Callback):
    """Warns, once of each kind, when an epoch learned nothing, lost steps to a loss that is not finite, or is stuck.

    So it does of a validation that is not finite. `prepare` lets `fit` take one along, and `MixedPrecision` is one.

    Attributes:
        validations: Where evaluations are noted, in `fit` and beside it.
    """

    def __init__(self):
        super().__init__()
        self._warned = set()
        self._warns_at_min_scale = True
        # Of this training, and of all that this object has watched.
        self._batches = self._all_batches = 0
        self._first_steps: UnguardedWatch | None = None
        self.validations = Validations(self._warn_once)

    def on_train_begin(self, logs=None):
        self._batches = 0
        model = self.model
        if self._first_steps is None or self._first_steps.model is not model:
            self._first_steps = UnguardedWatch(model)

    def on_train_batch_begin(self, batch, logs=None):
        # A loop of the user's may call no `on_train_begin`.
        if self._first_steps is not None:
            self._first_steps.watch()
        self._batches += 1
        self._all_batches += 1
        # In front of the first batch a pipeline may not have run yet.
        if self._batches == 2:
            warn_of_layers_for_the_data(self.model)
        # Not when training begins: callbacks behind this one may let the train function be made anew there.
        if is_looked_at(self._batches) and self.model.train_function is not None:
            again = self._batches > 1 and is_looked_at(self._all_batches)
            function = looking_at_batch(self.model, self.model.train_function, self._batches, again)
            self.model.train_function = function

    def on_epoch_begin(self, epoch, logs=None):
        self.validations.begin_epoch()
        self._at_epoch_begin = [_Counts.of(optimizer) for optimizer in self._optimizers()]

    def on_epoch_end(self, epoch, logs=None):
        self.validations.end_epoch(epoch, logs)
        warn_of_layers_for_the_data(self.model)
        optimizers = self._optimizers()
        of_epoch = [
            _Counts.of(optimizer).since(at_begin)
            for optimizer, at_begin in zip(optimizers, self._at_epoch_begin, strict=True)
        ]
        has_learned = any(counts.accepted for counts in of_epoch)
        for optimizer, counts in zip(optimizers, of_epoch, strict=True):
            if counts.skipped and not counts.accepted:
                lost = (
                    f"updates of optimizer '{optimizer.name}' in epoch {epoch + 1} were skipped, what it trains did "
                    "not move: "
                    if has_learned
                    else f"steps of epoch {epoch + 1} were skipped, nothing was learned: "
                )
                cause = counts.cause(optimizer, self._is_in_float16())
                self._warn_once("only skips", f"All {counts.skipped} {lost}{cause}")
            elif counts.nonfinite_losses:
                self._warn_once(
                    "losses",
                    f"{counts.skipped} of {counts.skipped + counts.accepted} steps skipped in epoch {epoch + 1}: "
                    + counts.cause(optimizer, self._is_in_float16()),
                )
            retake.warn_below_one(optimizer, number(optimizer.loss_scale))
            overflows = counts.skipped > counts.nonfinite_losses
            if self._warns_at_min_scale and overflows and self._is_stuck(optimizer):
                self._warn_once("min scale", self._stuck_message(optimizer))

    def _optimizers(self):
        return checking_optimizers(self.model)

    def _is_in_float16(self) -> bool:
        return computes_in(self.model, ["float16"])

    @staticmethod
    def _is_stuck(optimizer) -> bool:
        """Whether steps are skipped in a row although the scale is as low as it may go, or was for each of them."""
        min_scale = getattr(optimizer.loss_scale_rule, "min_scale", None)
        if min_scale is None or number(optimizer.consecutive_skips) < 2:
            return False
        return number(optimizer.loss_scale) <= min_scale or retake.is_stuck(optimizer)

    @staticmethod
    def _stuck_message(optimizer) -> str:
        steps = int(number(optimizer.consecutive_skips))
        at = "at every loss scale down to its" if retake.is_stuck(optimizer) else "with the loss scale at its"
        return (
            f"{steps} steps in a row were skipped {at} lowest, "
            f"{optimizer.loss_scale_rule.min_scale:.3g}: gradients are still not finite, and training does not move. "
            "Train in 'mixed_bfloat16', keep the layers that `mpkeras.callbacks.NumericsMonitor` names in float32 with "
            "`keep_float32`, or lower `min_scale` in `mpkeras.DynamicLossScale`."
        )

    def _warn_once(self, key: str, message: str):
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(message, stacklevel=3)


class _Counts(NamedTuple):
    """Steps of one optimizer: skipped ones, those of them whose loss was not finite, and accepted ones."""

    skipped: int
    nonfinite_losses: int
    accepted: int

    @classmethod
    def of(cls, optimizer):
        counters = (optimizer.skipped_steps, optimizer.nonfinite_losses, optimizer.accepted_steps)
        return cls(*(int(number(counter)) for counter in counters))

    def since(self, earlier):
        return _Counts(*(now - then for now, then in zip(self, earlier, strict=True)))

    def cause(self, optimizer, is_in_float16: bool) -> str:
        rule = optimizer.loss_scale_rule
        if not self.nonfinite_losses and not optimizer.record.hears_losses:
            return (
                "gradients were not finite. Whether the loss was is not known, as the train step calls no "
                "`optimizer.scale_loss`: look at it in the logs. If it was not, look for inf or NaN in the data; if it "
                "was, keep the layers that `mpkeras.callbacks.NumericsMonitor` names in float32 with `keep_float32`."
            )
        if not self.nonfinite_losses and not is_in_float16:
            # bfloat16 has the range of float32: the policy is seldom at fault.
            return (
                "the loss was finite, but gradients were not. Look for a root, a norm or a quotient whose slope is not "
                "finite, as at 0; `mpkeras.callbacks.NumericsMonitor` names the layer."
            )
        if not self.nonfinite_losses:
            if rule.dynamic:
                remedy = "The loss scale has come down after each; if it goes on, train"
            elif rule.initial_scale > 1:
                remedy = f"The loss scale is fixed at {rule.initial_scale:.15g}: lower it, or train"
            else:
                remedy = "Train"
            return (
                f"the loss was finite, but gradients were not. {remedy} in 'mixed_bfloat16' or keep the layers that "
                "`mpkeras.callbacks.NumericsMonitor` names in float32 with `keep_float32`."
            )
        if self.nonfinite_losses == self.skipped:
            which = "each time"
        else:
            which = "once" if self.nonfinite_losses == 1 else f"{self.nonfinite_losses} times"
        beyond = ", and numbers beyond float16's 65504" if is_in_float16 else ""
        return (
            f"{which} the loss itself was not finite: the forward pass is at fault, or the loss, and no loss scale "
            f"cures it. Look for inf or NaN in the data{beyond}, keep the layers that "
            "`mpkeras.callbacks.NumericsMonitor` names in float32 with `keep_float32`, or lower the learning rate."
        )
