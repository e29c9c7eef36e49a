import keras
import numpy as np
import pytest

from mpkeras import layers, set_global_policy
from mpkeras.layers import Activation, Softmax

POLICIES = pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
GAPS = (30.0, 20.0, 16.0, 15.0, 10.0, 0.0, -30.0)


def softmax(logits):
    exponentials = np.exp(logits.astype("float64") - logits.max())
    return exponentials / exponentials.sum()


@POLICIES
@pytest.mark.parametrize("classes", [2, 1000])
@pytest.mark.parametrize("layer", [Softmax, lambda: Activation("softmax")], ids=["Softmax", "Activation"])
def test_softmax_head_trains_whatever_the_logits(policy, classes, layer, gradient):
    # P4: the gradient of the crossentropy is softmax - one_hot, also where Keras clips the probability.
    set_global_policy(policy)
    layer = layer()
    logits = np.zeros((len(GAPS), classes), "float32")
    logits[:, 0] = GAPS
    one_hot = np.eye(classes, dtype="float32")[[1] * len(GAPS)]
    expected = np.stack([softmax(row) for row in logits]) - one_hot
    for loss, label in (
        (keras.losses.CategoricalCrossentropy(), one_hot),
        (keras.losses.SparseCategoricalCrossentropy(), np.ones(len(GAPS), "int32")),
    ):
        # Of the mean over the rows.
        result = len(GAPS) * gradient(lambda x: loss(label, layer(x, training=True)), logits)  # noqa: B023
        np.testing.assert_allclose(result, expected, atol=1e-3)


@POLICIES
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_sigmoid_head_trains_whatever_the_logit(policy, label, gradient):
    set_global_policy(policy)
    layer, logits = Activation("sigmoid"), np.array(GAPS)[:, None]
    loss, labels = keras.losses.BinaryCrossentropy(), np.full(logits.shape, label)
    result = len(GAPS) * gradient(lambda x: loss(labels, layer(x, training=True)), logits)
    np.testing.assert_allclose(result, 1 / (1 + np.exp(-logits)) - label, atol=1e-3)


SOFTMAX_OF_30_AND_0 = [[1.0, 9.357623e-14]]


@pytest.mark.parametrize(
    ("layer", "exact"),
    [
        (Softmax, SOFTMAX_OF_30_AND_0),
        (lambda: Activation("softmax"), SOFTMAX_OF_30_AND_0),
        (lambda: Activation("sigmoid"), [[1.0, 0.5]]),
    ],
)
def test_predictions_are_exact(layer, exact, numbers):
    for training in (None, False):
        outputs = layer()(np.array([[30.0, 0.0]], "float32"), training=training)
        np.testing.assert_allclose(numbers(outputs), exact, rtol=1e-6)


def test_probabilities_in_training_are_those_of_softmax_to_1e_6(numbers):
    logits = np.random.default_rng(0).normal(size=(5, 7)).astype("float32") * 5
    outputs = numbers(Softmax()(logits, training=True))
    np.testing.assert_allclose(outputs, np.stack([softmax(row) for row in logits]), atol=1e-6)
    np.testing.assert_allclose(outputs.sum(axis=-1), 1.0, rtol=1e-6)


@POLICIES
@pytest.mark.parametrize("training", [False, True])
def test_masked_rows(policy, training, numbers):
    # P12: scores of ±6e4, one row masked altogether.
    set_global_policy(policy)
    scores = np.array([[6e4, -6e4, 6e4], [6e4, -6e4, 6e4], [6e4, -6e4, 6e4]], "float32")
    mask = np.array([[False, False, False], [False, True, False], [True, True, True]])
    outputs = numbers(Softmax()(scores, mask=mask, training=training))
    np.testing.assert_array_equal(outputs, [[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.0, 0.5]])


def test_several_axes_and_other_activations(numbers):
    set_global_policy("mixed_float16")
    outputs = Softmax(axis=[1, 2])(np.zeros((1, 2, 2), "float32"), training=True)
    np.testing.assert_allclose(numbers(outputs), np.full((1, 2, 2), 0.25), rtol=1e-6)
    np.testing.assert_array_equal(numbers(Activation("relu")(np.array([[7e4, -1.0]], "float32"))), [[7e4, 0.0]])


@pytest.mark.backends("tensorflow")
def test_keras_finds_the_logits():
    set_global_policy("mixed_float16")
    logits = np.array([[2.0, 1.0]], "float32")
    for layer in (Softmax(), Activation("softmax"), Activation("sigmoid")):
        np.testing.assert_array_equal(layer(logits)._keras_logits, logits)


@pytest.mark.parametrize("activation", ["softmax", "relu"])
@pytest.mark.parametrize("output_dtype", [None, "compute"])
def test_the_mask_of_the_input_survives(activation, output_dtype):
    set_global_policy("mixed_float16")
    # In float32: Keras 3.9 loses the mask of an input that it casts.
    inputs = keras.layers.Masking(dtype="float32")(np.array([[[1.0, 2.0], [0.0, 0.0]]], "float32"))
    outputs = Activation(activation, output_dtype=output_dtype)(inputs)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(outputs._keras_mask), [[True, False]])


OPTIONS = {
    "BatchNormalization": {},
    "LayerNormalization": {},
    "GroupNormalization": {"groups": 2},
    "RMSNormalization": {},
}
NORMALIZATIONS = pytest.mark.parametrize(("name", "options"), OPTIONS.items(), ids=OPTIONS)


@NORMALIZATIONS
@pytest.mark.parametrize("value", [0.0, 300.0, 1e5])
def test_same_numbers_as_in_float32(name, options, value, numbers):
    # P6, with an epsilon that is 0 in float16.
    inputs = (value * np.array([[1, -1, 1, -1], [-1, -1, 1, 1]])).astype("float32")
    stock = getattr(keras.layers, name)(epsilon=1e-12, **options)
    set_global_policy("mixed_float16")
    layer = getattr(layers, name)(epsilon=1e-12, **options)
    for kwargs in ({"training": False}, {"training": True}) if name == "BatchNormalization" else ({},):
        outputs = numbers(layer(inputs, **kwargs))
        assert np.isfinite(outputs).all()
        np.testing.assert_array_equal(outputs, numbers(stock(inputs, **kwargs)))


@NORMALIZATIONS
@POLICIES
def test_the_result_is_not_rounded_to_the_dtype_of_the_input(name, options, policy, numbers, dtype_of):
    set_global_policy(policy)
    narrow = keras.ops.cast([[0.0, 1.0, 2.0, 3.0]], policy.removeprefix("mixed_"))
    expected = getattr(keras.layers, name)(dtype="float32", **options)(keras.ops.cast(narrow, "float32"))
    outputs = getattr(layers, name)(**options)(narrow)
    assert dtype_of(outputs) == "float32"
    np.testing.assert_array_equal(numbers(outputs), numbers(expected))


def test_batch_statistics_are_those_of_float32(numbers):
    set_global_policy("mixed_float16")
    layer = layers.BatchNormalization(momentum=0.0)
    layer(np.array([[7e4], [9e4]], "float32"), training=True)
    # Mean 8e4, variance (1e4)**2: both beyond float16.
    np.testing.assert_allclose(numbers(layer.moving_mean), [8e4], rtol=1e-6)
    # torch subtracts the squared mean, 64 times as large as the variance, in float32.
    np.testing.assert_allclose(numbers(layer.moving_variance), [1e8], rtol=1e-4)


def test_batch_normalization_takes_a_mask(numbers):
    set_global_policy("mixed_float16")
    inputs = keras.layers.Masking(dtype="float32")(np.array([[[7e4] * 2, [9e4] * 2, [0.0] * 2]], "float32"))
    layer = layers.BatchNormalization(epsilon=1e-12)
    outputs = layer(inputs, training=True)
    np.testing.assert_allclose(numbers(outputs)[0, :2], [[-1.0, -1.0], [1.0, 1.0]], rtol=1e-5)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(outputs._keras_mask), [[True, True, False]])
