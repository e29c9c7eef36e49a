"""`MixedPrecision`: mixed precision for one `fit`."""

from collections.abc import Iterable

import keras

from mpkeras._arguments import is_one_of
from mpkeras.policies import loss_scaling
from mpkeras.policies.loss_scaling import LossScale, number
from mpkeras.policies.policy import Policy
from mpkeras.policies.registry import get_policy
from mpkeras.training import for_one_fit, guard, inventory, prepared
from mpkeras.training.prepare import check_switches, prepare_to_train
from mpkeras.training.validations import Look
from mpkeras.training.watch import SkipWatch

_ON_MIN_SCALE = ("warn", "raise", "stop")


class MixedPrecision(SkipWatch):
    """Trains the model in mixed precision for one `fit`; a step that is not finite is skipped and leaves no trace.

    On the way in it does what `mpkeras.prepare` does, in `evaluate` and `predict`, too. On the way out the train step
    and `jit_compile` are put back, while the optimizer and the layers' policies stay: they are the model's now. Keras
    tells no callback of a `fit` that an exception ends: the step stays guarded then until the next `fit`, with the
    callback or without it, or `callback.on_train_end()`. The logs gain `loss_scale` (the scale for the next step) and
    `skipped_steps` (all so far), which Keras shows in the progress bar and hands to History, CSVLogger and TensorBoard.

    As the train step is put back, each `fit` traces and compiles it anew. Where `fit` is called many times, call
    `mpkeras.prepare(model)` once instead. A model that is built under `mpkeras.set_global_policy` needs neither.

    Args:
        policy, loss_scale, jit_compile, rollback, remat: As in `mpkeras.prepare`.
        on_min_scale: What happens when gradients still overflow at the lowest scale, or those of two first
            batches at every scale down to it, so that training no longer moves: `"warn"` warns once at the
            epoch's end, `"raise"` raises `FloatingPointError`, `"stop"` ends `fit` cleanly. The last two look
            after every batch, which waits for the device.

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

    def __init__(
        self,
        policy: str | Policy | keras.DTypePolicy | None = None,
        *,
        loss_scale: str | float | LossScale | None = None,
        jit_compile: bool | None = None,
        rollback: bool = True,
        remat: str | Iterable | None = None,
        on_min_scale: str = "warn",
    ) -> None:
        super().__init__()
        if not is_one_of(on_min_scale, _ON_MIN_SCALE):
            raise ValueError(
                f"Expected `on_min_scale` to be one of {_ON_MIN_SCALE}. Received: "
                f"on_min_scale={on_min_scale!r}. Use 'warn' to go on and be told."
            )
        # Checked here, where the mistake is made, and not when `fit` starts.
        self._policy = None if policy is None else get_policy(policy)
        self._loss_scale = loss_scaling.resolve(loss_scale)
        check_switches(jit_compile, rollback)
        self._jit_compile = jit_compile
        self._rollback = rollback
        self._remat = Policy("float32").with_remat(remat).remat
        self._on_min_scale = on_min_scale
        self._warns_at_min_scale = on_min_scale == "warn"
        self._is_in_training = False
        self._is_on_model = False
        # `jit_compile` of the model before, and as it was given.
        self._switched: tuple | None = None

    @property
    def on_train_batch_end(self):
        # Only where it is asked for: to look at a number after each batch makes `fit` wait for the device. Keras waits
        # as well where this is another method than its own.
        return super().on_train_batch_end if self._on_min_scale == "warn" else self._check_scale_after_batch

    def set_model(self, model):
        if self._is_on_model:
            # After a `fit` of another model that raised.
            self._put_back()
        # Here and not in `on_train_begin`: callbacks that restore a checkpoint when training begins must
        # find the optimizer whose state they restore.
        super().set_model(model)
        self._is_in_training = False
        self.validations.let_monitors_be()
        old_jit_compile = None if self._jit_compile is None else model.jit_compile
        prepare_to_train(
            model,
            self._policy,
            loss_scale=self._loss_scale,
            jit_compile=self._jit_compile,
            rollback=self._rollback,
            remat=self._remat,
        )
        if self._jit_compile is not None:
            self._switched = old_jit_compile, model.jit_compile
        prepared.look_at_evaluations(model, self)
        self._is_on_model = True
        for_one_fit.begin(model, self._put_back)

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        self._is_in_training = True

    def on_test_end(self, logs=None):
        # Keras gives the model to the callbacks of `evaluate` and `predict`, too. In `fit` this is a validation.
        if not self._is_in_training:
            look = Look()
            look.on_test_end(logs)
            self.validations.note_evaluation(look)
            self._put_back()

    def on_predict_end(self, logs=None):
        if not self._is_in_training:
            self._put_back()

    def on_train_end(self, logs=None):
        self._put_back()

    def _put_back(self):
        self._is_in_training = self._is_on_model = False
        for_one_fit.ended(self.model, self._put_back)
        self.validations.let_monitors_be()
        prepared.let_evaluations_be(self.model)
        for model in (self.model, *inventory.compiled_parts(self.model)):
            guard.uninstall(model)
        # What `mpkeras.prepare` guards stays guarded.
        prepared.guard_again(self.model)
        if self._switched is not None:
            old_jit_compile, new_jit_compile = self._switched
            self._switched = None
            if self.model.jit_compile is new_jit_compile:
                self.model.jit_compile = old_jit_compile

    def on_epoch_begin(self, epoch, logs=None):
        super().on_epoch_begin(epoch, logs)
        self._nonfinite_losses = [counts.nonfinite_losses for counts in self._at_epoch_begin]

    def _check_scale_after_batch(self, batch, logs=None):
        for i, optimizer in enumerate(self._optimizers()):
            # One number and no `_Counts`: each waits for the device, after every batch.
            lost, self._nonfinite_losses[i] = self._nonfinite_losses[i], int(number(optimizer.nonfinite_losses))
            # Where the loss itself was not finite, the scale has no part in it.
            if self._nonfinite_losses[i] > lost or not self._is_stuck(optimizer):
                continue
            if self._on_min_scale == "raise":
                # `fit` ends here, and Keras calls no `on_train_end`.
                self._put_back()
                raise FloatingPointError(self._stuck_message(optimizer))
            if not self.model.stop_training:
                self._warn_once("min scale", self._stuck_message(optimizer) + " Training stops here.")
            self.model.stop_training = True
