"""`Guarded`: a callback for skipped steps, which there are in a model whose train step is guarded."""

import keras

from mpkeras.callbacks.mixed_precision import MixedPrecision
from mpkeras.conversion.plan import computes_in
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES
from mpkeras.training import guard


class Guarded(keras.callbacks.Callback):
    """Guards the train step of a model for this `fit`, as `MixedPrecision()` does, unless somebody else does."""

    def __init__(self):
        super().__init__()
        # Guards the train step where nobody else does.
        self._precision: MixedPrecision | None = None
        self._own_guard: object = None

    def set_model(self, model):
        super().set_model(model)
        self._precision = None
        present = guard.guard_of(model)
        # One of its own is left over from a `fit` that raised.
        if present is None or present is self._own_guard:
            # Under the global policy a float32 model would be converted, which nobody asked for.
            self._precision = MixedPrecision(None if computes_in(model, SIXTEEN_BIT_DTYPES) else "float32")
            self._precision.set_model(model)
            self._own_guard = guard.guard_of(model)

    def on_train_begin(self, logs=None):
        present = guard.guard_of(self.model)
        if present is None:
            raise ValueError(
                f"Expected a model whose train step is guarded. Received: model '{self.model.name}', whose guard was "
                f"taken away. Put `{type(self).__name__}` behind the callback that replaces the model's `train_step` "
                "or compiles it."
            )
        if present is not self._own_guard:
            self._precision = None  # A callback behind this one has prepared the model, and looks after it.
        if self._precision is not None:
            self._precision.on_train_begin(logs)

    def on_train_end(self, logs=None):
        if self._precision is not None:
            self._precision.on_train_end(logs)

    def on_test_end(self, logs=None):
        if self._precision is not None:
            self._precision.on_test_end(logs)

    def on_predict_end(self, logs=None):
        if self._precision is not None:
            self._precision.on_predict_end(logs)

    def on_epoch_begin(self, epoch, logs=None):
        if self._precision is not None:
            self._precision.on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch, logs=None):
        if self._precision is not None:
            self._precision.on_epoch_end(epoch, logs)
