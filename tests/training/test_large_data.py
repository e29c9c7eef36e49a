"""Layers that would make inf of the data in float16 are named before they train or predict, and no others."""

import ast
import functools

import keras
import numpy as np
import pytest
from keras import layers

import mpkeras
from tests.cases import first_quick
from tests.step_modes import QUICK_TO_COMPILE
from tests.training.models import DOORS, made_by, warned_of

said_by = functools.partial(warned_of, "is given numbers beyond float16's 65504")

# Pascals: of 40 rows the last few alone are beyond float16.
PRESSURES = np.stack([np.linspace(20000.0, 101325.0, 40), np.linspace(-1.0, 1.0, 40)], axis=1).astype("float32")
TARGETS = PRESSURES[:, 1:]


def plain(*first):
    return keras.Sequential([keras.Input((2,)), *first, layers.Dense(3, name="first"), layers.Dense(1)], name="net")


class Batches(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, number):
        return PRESSURES[number::2], TARGETS[number::2]


@pytest.mark.parametrize("door", first_quick(DOORS))
def test_a_layer_is_named_once_with_the_number_before_it_trains(door):
    model, callbacks = made_by(door, plain, "mixed_float16", **QUICK_TO_COMPILE)
    fit = functools.partial(model.fit, PRESSURES, TARGETS, batch_size=40, shuffle=False, verbose=0, callbacks=callbacks)
    (message,) = said_by(fit)
    # The first beyond it is number 22: 20000 + 22 (101325 - 20000) / 39
    assert message.startswith("Layer 'net/first' is given numbers beyond float16's 65504: 65875.6 becomes inf.")
    assert not said_by(fit)


@pytest.mark.parametrize("method", first_quick(["predict", "evaluate", "fit", "step"]))
def test_predictions_evaluations_data_sets_and_steps_say_so_too(method):
    model, _ = made_by("prepare", plain, "mixed_float16", **QUICK_TO_COMPILE)
    step = mpkeras.make_train_step(model, "sgd", "mse", jit_compile=False)
    run = {
        "predict": lambda: model.predict(PRESSURES, verbose=0),
        "evaluate": lambda: model.evaluate(-PRESSURES, TARGETS, verbose=0),
        "fit": lambda: model.fit(Batches(), verbose=0),
        "step": lambda: step(PRESSURES, TARGETS),
    }[method]
    (message,) = said_by(run)
    assert ("becomes -inf" if method == "evaluate" else "becomes inf") in message


@pytest.mark.parametrize(
    ("policy", "first", "x"),
    [
        ("mixed_bfloat16", (), PRESSURES),
        ("mixed_float16", (lambda: layers.Normalization(mean=(60000.0, 0.0), variance=(6e8, 1.0)),), PRESSURES),
        ("mixed_float16", (), np.minimum(PRESSURES, 65504.0)),
        # Of numbers that no dtype holds other messages tell.
        ("mixed_float16", (), np.where(PRESSURES > 65504.0, np.inf, PRESSURES)),
        ("mixed_float16", (), np.where(PRESSURES > 65504.0, np.nan, PRESSURES)),
    ],
    ids=["bfloat16", "normalized", "within", "inf", "NaN"],
)
def test_healthy_data_and_data_that_is_not_finite_are_not_named(policy, first, x):
    model, _ = made_by("prepare", lambda: plain(*(make() for make in first)), policy)
    assert not said_by(lambda: model.predict(x, verbose=0))


def first():
    return layers.Dense(2, "tanh", kernel_initializer=keras.initializers.RandomNormal(stddev=1e-5), name="first")


def joined():
    """Data that is taken apart, turned and joined in front of the layer that computes with it."""
    inputs = keras.Input((2,))
    parts = [layers.Reshape((1, 1))(inputs[:, :1]), layers.Dropout(0.5)(layers.Reshape((1, 1))(inputs[:, 1:]))]
    return keras.Model(inputs, layers.Dense(1)(first()(layers.ReLU()(layers.Flatten()(layers.Concatenate()(parts))))))


def alone():
    return keras.Sequential([keras.Input((2,)), first(), layers.Dense(1)])


class Flattening(keras.Model):
    def __init__(self):
        super().__init__()
        self.flatten, self.first, self.head = layers.Flatten(), first(), layers.Dense(1)

    def call(self, x):
        return self.head(self.first(self.flatten(x)))


def flattening():
    model = Flattening()
    model(PRESSURES)
    return model


@pytest.mark.parametrize("make", first_quick([joined, alone, flattening]), ids=["joined", "alone", "subclassed"])
def test_the_rules_that_are_named_keep_the_layer_in_float32(make):
    """The layer that computes is named, and in one message all that takes the data to it."""
    keras.utils.set_random_seed(3)
    model = make()
    expected = model.predict(PRESSURES, verbose=0)
    model.compile("sgd", "mse", **QUICK_TO_COMPILE)
    mpkeras.prepare(model, "mixed_float16")
    (message,) = said_by(lambda: model.predict(PRESSURES, verbose=0))
    assert message.partition("' is given")[0].endswith("first")
    named = ast.literal_eval(message.partition("`keep_float32=")[2].partition("`")[0])
    mpkeras.prepare(model, mpkeras.Policy("mixed_float16", keep_float32=named))
    assert not said_by(lambda: model.predict(PRESSURES, verbose=0))
    np.testing.assert_allclose(model.predict(PRESSURES, verbose=0), expected, rtol=0, atol=2e-3)


def test_where_nothing_computes_with_them_the_layer_that_hands_them_on_is_named():
    model = keras.Sequential([keras.Input((2,)), layers.Reshape((2, 1), name="turned")])
    model.compile("sgd", "mse")
    mpkeras.prepare(model, mpkeras.Policy("mixed_float16", keep_float32=[]))
    (message,) = said_by(lambda: model.predict(PRESSURES, verbose=0))
    assert "'turned' is given" in message or "'sequential/turned' is given" in message
