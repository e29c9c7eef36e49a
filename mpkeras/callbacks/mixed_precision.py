"""`MixedPrecision`: the one line for `model.fit`."""

import dataclasses
import warnings

import keras

from mpkeras import loss_scaling
from mpkeras.optimizers import LossScaleOptimizer
from mpkeras.policies.registry import get_policy
from mpkeras.scalars import number
from mpkeras.training import rollback as guard
from mpkeras.training.prepare import prepare

_ON_MIN_SCALE = ("warn", "raise", "stop")


class MixedPrecision(keras.callbacks.Callback):
    """Trains the model in mixed precision; a step that is not finite is skipped and leaves no trace.

    On the way in it calls `mpkeras.prepare`. On the way out the train step is put back, while the optimizer
    and the layers' policies stay: they are the model's now. The logs gain `loss_scale` (the scale for the
    next step) and `skipped_steps` (all so far), which Keras shows in the progress bar and hands to History,
    CSVLogger and TensorBoard.

    Args:
        policy, loss_scale, jit_compile, rollback: As in `mpkeras.prepare`.
        on_min_scale: What happens when gradients still overflow at the lowest scale, so that training no
            longer moves: `"warn"` warns once at the epoch's end, `"raise"` raises `FloatingPointError`,
            `"stop"` ends `fit` cleanly. The last two look after every batch, which waits for the device.

    Raises:
        ValueError: If `policy`, `loss_scale` or `on_min_scale` is not known.
        TypeError: If an argument is of a wrong type.

    Example:

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> precision = mpkeras.callbacks.MixedPrecision("mixed_float16")
    >>> history = model.fit(np.full((8, 2), 0.1), np.zeros((8, 1)), verbose=0, callbacks=[precision])
    >>> [float(history.history[name][-1]) for name in ("loss_scale", "skipped_steps")]
    [32768.0, 0.0]
    """

    def __init__(self, policy=None, *, loss_scale=None, jit_compile=None, rollback=True, on_min_scale="warn"):
        super().__init__()
        if on_min_scale not in _ON_MIN_SCALE:
            raise ValueError(
                f"Expected `on_min_scale` to be one of {_ON_MIN_SCALE}. Received: "
                f"on_min_scale={on_min_scale!r}. Use 'warn' to go on and be told."
            )
        # Checked here, where the mistake is made, and not when `fit` starts.
        self._policy = None if policy is None else get_policy(policy)
        self._loss_scale = loss_scaling.resolve(loss_scale)
        self._jit_compile = jit_compile
        self._rollback = rollback
        self._on_min_scale = on_min_scale
        self._warned = set()
        # What `fit` would otherwise wait for on every batch is only looked at where it is asked for.
        if on_min_scale != "warn":
            self.on_train_batch_end = self._check_scale_after_batch

    def set_model(self, model):
        # Here and not in `on_train_begin`: callbacks that restore a checkpoint when training begins must
        # find the optimizer whose state they restore.
        super().set_model(model)
        prepare(
            model,
            self._policy,
            loss_scale=self._loss_scale,
            jit_compile=self._jit_compile,
            rollback=self._rollback,
        )

    def on_train_begin(self, logs=None):
        guard.add_logs(self.model)

    def on_train_end(self, logs=None):
        guard.uninstall(self.model)

    def on_epoch_begin(self, epoch, logs=None):
        self._at_epoch_begin = [_Counts.of(optimizer) for optimizer in self._optimizers()]
        self._nonfinite_losses = [counts.nonfinite_losses for counts in self._at_epoch_begin]

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
            if self._on_min_scale == "warn" and overflows and self._is_stuck(optimizer):
                self._warn_once("min scale", self._stuck_message(optimizer))

    def _check_scale_after_batch(self, batch, logs=None):
        for i, optimizer in enumerate(self._optimizers()):
            # One number and no `_Counts`: each waits for the device, after every batch.
            lost, self._nonfinite_losses[i] = self._nonfinite_losses[i], int(number(optimizer.nonfinite_losses))
            # Where the loss itself was not finite, the scale has no part in it.
            if self._nonfinite_losses[i] > lost or not self._is_stuck(optimizer):
                continue
            if self._on_min_scale == "raise":
                raise FloatingPointError(self._stuck_message(optimizer))
            if not self.model.stop_training:
                self._warn_once("min scale", self._stuck_message(optimizer) + " Training stops here.")
            self.model.stop_training = True

    def _optimizers(self):
        found = guard.find_optimizers(self.model).values()
        return [optimizer for optimizer in found if isinstance(optimizer, LossScaleOptimizer)]

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
