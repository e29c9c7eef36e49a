"""The gradient of a weight that is used in many places is summed in float32 on one device, too."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import mpkeras

pytestmark = pytest.mark.backends("jax")
ROWS, STEPS, WIDTH = 48, 160, 4


class Scaled(layers.Layer):
    def build(self, input_shape):
        self.scale = self.add_weight(shape=(), initializer="ones", name="scale")

    def call(self, x):
        return x * self.scale


class Placed(layers.Layer):
    """Adds a number for each place in a row: its gradient is a sum over rows alone."""

    def build(self, input_shape):
        self.places = self.add_weight(shape=(1, *input_shape[1:]), initializer="zeros", name="places")

    def call(self, x):
        return x + self.places


def sequence(layer):
    inputs = keras.Input((STEPS, WIDTH))
    return inputs, layer(inputs)


def rows():
    ids = keras.Input((STEPS,), dtype="int32")
    return ids, layers.Embedding(3, WIDTH)(ids)


PARTS = {
    "bias": lambda: sequence(layers.Dense(WIDTH)),
    "einsum": lambda: sequence(layers.EinsumDense("abc,cd->abd", (STEPS, WIDTH), bias_axes="d")),
    "convolution": lambda: sequence(layers.Conv1D(WIDTH, 3)),
    "attention": lambda: sequence(lambda x: layers.MultiHeadAttention(2, 2)(x, x)),
    "rows": rows,
    "scale": lambda: sequence(Scaled()),
    "places": lambda: sequence(Placed()),
}


def updates(part, policy, way):
    """Returns what one step takes from each weight: the gradients of a sum in which every place counts the same."""
    keras.utils.set_random_seed(0)
    inputs, hidden = PARTS[part]()
    model = keras.Model(inputs, layers.Dense(1, use_bias=False, kernel_initializer="ones")(hidden))
    generator = np.random.default_rng(1)
    x = generator.uniform(0.5, 1.5, (ROWS, *inputs.shape[1:])).astype("float32")
    x = generator.integers(0, 3, x.shape) * (x > 1.2) if part == "rows" else x
    y = np.zeros((ROWS, *model.output_shape[1:]), "float32")

    def loss(y_true, y_pred):
        return y_pred - y_true

    before = [np.array(ops.convert_to_numpy(weight)) for weight in model.weights]
    if way == "fit":
        model.compile(keras.optimizers.SGD(1.0), loss)
        mpkeras.prepare(model, policy)
        model.fit(x, y, batch_size=ROWS, verbose=0)
    else:
        mpkeras.apply_policy(model, policy)
        mpkeras.make_train_step(model, keras.optimizers.SGD(1.0), loss)(x, y)
    after = [ops.convert_to_numpy(weight) for weight in model.weights]
    return [old - new for old, new in zip(before, after, strict=True)]


@pytest.mark.parametrize("way", ["fit", pytest.param("make_train_step", marks=pytest.mark.slow)])
@pytest.mark.parametrize("policy", ["mixed_bfloat16", pytest.param("mixed_float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("part", PARTS)
def test_a_gradient_is_that_of_float32_however_many_places_it_comes_from(part, policy, way):
    for found, expected in zip(updates(part, policy, way), updates(part, "float32", way), strict=True):
        largest = np.abs(expected).max()
        # Shifted scores are the same probabilities: the bias of the keys has a gradient of rounding errors alone.
        if largest > 1e-5:
            np.testing.assert_allclose(found, expected, atol=0.02 * largest)
