import keras
import numpy as np
import pytest

from mpkeras import layers
from mpkeras.policies import set_global_policy

LAYERS = pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("BatchNormalization", {}, id="BatchNormalization"),
        pytest.param("LayerNormalization", {}, id="LayerNormalization"),
        pytest.param("GroupNormalization", {"groups": 2}, id="GroupNormalization"),
        pytest.param("RMSNormalization", {}, id="RMSNormalization"),
    ],
)
POLICIES = pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])


@LAYERS
@POLICIES
@pytest.mark.parametrize("value", [0.0, 300.0, 1e5])
@pytest.mark.parametrize("training", [False, True])
def test_same_numbers_as_in_float32(name, options, policy, value, training, numbers):
    # P6, with an epsilon that is 0 in float16.
    kwargs = {"training": training} if name == "BatchNormalization" else {}
    inputs = (value * np.array([[1, -1, 1, -1], [-1, -1, 1, 1]])).astype("float32")
    expected = getattr(keras.layers, name)(epsilon=1e-12, **options)(inputs, **kwargs)
    set_global_policy(policy)
    outputs = numbers(getattr(layers, name)(epsilon=1e-12, **options)(inputs, **kwargs))
    assert np.isfinite(outputs).all()
    np.testing.assert_array_equal(outputs, numbers(expected))


@LAYERS
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
