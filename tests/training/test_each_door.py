"""One meaning, whichever door: the same model trained through each way in is the same model afterwards."""

import functools

import keras
import numpy as np
import pytest
from keras import layers

import mpkeras
from mpkeras import _keras
from tests.training.models import DOORS, MakesItsLayers, made_by, number

POLICY = mpkeras.Policy(
    "mixed_float16",
    keep_float32=(*mpkeras.Policy("mixed_float16").keep_float32, "path:wide"),
    loss_scale=mpkeras.DynamicLossScale(2.0**12, dynamic_growth_steps=3),
)
X = np.random.default_rng(3).normal(size=(48, 6)).astype("float32")
Y = np.random.default_rng(4).integers(0, 3, size=(48,))
# The third of six batches overflows in float16: its loss is NaN. (A ReLU can swallow a NaN on TensorFlow.)
X[17] = 1e38
BATCHES = [slice(start, start + 8) for start in range(0, 48, 8)]
LOSS = "sparse_categorical_crossentropy"
EXPECTED = {"dense": "float16", "norm": "float32", "wide": "float32", "head": "float32"}


def dense_and_norm():
    return [layers.Dense(8, name="dense"), layers.BatchNormalization(name="norm")]


def wide_and_head():
    return [layers.Dense(8, "tanh", name="wide"), layers.Dense(3, "softmax", name="head")]


def sequential():
    return keras.Sequential([keras.Input((6,)), *dense_and_norm(), *wide_and_head()])


def nested():
    inputs = keras.Input((6,))
    wide, head = wide_and_head()
    return keras.Model(inputs, head(wide(keras.Sequential([keras.Input((6,)), *dense_and_norm()])(inputs))))


class NotBuilt(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = MakesItsLayers(8)
        self.wide, self.head = wide_and_head()

    def call(self, x, training=False):
        return self.head(self.wide(self.first(x, training=training)))


# The callback and `autoprepare` prepare any model as `prepare` does: other kinds than the first are for `-m ""`.
CASES = [
    pytest.param(door, make, id=f"{door}-{make.__name__}", marks=[pytest.mark.matrix] * is_seldom)
    for make in (sequential, nested, NotBuilt)
    for door in (*DOORS, "make_train_step")
    for is_seldom in [make is not sequential and door in ("callback", "autoprepare")]
]


def trained(door, make):
    """Returns the model after an epoch, with the scale and the skipped steps that are told."""
    keras.utils.set_random_seed(11)
    optimizer = keras.optimizers.SGD(0.05)
    if door != "make_train_step":
        model, callbacks = made_by(door, make, POLICY, optimizer, LOSS)
        history = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0, callbacks=callbacks).history
        return model, {name: history[name][-1] for name in ("loss_scale", "skipped_steps")}
    model = mpkeras.apply_policy(make(), POLICY)
    with mpkeras.policy_scope(POLICY):
        step = mpkeras.make_train_step(model, optimizer, LOSS)
    for rows in BATCHES:
        step(X[rows], Y[rows])
    return model, {name: int(getattr(step.optimizer, name)) for name in ("loss_scale", "skipped_steps")}


@functools.cache
def kernel_in_float32_without_the_bad_batch(make):
    keras.utils.set_random_seed(11)
    model = make()
    model.compile(keras.optimizers.SGD(0.05), LOSS)
    for rows in (*BATCHES[:2], *BATCHES[3:]):
        model.train_on_batch(X[rows], Y[rows])
    return number(head_of(model).kernel)


def head_of(model):
    return next(layer for layer in model.layers if layer.name == "head")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:1 of 6 steps skipped:UserWarning")  # said where there are epochs
@pytest.mark.filterwarnings("ignore:.*is given numbers beyond float16:UserWarning")  # the fault of that step
@pytest.mark.parametrize(("door", "make"), CASES)
def test_layers_rules_checks_and_logs(door, make):
    model, logs = trained(door, make)
    mpkeras.set_global_policy(None)
    inner = [layer for layer in _keras.flatten_layers(model, include_self=False) if layer.name in EXPECTED]
    assert {layer.name: layer.compute_dtype for layer in inner} == EXPECTED
    # Two finite steps, a skipped one that halves nothing, as its loss itself is NaN, and three finite ones: the scale
    # doubles once, on the first or on the third of them.
    assert logs == {"loss_scale": 2.0**13, "skipped_steps": 1}
    expected = kernel_in_float32_without_the_bad_batch(make)
    np.testing.assert_allclose(number(head_of(model).kernel), expected, rtol=5e-3, atol=1e-3)  # 11 bits
