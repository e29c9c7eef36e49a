"""The gradient of a bias in bfloat16 on TensorFlow, against counts and sums in float64."""

import threading

import keras
import numpy as np
import pytest
from keras import layers

import mpkeras
from tests.cases import first_quick

pytestmark = pytest.mark.backends("tensorflow")

# Layer, the shape of a batch, the axes over which the gradient of the bias is summed.
KINDS = {
    "Dense": (lambda: layers.Dense(3, activation="softplus"), (3072, 5), (0,)),
    "Dense of sequences": (lambda: layers.Dense(4), (64, 48, 5), (0, 1)),
    "EinsumDense": (lambda: layers.EinsumDense("abc,cde->abde", (96, 2, 3), bias_axes="de"), (32, 96, 4), (0, 1)),
    "bias of places": (lambda: layers.EinsumDense("abc,cd->abd", (4, 3), bias_axes="bd"), (3072, 4, 2), (0,)),
    "Conv1D": (lambda: layers.Conv1D(3, 2, padding="same", activation="tanh"), (48, 64, 2), (0, 1)),
    "Conv2D": (lambda: layers.Conv2D(3, 3, padding="same"), (12, 16, 16, 2), (0, 1, 2)),
    "Conv3D": (lambda: layers.Conv3D(2, 2, padding="same"), (6, 8, 8, 8, 2), (0, 1, 2, 3)),
    "Conv2DTranspose": (lambda: layers.Conv2DTranspose(3, 2, padding="same"), (12, 16, 16, 2), (0, 1, 2)),
    "DepthwiseConv2D": (lambda: layers.DepthwiseConv2D(2, padding="same"), (12, 16, 16, 2), (0, 1, 2)),
    "SeparableConv1D": (lambda: layers.SeparableConv1D(3, 2, padding="same"), (48, 64, 2), (0, 1)),
}


def run(layer, x, weights_of_outputs=None, jit_compile=False):
    """Returns the outputs of `layer` and the gradients of their weighted sum, of its weights and of its inputs."""
    import tensorflow as tf

    @tf.function(jit_compile=jit_compile)
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = layer(x)
            factors = 1.0 if weights_of_outputs is None else weights_of_outputs
            loss = tf.reduce_sum(tf.cast(outputs, tf.float32) * factors)
        return outputs, tape.gradient(loss, [*(weight.value for weight in layer.trainable_weights), x])

    outputs, gradients = step(tf.constant(x))
    return keras.ops.convert_to_numpy(outputs), [np.asarray(gradient, "float64") for gradient in gradients]


def converted(make, shape):
    layer = make()
    inputs = keras.Input(shape[1:])
    # Not the layer that makes the output, which is in float32.
    mpkeras.apply_policy(keras.Model(inputs, layers.Dense(1)(layer(inputs))), "mixed_bfloat16")
    assert layer.compute_dtype == "bfloat16"
    return layer


@pytest.mark.parametrize("jit_compile", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", first_quick(KINDS))
def test_the_sum_of_many_gradients(kind, jit_compile):
    make, shape, axes = KINDS[kind]
    x = np.random.default_rng(3).normal(size=shape).astype("float32")
    layer = converted(make, shape)
    stock = type(layer).from_config(layer.get_config() | {"dtype": "mixed_bfloat16"})
    stock.build((None, *shape[1:]))
    stock.set_weights(layer.get_weights())
    factors = np.random.default_rng(4).uniform(0.5, 1.5, stock.compute_output_shape(shape)).astype("float32")
    if layer.activation is keras.activations.linear:
        # 16 bits hold the factors that come back, the sum in more of them is rounded once.
        factors = factors.astype("float16").astype("float32")
    outputs, gradients = run(layer, x, factors, jit_compile)
    expected_outputs, expected = run(stock, x, factors, jit_compile)
    np.testing.assert_array_equal(outputs.astype("float32"), expected_outputs.astype("float32"))
    bias = len(layer.trainable_weights) - 1
    for i, (found, right) in enumerate(zip(gradients, expected, strict=True)):
        if i != bias:
            np.testing.assert_array_equal(found, right)
    if layer.activation is keras.activations.linear:
        np.testing.assert_allclose(gradients[bias], factors.astype("float64").sum(axes), rtol=2**-7)
    else:
        wide = type(layer).from_config(layer.get_config() | {"dtype": "float32"})
        wide.build((None, *shape[1:]))
        wide.set_weights(layer.get_weights())
        np.testing.assert_allclose(gradients[bias], run(wide, x, factors, jit_compile)[1][bias], rtol=0.02)


@pytest.mark.parametrize(
    "policies", first_quick([["mixed_bfloat16", "mixed_float8"], ["mixed_bfloat16"], ["mixed_float8"]])
)
def test_in_fit_and_on_the_way_back(policies):
    """2,048 rows pull each bias of 1 by the mean of their gradients, 1."""
    hidden = layers.Dense(16, kernel_initializer="zeros", activation="relu", bias_initializer="ones")
    model = keras.Sequential([keras.Input((16,)), hidden, layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.25), lambda y, y_pred: y_pred - y, jit_compile=False)
    config = hidden.get_config()
    for policy in policies:
        mpkeras.prepare(model, policy)
    assert hidden.get_config()["activation"] == config["activation"]
    x = np.ones((2048, 16), "float32")
    model.fit(x, np.zeros((2048, 1)), batch_size=2048, verbose=0)
    np.testing.assert_allclose(hidden.bias.numpy(), 16 * [0.75], rtol=1e-6)
    assert isinstance(hidden.bias, keras.Variable) and hidden.activation is keras.activations.relu
    mpkeras.apply_policy(model, "float32")
    assert "call" not in vars(hidden)


def test_a_layer_without_a_bias():
    layer = converted(lambda: layers.EinsumDense("ab,bc->ac", 3, kernel_initializer="ones"), (2, 4))
    np.testing.assert_array_equal(keras.ops.cast(layer(np.ones((2, 4))), "float32"), np.full((2, 3), 4.0))


def test_two_threads_at_once_leave_the_layer_as_it_was():
    """The second one would come while the first is in the layer, and leave after it."""
    second_is_in, first_has_left = threading.Event(), threading.Event()
    calls: list = []

    def activation(x):
        calls.append(x)
        if len(calls) == 1:
            second_is_in.wait(0.2)
        else:
            second_is_in.set()
            first_has_left.wait(0.2)
        return x

    layer = converted(lambda: layers.Dense(3, activation=activation), (4, 5))
    x = np.ones((4, 5), "float32")
    calls.clear()

    def first():
        layer(inputs=x)
        first_has_left.set()

    threads = [threading.Thread(target=first), threading.Thread(target=layer, args=(x,))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 2
    assert isinstance(layer.bias, keras.Variable) and layer.activation is activation


class NamedLSTMCell(layers.LSTMCell):
    """A cell of the user's: it is called as Keras calls it."""


class NamedGRUCell(layers.GRUCell):
    """Another one, with two biases."""


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize(
    "cell",
    [
        lambda: layers.SimpleRNN(3),
        lambda: layers.LSTM(3, unit_forget_bias=False),
        lambda: layers.GRU(3),
        lambda: layers.GRU(3, reset_after=False, return_sequences=True),
        lambda: layers.Bidirectional(layers.LSTM(3)),
        lambda: layers.RNN([layers.GRUCell(3), layers.LSTMCell(3)]),
        lambda: layers.RNN(NamedLSTMCell(3, unit_forget_bias=False)),
        lambda: layers.RNN([NamedGRUCell(3), layers.LSTMCell(3)]),
    ],
)
def test_biases_of_recurrent_cells(cell, jit_compile):
    """Against float32: 3,000 rows of five steps, each of which adds to every gradient."""
    updates = []
    x = np.random.default_rng(6).normal(size=(3000, 5, 4)).astype("float32")
    for policy in ("float32", "mixed_bfloat16"):
        keras.utils.set_random_seed(3)
        inputs = keras.Input(x.shape[1:])
        outputs = layers.Dense(1, use_bias=False, kernel_initializer="ones")(cell()(inputs))
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(1.0), lambda y, y_pred: y_pred - y, jit_compile=jit_compile)
        mpkeras.prepare(model, policy)
        before = {weight.path: weight.numpy() for weight in model.trainable_weights}
        model.train_on_batch(x, np.zeros((3000, *outputs.shape[1:])))
        updates.append([before[weight.path] - weight.numpy() for weight in model.trainable_weights])
    for right, found in zip(*updates, strict=True):
        np.testing.assert_allclose(found, right, atol=0.02 * np.abs(right).max())
