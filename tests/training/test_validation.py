"""A validation that is not finite while training is: it is said, and its epoch does not pass as the best one."""

import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

import mpkeras
from mpkeras.callbacks import MixedPrecision, NumericsMonitor

RNG = np.random.default_rng(4)
X = RNG.normal(size=(12, 6)).astype("float32")
Y = X[:, :1]
SOUND = X[:8], Y[:8]


def with_row(row, value):
    """Validation data of which one row is `value`."""
    x = X[:8].copy()
    x[row] = value
    return x, Y[:8]


def model_of(metrics=None, **options):
    keras.utils.set_random_seed(1)
    hidden = layers.Dense(12, "relu", kernel_initializer="ones", name="wide")
    model = keras.Sequential([keras.Input((6,)), hidden, layers.Dense(1, name="head")], name="net")
    model.compile(keras.optimizers.SGD(1e-3), "mae", metrics=metrics, **options)
    return model


def by_prepare(policy, model, callbacks=(), **options):
    mpkeras.prepare(model, policy)
    return model.fit(X, Y, verbose=0, batch_size=4, callbacks=list(callbacks), **options)


def by_callback(policy, model, callbacks=(), **options):
    return model.fit(X, Y, verbose=0, batch_size=4, callbacks=[MixedPrecision(policy), *callbacks], **options)


def by_both(policy, model, callbacks=(), **options):
    return by_callback(policy, mpkeras.prepare(model, policy), callbacks, **options)


def by_autoprepare(policy, model, callbacks=(), **options):
    with mpkeras.autoprepare(policy):
        model.compile(model.optimizer, model.loss, metrics=list(options.pop("metrics", [])))
    return model.fit(X, Y, verbose=0, batch_size=4, callbacks=list(callbacks), **options)


def by_the_line(policy, model, callbacks=(), **options):
    with mpkeras.policy_scope(policy):
        model = model_of(options.pop("metrics", None))
    return model.fit(X, Y, verbose=0, batch_size=4, callbacks=list(callbacks), **options)


def told_in(function, *args, **options):
    """Returns what `function` returns, and what mpkeras warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = function(*args, **options)
    return result, [str(warning.message) for warning in caught if warning.category is UserWarning]


FAULTS = {
    # Finite in float16; the product of six such numbers with a kernel of ones is not.
    "an overflow": ("mixed_float16", with_row(5, 2e4)),
    "inf in float32": ("float32", with_row(5, np.inf)),
}


@pytest.mark.slow
@pytest.mark.parametrize("door", [by_prepare, by_callback, by_both, by_autoprepare, by_the_line])
@pytest.mark.parametrize("fault", FAULTS)
def test_it_is_said_once_with_epoch_and_batch(fault, door):
    policy, data = FAULTS[fault]
    if door is by_the_line and policy == "float32":
        pytest.skip("under float32 the line leaves a model to Keras")
    model = model_of()
    history, told = told_in(door, policy, model, validation_data=data, epochs=3)
    assert np.isfinite(history.history["loss"]).all() and not np.isfinite(history.history["val_loss"]).any()
    (text,) = told
    assert text.startswith("In the validation of epoch 1 `val_loss` is ")
    assert " from batch 1 on, while training is finite." in text and "NumericsMonitor" in text


@pytest.mark.slow
@pytest.mark.parametrize("door", [by_prepare, by_callback])
def test_what_is_sound_or_lost_in_training_already_says_nothing_of_validation(door):
    options = {"validation_data": SOUND, "epochs": 2}
    assert told_in(door, "mixed_float16", model_of(), **options)[1] == []

    def empty_class(y, y_pred):
        """A share of no examples: NaN in training, too."""
        return ops.sum(ops.cast(y_pred, "float32") * 0.0) / ops.sum(y * 0.0)

    assert told_in(door, "mixed_float16", model_of([empty_class]), **options)[1] == []
    lost = model_of()
    lost.get_layer("head").bias.assign([np.nan])
    told = told_in(door, "float32", lost, **options)[1]
    assert told and not any("validation" in text for text in told)


def test_with_a_monitor_the_layer_is_named():
    policy, data = FAULTS["an overflow"]
    model = model_of()
    _, told = told_in(by_prepare, policy, model, [NumericsMonitor()], validation_data=data, epochs=2)
    (text,) = [text for text in told if "'net/wide'" in text]
    assert text.startswith("Validation is not finite from batch 1 on: the output of layer 'net/wide' ")
    assert len(told) == 2 and model.test_function is not None
    assert not hasattr(model.test_function, "mpkeras_kept_batches")
    alone = model_of()
    _, told = told_in(alone.fit, X, Y, verbose=0, validation_data=with_row(1, np.inf), callbacks=[NumericsMonitor()])
    assert len(told) == 2 and any("from batch 0 on: layer 'net/wide' was given" in text for text in told), told


def test_a_monitor_says_where_the_targets_are_at_fault():
    x, y = SOUND
    bad = x, np.where(np.arange(8)[:, None] == 6, np.nan, y).astype("float32")
    _, told = told_in(by_callback, "mixed_bfloat16", model_of(), [NumericsMonitor()], validation_data=bad)
    assert any(text.startswith("Validation is not finite from batch 1 on: the targets") for text in told), told


class Changing(keras.utils.PyDataset):
    """Validation data in which one target is `bad` for the first epochs."""

    def __init__(self, bad, epochs):
        super().__init__()
        self.bad, self.epochs = bad, epochs

    def __len__(self):
        return 2

    def __getitem__(self, i):
        x, y = X[4 * i : 4 * i + 4], Y[4 * i : 4 * i + 4].copy()
        if i == 1 and self.epochs > 0:
            y[2] = self.bad
        return x, y


class Next(keras.callbacks.Callback):
    """Goes on to the next epoch of `Changing`."""

    def __init__(self, data):
        super().__init__()
        self._data = data

    def on_epoch_end(self, epoch, logs=None):
        self._data.epochs -= 1


def largest(y, y_pred):
    return ops.max(ops.cast(y, "float32"), axis=-1)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(keras.callbacks.EarlyStopping("loss"), "_is_improvement"), reason="an older Keras")
@pytest.mark.parametrize("door", [by_prepare, by_callback])
@pytest.mark.parametrize(
    ("bad", "monitor", "mode"),
    [(np.nan, "val_loss", "auto"), (-np.inf, "val_largest", "min"), (np.inf, "val_largest", "max")],
)
def test_an_epoch_that_is_not_finite_is_never_the_best(bad, monitor, mode, door, tmp_path):
    """The first two are not: to Keras the first one is the best then, and with NaN there it stays so."""
    stopping = keras.callbacks.EarlyStopping(monitor, mode=mode, patience=9, restore_best_weights=True)
    saving = keras.callbacks.ModelCheckpoint(tmp_path / "best.keras", monitor, mode=mode, save_best_only=True)
    slower = keras.callbacks.ReduceLROnPlateau(monitor, mode=mode, patience=9)
    data = Changing(bad, 2)
    keepers = [stopping, saving, slower, Next(data)]
    model = model_of([largest])
    history, told = told_in(door, "mixed_bfloat16", model, keepers, validation_data=data, epochs=5)
    values = np.array(history.history[monitor])
    assert not np.isfinite(values[:2]).any() and np.isfinite(values[2:]).all()
    best = values[2:].max() if mode == "max" else values[2:].min()
    assert stopping.best == saving.best == slower.best == best and stopping.best_epoch >= 2
    assert len([text for text in told if "is not taken for the best" in text]) == 1
    assert all("_is_improvement" not in vars(keeper) for keeper in keepers)


def test_an_error_in_fit_leaves_the_callbacks_as_they_were():
    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise RuntimeError("stop")

    saving = keras.callbacks.EarlyStopping("val_loss")
    with pytest.raises(RuntimeError, match="stop"):
        by_prepare("float32", model_of(), [saving, Stop()], validation_data=with_row(2, np.inf))
    assert "_is_improvement" not in vars(saving)


def test_evaluate_says_it_too():
    model = mpkeras.prepare(model_of([largest]), "mixed_float16")
    _, bad = FAULTS["an overflow"]
    for _ in range(2):
        loss, told = told_in(model.evaluate, *bad, verbose=0, batch_size=2)
    assert not np.isfinite(loss[0]) and told == []
    model = mpkeras.prepare(model_of([largest]), "mixed_float16")
    _, told = told_in(model.evaluate, *bad, verbose=0, batch_size=2, return_dict=True)
    assert len(told) == 1 and "In `evaluate` `loss` is " in told[0] and "from batch 2 on" in told[0]
    sound = mpkeras.prepare(model_of([largest]), "mixed_float16")
    assert told_in(sound.evaluate, *SOUND, verbose=0)[1] == []
    by_callback_alone = model_of()
    callbacks = [MixedPrecision("mixed_float16")]
    _, told = told_in(by_callback_alone.evaluate, *bad, verbose=0, callbacks=callbacks)
    assert len(told) == 1 and "In `evaluate` `loss` is " in told[0]
    assert "evaluate" not in vars(by_callback_alone)
