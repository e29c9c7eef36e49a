"""What a callback puts on a model for one `fit` is gone when that `fit` has ended, in whatever way."""

import contextlib

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras._replaced import replaced_attributes
from mpkeras.callbacks import BlackBox, Float32Fallback, MixedPrecision, NumericsMonitor
from mpkeras.training import guard

RNG = np.random.default_rng(3)
X = RNG.normal(size=(24, 5)).astype("float32")
Y = X[:, :2].copy()
SKIPS = pytest.mark.filterwarnings("ignore:.*skipped")
OWN_LOGS = {"loss_scale", "skipped_steps", "grad_norm", "zero_grad_fraction"}


class Ending(keras.callbacks.Callback):
    """Raises what Ctrl-C does, in one of the places where it may come."""

    def __init__(self, where):
        super().__init__()
        self._where = where

    def on_train_begin(self, logs=None):
        self._end("before the first batch")

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 1:
            self._end("before a step")

    def on_train_batch_end(self, batch, logs=None):
        if batch == 1:
            self._end("behind a step")

    def on_test_batch_end(self, batch, logs=None):
        self._end("in validation")

    def _end(self, where):
        if where == self._where:
            raise KeyboardInterrupt


def compiled(is_prepared):
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    return mpkeras.prepare(model, "mixed_bfloat16") if is_prepared else model


def stopped_fit(model, callbacks, where):
    with contextlib.suppress(KeyboardInterrupt):
        data = {"validation_data": (X, Y), "validation_batch_size": 12}
        model.fit(X, Y, batch_size=6, verbose=0, shuffle=False, callbacks=[*callbacks, Ending(where)], **data)
        raise AssertionError("it ended by itself")


def names(model):
    """What is replaced for training; what belongs to the layers' policy stays."""
    found = replaced_attributes(model)
    return sorted((entry.name, entry.kind) for entry in found if entry.kind in ("guard", "callback"))


def with_a_bad_row():
    x = X.copy()
    x[7, 1] = np.nan
    return x


CALLBACKS = {
    "BlackBox": BlackBox,
    "NumericsMonitor": lambda folder: NumericsMonitor(gradients=True),
    "Float32Fallback": lambda folder: Float32Fallback(patience=1),
    "MixedPrecision": lambda folder: MixedPrecision("mixed_bfloat16", jit_compile=False),
}


@SKIPS
@pytest.mark.slow
@pytest.mark.parametrize("where", ["behind a step", "before a step", "in validation", "before the first batch"])
@pytest.mark.parametrize("is_prepared", [False, True], ids=["plain", "prepared"])
@pytest.mark.parametrize("callback", CALLBACKS)
def test_the_next_fit_is_without_a_callback_whose_fit_was_stopped(callback, is_prepared, where, tmp_path):
    model = compiled(is_prepared)
    replaced, logs = names(model), OWN_LOGS & {"loss_scale", "skipped_steps"} if is_prepared else set()
    jit_compile = model.jit_compile
    own = CALLBACKS[callback](tmp_path)
    stopped_fit(model, [own], where)
    if is_prepared:
        # A prepared model sees how its `fit` ends.
        assert names(model) == replaced and not hasattr(model.train_function, "mpkeras_kept_batches")
    history = model.fit(with_a_bad_row(), Y, batch_size=6, verbose=0, shuffle=False).history
    assert OWN_LOGS & set(history) == logs
    assert names(model) == replaced and not hasattr(model.train_function, "mpkeras_kept_batches")
    assert model.jit_compile == jit_compile
    assert list(tmp_path.iterdir()) == [] and getattr(own, "findings", []) == []
    # And it can be asked again.
    history = model.fit(X, Y, batch_size=6, verbose=0, callbacks=[own]).history
    assert {"loss_scale", "skipped_steps"} <= set(history) and names(model) == replaced


@pytest.mark.slow
@SKIPS
@pytest.mark.parametrize("is_prepared", [False, True], ids=["plain", "prepared"])
def test_single_batches_behind_a_stopped_fit_are_not_its_own(is_prepared, tmp_path):
    model, box = compiled(is_prepared), BlackBox(tmp_path)
    stopped_fit(model, [box], "behind a step")
    model.train_on_batch(with_a_bad_row()[6:12], Y[6:12])
    assert list(tmp_path.iterdir()) == [] and not hasattr(model.train_function, "mpkeras_kept_batches")
    assert not box._kept.executions and box._numbers is None


@pytest.mark.slow
@SKIPS
def test_steps_that_a_callback_takes_by_itself_are_not_of_the_fit(tmp_path):
    class Replaying(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 0:
                self.model.train_on_batch(with_a_bad_row()[6:12], Y[6:12])

    model, box = compiled(True), BlackBox(tmp_path)
    bad = X.copy()
    bad[20] = np.nan
    model.fit(bad, Y, batch_size=6, verbose=0, shuffle=False, callbacks=[box, Replaying()])
    assert [path.stem for path in box.capsules] == [f"{model.name}-epoch1-step3"]


@pytest.mark.slow
def test_a_fit_in_a_callback_of_a_fit_leaves_the_outer_one_guarded():
    guarded = []

    class Fitting(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0:
                keras.Model.fit(self.model, X, Y, batch_size=12, verbose=0)
                self.model.fit(X, Y, batch_size=12, verbose=0)
            guarded.append(guard.is_guarded(self.model))

    model = compiled(False)
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[MixedPrecision("mixed_bfloat16"), Fitting()])
    assert guarded == [True, True] and not guard.is_guarded(model) and names(model) == []


@pytest.mark.slow
def test_after_a_fit_of_another_model_was_stopped_both_are_as_they_should_be():
    first, second, precision = compiled(False), compiled(False), MixedPrecision("mixed_bfloat16")
    stopped_fit(first, [precision], "behind a step")
    assert guard.is_guarded(first)
    second.fit(X, Y, verbose=0, callbacks=[precision])
    assert names(first) == [] == names(second)
