import copy
import csv
import re
import warnings
from contextlib import nullcontext

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.callbacks import MixedPrecision
from mpkeras.policies.loss_scaling import DynamicLossScale
from mpkeras.scaling.optimizer import LossScaleOptimizer
from tests.cases import first_quick
from tests.sixteen_bits import without_outputs
from tests.step_modes import QUICK_TO_COMPILE, snapshot

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


def fit(model, *callbacks, y=Y, **options):
    options = {"batch_size": 2, "verbose": 0, "shuffle": False, **options}
    return model.fit(X, y, callbacks=list(callbacks), **options)


@pytest.mark.slow
def test_logs_reach_history_csv_and_the_progress_bar_beside_validation(tmp_path, capsys):
    writes = keras.callbacks.CSVLogger(str(tmp_path / "log.csv"))
    precision = MixedPrecision("mixed_float16", loss_scale=64.0)
    history = fit(compiled(), writes, precision, epochs=2, validation_data=(X, Y), verbose=1).history
    assert history["loss_scale"] == [64.0, 64.0]
    assert history["skipped_steps"] == [0, 0]
    assert {"loss", "mae", "val_loss", "val_mae"} <= set(history)
    with open(tmp_path / "log.csv") as file:
        assert [float(row["loss_scale"]) for row in csv.DictReader(file)] == [64.0, 64.0]
    printed = capsys.readouterr().out
    assert "loss_scale: 64.0" in printed and "skipped_steps: 0" in printed


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


@pytest.mark.slow
@pytest.mark.parametrize("is_own", [False, True], ids=["of the class", "of the instance"])
def test_on_the_way_out_the_train_step_is_put_back_and_the_rest_stays(is_own):
    model = compiled()
    own = model.train_step
    if is_own:
        model.train_step = own
    fit(model, MixedPrecision("mixed_float16"))
    assert vars(model).get("train_step") is (own if is_own else None)
    assert isinstance(model.optimizer, LossScaleOptimizer)
    assert [layer.compute_dtype for layer in model.layers[:2]] == ["float16", "float32"]
    # Not the function of the guarded step, which Keras goes on with: a bad step shows, as in stock Keras.
    before, skipped = model.get_weights(), int(model.optimizer.skipped_steps)
    model.train_on_batch(X[:2], np.full((2, 1), np.inf, "float32"))
    assert int(model.optimizer.skipped_steps) == skipped + 1
    assert any((new != old).any() for new, old in zip(model.get_weights(), before, strict=True))
    # It trains on without the callback, and its logs are Keras' own.
    assert set(fit(model).history) == {"loss", "mae"}


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
    with pytest.raises(RuntimeError, match="boom") if ends == "by an exception" else nullcontext():
        fit(model, callback, seen)
    assert seen.jit_compile[0] is False
    if ends == "by an exception":
        fit(model, callback)
    assert model.jit_compile is True


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


@pytest.mark.slow
def test_after_a_fit_that_raised_it_starts_afresh():
    class Boom(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise RuntimeError("boom")

    model, callback = compiled(), MixedPrecision("mixed_float16")
    with pytest.raises(RuntimeError, match="boom"):
        fit(model, callback, Boom())
    if keras.backend.backend() == "jax":
        model.jax_state_sync()
    optimizer = model.optimizer
    fit(model, MixedPrecision("mixed_float16"))
    assert model.optimizer is optimizer
    assert "train_step" not in vars(model)
    with pytest.raises(RuntimeError, match="boom"):
        fit(model, callback, Boom())
    callback.on_train_end()
    assert "train_step" not in vars(model)


@pytest.mark.slow
@pytest.mark.parametrize("on_min_scale", ["warn", "stop", "raise"])
def test_at_the_lowest_scale_it_warns_once_stops_or_raises(on_min_scale):
    model = compiled()
    rule = DynamicLossScale(4.0, min_scale=1.0)
    precision = MixedPrecision(without_outputs("mixed_float16"), loss_scale=rule, on_min_scale=on_min_scale)
    # Finite losses, whose gradients are beyond float16 at any scale from 1 up.
    y = np.full((8, 1), 1e6, "float32")
    expects = pytest.raises(FloatingPointError, match="down to its lowest, 1:")
    with warnings.catch_warnings(record=True) as caught, expects if on_min_scale == "raise" else nullcontext():
        warnings.simplefilter("always", UserWarning)
        fit(model, precision, y=y, epochs=3)
    messages = [str(w.message) for w in caught if w.category is UserWarning]
    assert "train_step" not in vars(model)
    if on_min_scale == "raise":
        # Each was tried at 4, 2 and 1.
        assert int(model.optimizer.skipped_steps) == 2 and messages == []
        return
    assert len(model.history.epoch) == (3 if on_min_scale == "warn" else 1)
    (stuck,) = [m for m in messages if "steps in a row were skipped at every loss scale down to its lowest, 1:" in m]
    assert ("Training stops here" in stuck) == (on_min_scale == "stop")
    if on_min_scale == "warn":
        assert stuck.startswith("4 steps") and len(messages) == 2
        assert sum("All 4 steps of epoch 1 were skipped" in m for m in messages) == 1


@pytest.mark.slow
@pytest.mark.parametrize("of_user", [False, True], ids=["a copy", "a subclass"])
def test_who_looks_after_each_batch_may_be_a_copy_or_have_a_method_of_its_own(of_user):
    batches = []

    class Counting(MixedPrecision):
        def on_train_batch_end(self, batch, logs=None):
            batches.append(batch)
            super().on_train_batch_end(batch, logs)

    arguments = {"loss_scale": DynamicLossScale(2.0, min_scale=1.0), "on_min_scale": "raise"}
    make = Counting if of_user else MixedPrecision
    precision = copy.copy(make(without_outputs("mixed_float16"), **arguments))
    with pytest.raises(FloatingPointError, match="scale"):
        fit(compiled(), precision, y=Y * 1e6, batch_size=1, epochs=2)
    assert bool(batches) == of_user


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


ONES = np.ones((12, 2), "float32")


def messages(x, y, rule, batch_size=4, **options):
    """Returns what an epoch tells that begins at the scale of `rule`, and the optimizer."""
    keras.utils.set_random_seed(7)
    with mpkeras.policy_scope("mixed_float16"):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", **QUICK_TO_COMPILE)
    precision = MixedPrecision(without_outputs("mixed_float16"), loss_scale=rule, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0, callbacks=[precision])
    return [str(w.message) for w in caught if issubclass(w.category, UserWarning)], model.optimizer


LOST_ALL = "All 3 steps.*"
TO_THE_LOWEST = DynamicLossScale(2.0**10, min_scale=2.0**5)
MESSAGES = {
    "a loss that is not finite": (
        (np.nan, 1.0, DynamicLossScale(2.0**10), 2.0**10),
        ["1 of 3 steps skipped in epoch 1: each time the loss itself was not finite: the forward"],
    ),
    "an overflow now and then": ((1e4, 1.0, DynamicLossScale(2.0**10), 2.0**9), []),
    # 2 * 1e4 / 4 * 2**5 is over 65504.
    "at every scale": (
        (1e4, 1e4, TO_THE_LOWEST, 2.0**7),
        [
            f"{LOST_ALL}of epoch 1 were skipped, nothing was learned: the loss was finite, but grad.*"
            "The loss scale has come down",
            "3 steps in a row were skipped at every loss scale down to its lowest, 32:",
        ],
    ),
    # 2 * 1e4 / 4 * 2**10 is over 65504: a scale that cannot come down is what has to be changed.
    "at a fixed scale": (
        (1e4, 1e4, mpkeras.FixedLossScale(2.0**10), 2.0**10),
        [f"{LOST_ALL}The loss scale is fixed at 1024: lower it"],
    ),
    # 2 * 1.6e5 / 4 is over 65504 by itself: there is nothing to lower.
    "without a scale": (
        (1.6e5, 1.6e5, mpkeras.FixedLossScale(1.0), 1.0),
        [f"{LOST_ALL}gradients were not. Train in 'mixed_bfloat16'"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(("case", "expected"), MESSAGES.values(), ids=MESSAGES)
def test_the_message_tells_a_loss_that_is_not_finite_from_gradients_that_overflow(case, expected):
    """P7: once an epoch, with the numbers; an overflow now and then is nothing to speak of."""
    row, targets, rule, scale = case
    x, y = ONES.copy(), np.full((12, 1), targets, "float32")
    (x if np.isnan(row) else y)[5] = row
    told, optimizer = messages(x, y, rule)
    assert float(optimizer.loss_scale) == scale
    assert all(re.match(pattern, text) for pattern, text in zip(expected, told, strict=True))


class Distance(keras.layers.Layer):
    """The slope of the root at 0 is not finite, in whatever dtype."""

    def call(self, x):
        return keras.ops.sqrt(keras.ops.sum((x - x[:, :1]) ** 2, axis=-1, keepdims=True))


@pytest.mark.slow
@pytest.mark.parametrize("policy", first_quick(["float32", "mixed_bfloat16"]))
def test_a_slope_that_is_not_finite_in_the_range_of_float32_is_not_laid_on_the_policy(policy):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, kernel_initializer="ones"), Distance()])
    model.compile(keras.optimizers.SGD(0.1), "mse", **QUICK_TO_COMPILE)
    with pytest.warns(UserWarning, match="All 2 steps of epoch 1.*gradients were not. Look for a root") as told:
        model.fit(np.ones((4, 2)), np.ones((4, 1)), batch_size=2, verbose=0, callbacks=[MixedPrecision(policy)])
    assert not any("mixed_bfloat16" in str(warning.message) for warning in told)


@pytest.mark.slow
@pytest.mark.parametrize("overflowing", first_quick([1, 2]))
def test_two_skipped_steps_in_a_row_at_the_lowest_scale_are_told_and_one_is_not(overflowing):
    y = np.ones((6, 1), "float32")
    # 2 * 1e5 / 2 is over 65504.
    y[6 - 2 * overflowing :] = 1e5
    told, optimizer = messages(ONES[:6], y, DynamicLossScale(1.0, min_scale=1.0), batch_size=2)
    assert int(optimizer.skipped_steps) == overflowing
    assert len(told) == overflowing - 1
    assert all(text.startswith("2 steps in a row were skipped with the loss scale at its lowest, 1:") for text in told)


@pytest.mark.parametrize("policy", first_quick(["mixed_float16", "mixed_bfloat16"]))
def test_where_the_loss_is_not_finite_the_range_of_float16_is_named_where_it_counts(policy):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse", **QUICK_TO_COMPILE)
    with pytest.warns(UserWarning, match="All 2 steps of epoch 1.*the loss itself was not finite") as told:
        model.fit(np.full((4, 2), np.inf), np.ones((4, 1)), batch_size=2, verbose=0, callbacks=[MixedPrecision(policy)])
    (message,) = (str(warning.message) for warning in told if "the loss itself" in str(warning.message))
    assert ("beyond float16's 65504" in message) == (policy == "mixed_float16")
    assert "keep the layers that `mpkeras.callbacks.NumericsMonitor` names in float32" in message


def test_a_loss_that_is_not_finite_is_no_matter_of_the_lowest_scale():
    rule = DynamicLossScale(1.0, min_scale=1.0)
    (told,), optimizer = messages(ONES * np.nan, ONES[:, :1], rule, on_min_scale="raise")
    assert re.match("All 3 steps of epoch 1 were skipped.*each time the loss itself.*forward pass is at fault", told)
    assert int(optimizer.consecutive_skips) == 3
