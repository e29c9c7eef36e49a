import inspect

import keras
import numpy as np
import pytest

from mpkeras import _keras
from mpkeras.layers import Activation, float32_island
from mpkeras.policies import policy_scope, set_global_policy

SIXTEEN_BITS = pytest.mark.parametrize("narrow", ["float16", "bfloat16"])


@float32_island
def dtypes(*args, **kwargs):
    """The dtypes of what arrives."""
    return keras.tree.map_structure(
        lambda x: keras.backend.standardize_dtype(x.dtype) if hasattr(x, "dtype") else x, (args, kwargs)
    )


class Scaled(keras.layers.Layer):
    def build(self, input_shape):
        self.scale = self.add_weight(shape=(1,), initializer="ones")

    @float32_island
    def call(self, inputs, mask=None):
        scale = keras.ops.convert_to_tensor(self.scale)
        self.seen = [keras.backend.standardize_dtype(x.dtype) for x in (inputs["x"][0], scale)]
        return inputs["x"][0] * scale


@SIXTEEN_BITS
def test_sixteen_bit_tensors_arrive_in_float32_wherever_they_are(narrow):
    x = keras.ops.ones((2,), narrow)
    i = keras.ops.ones((2,), "int32")
    args, kwargs = dtypes(x, [x, {"deep": (x, i)}], None, "text", key=x, flag=True)
    assert args == ("float32", ["float32", {"deep": ("float32", "int32")}], None, "text")
    assert kwargs == {"key": "float32", "flag": True}


def test_numpy_arrays_and_wider_tensors():
    args, _ = dtypes(np.ones(2, "float16"), np.float16(1), np.ones(2, "float64"), np.ones(2, "bool"))
    assert args == ("float32", "float32", "float64", "bool")


@SIXTEEN_BITS
def test_symbolic_tensors(narrow):
    @float32_island
    def square_sum(x):
        return keras.ops.sum(x * x, axis=-1)

    with policy_scope(f"mixed_{narrow}"):
        inputs = keras.Input((2,), dtype=narrow)
        model = keras.Model(inputs, square_sum(inputs))
    assert model.outputs[0].dtype == "float32"
    # 300**2 overflows float16, 2 * 300**2 needs more than bfloat16's 8 bits.
    outputs = model(keras.ops.cast([[300.0, 300.0]], narrow))
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(outputs), [1.8e5])


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        pytest.param("mixed_float16", "float32", id="mixed_float16"),
        pytest.param("mixed_bfloat16", "float32", id="mixed_bfloat16"),
        pytest.param("float16", "float32", id="16-bit variables are read in float32"),
        pytest.param("float32", "float32", id="float32"),
    ],
)
def test_variables_of_a_method_are_read_in_float32(policy, expected, dtype_of):
    layer = Scaled(dtype=policy)
    outputs = layer({"x": [np.ones((2, 3), "float32")]})
    assert layer.seen == [expected, expected]
    assert dtype_of(outputs) == expected
    assert layer({"x": [keras.Input((3,))]}).dtype == expected
    # Outside, everything is as before.
    assert _keras.autocast_dtype() is None


@pytest.mark.backends("tensorflow", "torch")
def test_float64_stays_float64():
    layer = Scaled(dtype="float64")
    layer({"x": [np.ones((2, 3), "float64")]})
    assert layer.seen == ["float64", "float64"]


def test_the_scope_ends_with_an_exception():
    class Failing(keras.layers.Layer):
        def build(self, input_shape):
            self.scale = self.add_weight(shape=(1,), initializer="ones")

        def call(self, x):
            with pytest.raises(RuntimeError, match="inside"):
                self.fail(x)
            return x * self.scale

        @float32_island
        def fail(self, x):
            raise RuntimeError("inside")

    outputs = Failing(dtype="mixed_float16")(np.ones((1, 2), "float32"))
    assert keras.backend.standardize_dtype(outputs.dtype) == "float16"


def test_layers_called_inside_follow_their_own_policy(dtype_of):
    set_global_policy("mixed_float16")
    dense, softmax = keras.layers.Dense(2), Activation("softmax")

    @float32_island
    def head(x):
        return dense(x), softmax(x)

    assert [dtype_of(y) for y in head(keras.ops.ones((1, 2), "float16"))] == ["float16", "float32"]


def test_the_mask_of_a_tensor_survives():
    set_global_policy("mixed_float16")
    x = keras.layers.Masking()(np.array([[[1.0], [0.0]]], "float32"))
    mask = float32_island(lambda x: x._keras_mask)(x)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(mask), [[True, False]])


def test_a_variable_is_passed_on_as_it_is():
    variable = keras.Variable([1.0], dtype="float16")
    assert float32_island(lambda x: x)(variable) is variable


def test_name_docstring_and_signature_are_kept():
    assert (dtypes.__name__, dtypes.__doc__) == ("dtypes", "The dtypes of what arrives.")
    assert list(inspect.signature(Scaled().call).parameters) == ["inputs", "mask"]


@pytest.mark.parametrize(
    "argument", [pytest.param(keras.layers.Dense, id="a class"), pytest.param(None, id="no function")]
)
def test_what_is_no_function_is_an_error(argument):
    with pytest.raises(TypeError, match="without parentheses.*Float32Mixin"):
        float32_island(argument)
