import contextlib
import csv
import warnings

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.callbacks import MixedPrecision
from mpkeras.policies.loss_scaling import DynamicLossScale
from mpkeras.scaling.optimizer import LossScaleOptimizer
from tests.sixteen_bits import without_outputs
from tests.step_modes import snapshot

X = np.linspace(-1, 1, 48, dtype="float32").reshape(8, 6)
Y = np.full((8, 1), 0.1, "float32")


def compiled(**options):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(4, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dense(1, kernel_initializer="zeros"),
        ]
    )
    model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"], **options)
    return model


def overflowing_targets():
    """Finite losses whose gradients are beyond float16 at any scale from 1 up."""
    return np.full((8, 1), 1e6, "float32")


def fit(model, *callbacks, y=Y, **options):
    options = {"batch_size": 2, "verbose": 0, "shuffle": False, **options}
    return model.fit(X, y, callbacks=list(callbacks), **options)


def test_logs_reach_history_csv_and_validation(tmp_path):
    path = tmp_path / "log.csv"
    history = fit(
        compiled(),
        keras.callbacks.CSVLogger(str(path)),
        MixedPrecision("mixed_float16", loss_scale=64.0),
        epochs=2,
        validation_data=(X, Y),
    ).history
    assert history["loss_scale"] == [64.0, 64.0]
    assert history["skipped_steps"] == [0, 0]
    assert {"loss", "mae", "val_loss", "val_mae"} <= set(history)
    with open(path) as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss_scale"]) for row in rows] == [64.0, 64.0]


@pytest.mark.slow
@pytest.mark.parametrize("made_by", ["Keras", "Keras' wrapper", "mpkeras"])
def test_fit_with_accumulation(made_by):
    """P14: two epochs of two windows of three batches, against plain NumPy; the same optimizer object both times."""
    optimizer = keras.optimizers.SGD(0.125, gradient_accumulation_steps=3)
    wrapper = {"Keras": None, "Keras' wrapper": keras.optimizers.LossScaleOptimizer, "mpkeras": LossScaleOptimizer}
    x = np.random.default_rng(1).integers(-4, 5, size=(12, 2)).astype("float32") / 4
    y = x @ np.array([[1.0], [-2.0]], "float32")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    for _ in range(2):
        make = wrapper[made_by]
        model.compile(optimizer if make is None else make(optimizer, initial_scale=64.0), "mse")
        callback = MixedPrecision("mixed_float16", loss_scale=64.0)
        model.fit(x, y, batch_size=2, shuffle=False, verbose=0, callbacks=[callback])
        assert optimizer.gradient_accumulation_steps == 3
    kernel = np.zeros((2, 1))
    for _ in range(2):
        for rows in (slice(0, 6), slice(6, 12)):
            kernel -= 0.125 * 2 * x[rows].T @ (x[rows] @ kernel - y[rows]) / 6
    # The products and the prediction have 11 significant bits.
    np.testing.assert_allclose(model.get_weights()[0], kernel, rtol=1e-2)
    assert int(model.optimizer.iterations) == int(optimizer.iterations) == 4
    assert int(model.optimizer.accepted_steps) == 6


@pytest.mark.backends("tensorflow")
def test_logs_reach_the_tensorboard_event_file(tmp_path):
    import tensorflow as tf

    board = keras.callbacks.TensorBoard(str(tmp_path))
    fit(compiled(), MixedPrecision("mixed_float16", loss_scale=64.0), board)
    values = {}
    for path in (tmp_path / "train").glob("events*"):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            for value in event.summary.value:
                values[value.tag] = float(tf.make_ndarray(value.tensor)) if value.tensor.dtype == 1 else None
    assert values["epoch_loss_scale"] == 64.0
    assert values["epoch_skipped_steps"] == 0.0


def test_progress_bar_shows_scale_and_skips(capsys):
    fit(compiled(), MixedPrecision("mixed_float16", loss_scale=64.0), verbose=1)
    printed = capsys.readouterr().out
    assert "loss_scale: 64.0" in printed
    assert "skipped_steps: 0" in printed


def test_on_the_way_out_the_train_step_is_put_back_and_the_rest_stays():
    model = compiled()
    fit(model, MixedPrecision("mixed_float16"))
    assert "train_step" not in vars(model)
    assert isinstance(model.optimizer, LossScaleOptimizer)
    assert model.layers[0].compute_dtype == "float16"
    assert model.layers[1].compute_dtype == "float32"
    # trains on without the callback, and its logs are Keras' own
    assert set(fit(model).history) == {"loss", "mae"}


def test_after_fit_a_step_is_the_models_own_again():
    """Not the function of the guarded step, which Keras goes on with: a bad step shows, as in stock Keras."""
    model = compiled()
    fit(model, MixedPrecision("float32"))
    before = keras.ops.convert_to_numpy(model.layers[1].moving_mean).copy()
    model.train_on_batch(X[:2], np.full((2, 1), np.inf, "float32"))
    assert int(model.optimizer.skipped_steps) == 1
    assert (keras.ops.convert_to_numpy(model.layers[1].moving_mean) != before).any()


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("ends", ["in the end", "by an exception", "switched by its user"])
def test_jit_compile_is_put_back(ends):
    class Seen(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.jit_compile = []

        def on_train_batch_end(self, batch, logs=None):
            self.jit_compile.append(self.model.jit_compile)
            if ends == "by an exception":
                raise RuntimeError("boom")
            if ends == "switched by its user":
                self.model.jit_compile = True

    model, seen = compiled(jit_compile=ends != "switched by its user"), Seen()
    callback = MixedPrecision("mixed_bfloat16", jit_compile=False)
    with pytest.raises(RuntimeError, match="boom") if ends == "by an exception" else contextlib.nullcontext():
        fit(model, callback, seen)
    assert seen.jit_compile[0] is False
    if ends == "by an exception":
        fit(model, callback)
    assert model.jit_compile is True


def test_a_train_step_of_the_instance_is_put_back():
    model = compiled()
    own = model.train_step
    model.train_step = own
    fit(model, MixedPrecision("mixed_bfloat16"))
    assert vars(model)["train_step"] is own


@pytest.mark.slow
def test_repeated_fit_goes_on_where_it_stopped():
    straight, twice = compiled(), compiled()
    rule = DynamicLossScale(256.0, dynamic_growth_steps=3)
    fit(straight, MixedPrecision("mixed_float16", loss_scale=rule), epochs=2)
    callback = MixedPrecision("mixed_float16", loss_scale=rule)
    fit(twice, callback, epochs=1)
    optimizer = twice.optimizer
    fit(twice, callback, epochs=2, initial_epoch=1)
    assert twice.optimizer is optimizer
    assert snapshot(twice.variables + optimizer.variables) == snapshot(
        straight.variables + straight.optimizer.variables
    )
    # 8 steps, growth on the third and the sixth
    assert float(optimizer.dynamic_scale) == 1024.0


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "jax")
def test_steps_per_execution():
    one, several = compiled(), compiled(steps_per_execution=3)
    histories = [fit(model, MixedPrecision("mixed_float16", loss_scale=64.0)) for model in (one, several)]
    assert snapshot(one.variables) == snapshot(several.variables)
    assert histories[0].history == histories[1].history


@pytest.mark.slow
@pytest.mark.parametrize("is_prepared", [False, True], ids=["plain", "prepared"])
def test_evaluate_and_predict_leave_no_guard(is_prepared):
    model = compiled()
    if is_prepared:
        mpkeras.prepare(model, "mixed_bfloat16", loss_scale=4.0)
    callback = MixedPrecision("mixed_bfloat16", loss_scale=4.0)
    model.evaluate(X, Y, callbacks=[callback], verbose=0)
    assert ("train_step" in vars(model)) is is_prepared
    model.predict(X, callbacks=[callback], verbose=0)
    assert ("train_step" in vars(model)) is is_prepared
    # One callback goes from one to the other, and what is a validation in `fit` ends nothing.
    assert fit(model, callback, validation_data=(X, Y), epochs=2).history["loss_scale"] == [4.0, 4.0]
    model.evaluate(X, Y, callbacks=[callback], verbose=0)
    assert ("train_step" in vars(model)) is is_prepared


def test_after_a_fit_that_raised_it_starts_afresh():
    class Boom(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise RuntimeError("boom")

    model = compiled()
    with pytest.raises(RuntimeError, match="boom"):
        fit(model, MixedPrecision("mixed_float16"), Boom())
    if keras.backend.backend() == "jax":
        model.jax_state_sync()
    optimizer = model.optimizer
    fit(model, MixedPrecision("mixed_float16"))
    assert model.optimizer is optimizer
    assert "train_step" not in vars(model)
    callback = MixedPrecision("mixed_float16")
    with pytest.raises(RuntimeError, match="boom"):
        fit(model, callback, Boom())
    callback.on_train_end()
    assert "train_step" not in vars(model)


def test_backup_and_restore_finds_the_optimizer_it_saved(tmp_path):
    """Whatever the order of the callbacks: the optimizer is wrapped before training begins."""
    model = compiled()
    backup = keras.callbacks.BackupAndRestore(str(tmp_path / "b"), delete_checkpoint=False)
    fit(model, backup, MixedPrecision("mixed_float16", loss_scale=DynamicLossScale(256.0)), epochs=1)
    fresh = compiled()
    again = keras.callbacks.BackupAndRestore(str(tmp_path / "b"), delete_checkpoint=False)
    # the backup is of epoch 1 of 1: nothing is left to train
    fit(fresh, again, MixedPrecision("mixed_float16", loss_scale=DynamicLossScale(256.0)), epochs=1)
    assert int(fresh.optimizer.iterations) == 4
    assert snapshot(fresh.variables) == snapshot(model.variables)


def test_at_the_lowest_scale_it_warns_once():
    model = compiled()
    with pytest.warns(UserWarning) as warned:
        fit(
            model,
            MixedPrecision(without_outputs("mixed_float16"), loss_scale=DynamicLossScale(4.0, min_scale=1.0)),
            y=overflowing_targets(),
            epochs=3,
        )
    messages = [str(w.message) for w in warned if w.category is UserWarning]
    assert sum("All 4 steps of epoch 1 were skipped" in m for m in messages) == 1
    assert sum("4 steps in a row were skipped at every loss scale down to its lowest, 1:" in m for m in messages) == 1
    assert len(messages) == 2


def test_at_the_lowest_scale_it_raises():
    model = compiled()
    with pytest.raises(FloatingPointError, match="down to its lowest, 1:"):
        fit(
            model,
            MixedPrecision(
                without_outputs("mixed_float16"), loss_scale=DynamicLossScale(4.0, min_scale=1.0), on_min_scale="raise"
            ),
            y=overflowing_targets(),
        )
    # Each was tried at 4, 2 and 1.
    assert int(model.optimizer.skipped_steps) == 2
    assert "train_step" not in vars(model)


def test_at_the_lowest_scale_it_stops_cleanly():
    model = compiled()
    with pytest.warns(UserWarning) as warned:
        history = fit(
            model,
            MixedPrecision(
                without_outputs("mixed_float16"), loss_scale=DynamicLossScale(4.0, min_scale=1.0), on_min_scale="stop"
            ),
            y=overflowing_targets(),
            epochs=5,
        )
    assert any("Training stops here" in str(w.message) for w in warned)
    assert len(history.epoch) == 1
    assert "train_step" not in vars(model)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"policy": "mixed_flot16"}, ValueError, "mixed_float16"),
        ({"on_min_scale": "panic"}, ValueError, "on_min_scale='panic'"),
        ({"loss_scale": "often"}, ValueError, "'dynamic'"),
        ({"jit_compile": 0}, TypeError, "jit_compile=0"),
        ({"rollback": None}, TypeError, "rollback=None"),
        ({"rollback": "False"}, TypeError, "rollback='False'"),
    ],
)
def test_bad_arguments_are_named_at_once(arguments, error, message):
    with pytest.raises(error, match=message):
        MixedPrecision(**arguments)


@pytest.mark.slow
def test_mixed_training_ends_where_float32_ends():
    def final(policy):
        model = compiled()
        return fit(model, MixedPrecision(policy), epochs=30).history["loss"][-1]

    single = final("float32")
    assert final("mixed_float16") == pytest.approx(single, rel=0.05)
    assert final("mixed_bfloat16") == pytest.approx(single, rel=0.2)  # 8 significant bits


@pytest.mark.slow
def test_the_message_tells_a_loss_that_is_not_finite_from_gradients_that_overflow():
    """P7: once an epoch, with the numbers; an overflow now and then is nothing to speak of."""
    x, y = np.ones((12, 2), "float32"), np.ones((12, 1), "float32")

    def messages(x, y, rule=None):
        with mpkeras.policy_scope("mixed_float16"):
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            rule = rule or mpkeras.DynamicLossScale(2.0**10)
            precision = MixedPrecision(without_outputs("mixed_float16"), loss_scale=rule)
            model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[precision])
        found = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
        return found, float(keras.ops.convert_to_numpy(model.optimizer.loss_scale))

    with_nan, overflowing = x.copy(), y.copy()
    with_nan[5] = np.nan
    overflowing[5] = 1e4
    (message,), scale = messages(with_nan, y)
    assert message.startswith("1 of 3 steps skipped in epoch 1: each time the loss itself was not finite: the forward")
    assert scale == 2.0**10
    assert messages(x, overflowing) == ([], 2.0**9)
    # 2 * 1e4 / 4 * 2**5 is over 65504.
    (message, stuck), scale = messages(x, y + 1e4, mpkeras.DynamicLossScale(2.0**10, min_scale=2.0**5))
    assert stuck.startswith("3 steps in a row were skipped at every loss scale down to its lowest, 32:")
    assert message.startswith("All 3 steps of epoch 1 were skipped, nothing was learned: the loss was finite, but grad")
    assert scale == 2.0**7
    assert "The loss scale has come down" in message
    # 2 * 1e4 / 4 * 2**10 is over 65504: a scale that cannot come down is what has to be changed.
    (message,), scale = messages(x, y + 1e4, mpkeras.FixedLossScale(2.0**10))
    assert "The loss scale is fixed at 1024: lower it" in message
    assert scale == 2.0**10
    # 2 * 1.6e5 / 4 is over 65504 by itself: there is nothing to lower.
    (message,), scale = messages(x, y + 1.6e5, mpkeras.FixedLossScale(1.0))
    assert "gradients were not. Train in 'mixed_bfloat16'" in message


def test_a_loss_that_is_not_finite_is_no_matter_of_the_lowest_scale():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    rule = mpkeras.DynamicLossScale(1.0, min_scale=1.0)
    x = np.full((12, 2), np.nan, "float32")
    with pytest.warns(UserWarning, match="forward pass is at fault"):
        model.fit(
            x,
            np.ones((12, 1)),
            batch_size=4,
            verbose=0,
            callbacks=[MixedPrecision("mixed_float16", loss_scale=rule, on_min_scale="raise")],
        )
    assert int(model.optimizer.consecutive_skips) == 3


@pytest.mark.parametrize("overflowing", [1, 2])
def test_two_skipped_steps_in_a_row_at_the_lowest_scale_are_told_and_one_is_not(overflowing):
    with mpkeras.policy_scope("mixed_float16"):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    y = np.ones((8, 1), "float32")
    # 2 * 1e5 / 2 is over 65504.
    y[8 - 2 * overflowing :] = 1e5
    rule = DynamicLossScale(1.0, min_scale=1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        precision = MixedPrecision(without_outputs("mixed_float16"), loss_scale=rule)
        model.fit(np.ones((8, 2), "float32"), y, batch_size=2, shuffle=False, verbose=0, callbacks=[precision])
    messages = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    assert int(model.optimizer.skipped_steps) == overflowing
    if overflowing == 1:
        assert messages == []
    else:
        (message,) = messages
        assert message.startswith("2 steps in a row were skipped with the loss scale at its lowest, 1:")
