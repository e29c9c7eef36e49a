"""The guard walks over a model once, and again when it has changed: what comes later leaves no trace either."""

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.training import rollback

BACKEND = keras.backend.backend()
# JAX traces its steps: there the walks are part of no step.
pytestmark = pytest.mark.backends("tensorflow", "torch")
X, Y = np.array([[1.0, 2.0], [3.0, 4.0]], "float32"), np.zeros((2, 1), "float32")


class Adds(keras.layers.Layer):
    """Adds up its inputs in a variable, as layers of users do, or in what it holds beside Keras' variables."""

    def build(self, input_shape):
        self.total = self.add_weight(shape=(), trainable=False, initializer="zeros", autocast=False)
        self.held = {"native": []}

    def call(self, x, training=False):
        if training:
            self.total.assign(self.total + keras.ops.sum(x))
            for variable in self.held["native"]:
                variable.assign_add(keras.ops.sum(x))
        return x


class Doubles(keras.layers.Dense):
    """Writes its kernel in each forward pass of training."""

    def call(self, x, training=False):
        if training:
            self.kernel.assign(self.kernel * 2.0)
        return super().call(x)


def model_of(*layers):
    model = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=BACKEND == "tensorflow")
    return mpkeras.prepare(model, "float32")


def numbers(variables):
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in variables]


@pytest.fixture
def walks(monkeypatch):
    """An entry for each walk of the guard that was made."""
    made, walk = [], rollback.weights_and_others
    monkeypatch.setattr(rollback, "weights_and_others", lambda model: made.append(model) or walk(model))
    return made


def test_walks_are_made_again_only_after_a_change(walks):
    model = model_of(Adds(), keras.layers.BatchNormalization())
    model.train_on_batch(X, Y)
    assert walks
    walks.clear()
    for _ in range(3):
        model.train_on_batch(X, Y)
    assert not walks
    model.add(Adds())
    for _ in range(3):
        model.train_on_batch(X, Y)
    assert len(walks) == 1


def late_layer(model):
    layer = Adds()
    model.add(layer)
    return lambda: [layer.total]


def late_state_beside_keras(model):
    if BACKEND == "torch":
        import torch

        # Keras' layers are torch modules.
        model.layers[0].register_buffer("late", torch.zeros(()))
        model.layers[0].held["native"].append(InPlace(model.layers[0].late))
        return lambda: [model.layers[0].late]
    import tensorflow as tf

    variable = tf.Variable(0.0)
    model.layers[0].held["native"].append(variable)
    return lambda: [variable]


class InPlace:
    def __init__(self, tensor):
        self.tensor = tensor

    def assign_add(self, value):
        self.tensor.add_(value.detach())


def another_optimizer(model):
    # As the guard itself wraps one: a scale of 1 that checks only.
    model.optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.0), loss_scale=1.0)
    return lambda: [model.layers[0].total]


def frozen_layer(model):
    model.layers[1].trainable = False
    return lambda: model.layers[1].weights


def freed_layer(model):
    model.layers[1].trainable = False
    model.train_on_batch(X, Y)
    model.layers[1].trainable = True
    return lambda: model.layers[1].weights


def compiled_again(model):
    model.compile(keras.optimizers.SGD(0.0), "mae", run_eagerly=BACKEND == "tensorflow")
    return lambda: [model.layers[0].total, *model.layers[1].weights]


def layer_taken_out_and_another_put_in(model):
    late_layer(model)
    model.train_on_batch(X, Y)
    # As many layers and variables as before.
    model.pop()
    return late_layer(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        late_layer,
        late_state_beside_keras,
        another_optimizer,
        frozen_layer,
        freed_layer,
        compiled_again,
        layer_taken_out_and_another_put_in,
    ],
    ids=lambda change: change.__name__,
)
def test_a_skipped_step_leaves_no_trace_in_what_has_changed(change):
    model = model_of(Adds(), Doubles(2, kernel_initializer="ones"))
    for _ in range(2):
        model.train_on_batch(X, Y)
    state = change(model)
    y = np.zeros((2, model.output_shape[-1]), "float32")
    model.train_on_batch(X, y)
    before, skipped = numbers(state()), int(model.optimizer.skipped_steps)
    assert any(np.any(value) for value in before)
    model.train_on_batch(X * np.inf, y)
    assert int(model.optimizer.skipped_steps) == skipped + 1
    for now, then in zip(numbers(state()), before, strict=True):
        np.testing.assert_array_equal(now, then)
    model.train_on_batch(X, y)
    assert any(np.any(now != then) for now, then in zip(numbers(state()), before, strict=True))
