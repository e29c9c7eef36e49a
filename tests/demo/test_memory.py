import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.demo import memory
from mpkeras.policies.dtypes import bytes_of


def small_model():
    inputs = keras.Input((4,))
    x = keras.layers.Dense(8)(inputs)
    x = x + 1.0
    return keras.Model(inputs, keras.layers.Dense(3, activation="softmax")(x))


X = np.ones((5, 4), "float32")


def test_layer_outputs_in_float32():
    # 8 numbers, 8 after the addition, 3 probabilities: 19 of 4 bytes, ten examples.
    assert memory.layer_output_bytes(small_model(), X, batch_size=10) == 10 * 19 * 4


def test_layer_outputs_by_the_policy_the_layers_have_now():
    model = small_model()
    model.compile("sgd", "mse")
    mpkeras.prepare(model, "mixed_bfloat16")
    # The dense layer and the addition in two bytes, the softmax head in four.
    assert memory.layer_output_bytes(model, X, batch_size=10) == 10 * (16 * 2 + 3 * 4)


def test_counting_leaves_the_model_as_it_was():
    model = small_model()
    before = [keras.ops.convert_to_numpy(v) for v in model.variables]
    config = model.get_config()
    memory.layer_output_bytes(model, X, batch_size=10)
    assert model.get_config() == config
    for variable, old in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), old)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float32", 24),
        ("bfloat16", 12),
        ("float16", 12),
        ("int32", 24),
        ("uint8", 6),
        ("bool", 6),
    ],
)
def test_bytes_of_a_tensor(dtype, expected):
    tensor = keras.ops.zeros((2, 3), dtype)
    assert bytes_of(tensor.shape, keras.backend.standardize_dtype(tensor.dtype)) == expected


def test_xla_tells_its_temporary_bytes_on_jax_only(backend):
    model = small_model()
    model.compile("sgd", "mse", jit_compile=backend == "jax")
    xla_memory = memory.XlaMemory(X, np.ones((5, 3), "float32"))
    model.fit(
        X,
        np.ones((5, 3), "float32"),
        callbacks=[mpkeras.callbacks.MixedPrecision("mixed_bfloat16"), xla_memory],
        verbose=0,
    )
    assert (xla_memory.temporary_bytes is not None) == (backend == "jax")
