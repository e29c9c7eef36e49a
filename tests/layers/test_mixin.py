import inspect
import json

import keras
import numpy as np
import pytest

from mpkeras import Policy, _keras, layers, policy_scope, set_global_policy
from mpkeras.layers import Activation, Float32Mixin, float32_island


@keras.saving.register_keras_serializable("mpkeras_tests")
class Float32Dense(Float32Mixin, keras.layers.Dense):
    pass


class Composite(keras.layers.Layer):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.dense = keras.layers.Dense(units)
        self.shift = self.add_weight(shape=(units,), initializer="ones")

    def build(self, input_shape):
        self.dense.build(input_shape)

    def call(self, x):
        return self.dense(x) + self.shift

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@keras.saving.register_keras_serializable("mpkeras_tests")
class Float32Composite(Float32Mixin, Composite):
    pass


class Float32LayerNormalization(Float32Mixin, keras.layers.LayerNormalization):
    pass


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float16", "float64"])
def test_inputs_arithmetic_and_variables_are_float32(policy, dtype_of, numbers):
    keras.config.set_dtype_policy(policy)
    layer = Float32Dense(1, kernel_initializer="ones")
    assert layer.dtype_policy == keras.DTypePolicy("float32")
    # 7e4 and the sum 1.4e5 are inf in float16; 7e4 is 70144 in bfloat16.
    outputs = layer(np.array([[7e4, 7e4]], "float32"))
    assert dtype_of(outputs) == layer(keras.Input((2,))).dtype == "float32"
    assert {variable.dtype for variable in layer.variables} == {"float32"}
    np.testing.assert_array_equal(numbers(outputs), [[1.4e5]])


def test_layers_made_by_the_constructor_are_float32(dtype_of):
    set_global_policy("mixed_float16")
    layer = Float32Composite(2)
    layer(np.ones((1, 2), "float32"))
    assert {inner.compute_dtype for inner in layer._flatten_layers()} == {"float32"}
    assert keras.config.dtype_policy().name == "mixed_float16"


def test_the_inputs_of_a_layer_without_autocast_are_cast(numbers):
    # 1 + 2**-9 is a float16 number, but 1 / sqrt(3) needs more bits than it has.
    inputs = keras.ops.cast(np.array([[0.0, 1.0, 2.0, 1.0 + 2.0**-9]]), "float16")
    expected = keras.layers.LayerNormalization()(keras.ops.cast(inputs, "float32"))
    with policy_scope("mixed_float16"):
        layer = Float32LayerNormalization()
    np.testing.assert_array_equal(numbers(layer(inputs)), numbers(expected))


SERIALIZED = {"class_name": "DTypePolicy", "config": {"name": "float32"}}


@pytest.mark.parametrize(
    "dtype", ["float32", np.float32, keras.DTypePolicy("float32"), Policy("float32"), SERIALIZED, None]
)
def test_float32_may_be_said(dtype):
    assert Float32Dense(1, dtype=dtype).compute_dtype == "float32"


@pytest.mark.parametrize(
    "dtype",
    [
        "mixed_float16",
        "float64",
        keras.DTypePolicy("mixed_bfloat16"),
        Policy("float16"),
        keras.dtype_policies.QuantizedDTypePolicy("int8", "float32"),
        "flaot32",
    ],
)
def test_another_dtype_is_an_error(dtype):
    with pytest.raises(ValueError, match=r"float32, which Float32Dense.*Received: dtype=.*Leave it out"):
        Float32Dense(1, dtype=dtype)
    with pytest.raises(ValueError, match="autocast=False"):
        Float32Dense(1, autocast=False)


@pytest.mark.parametrize("layer", [Float32Dense, Float32Composite])
def test_config_round_trip_under_another_policy(layer):
    set_global_policy("mixed_float16")
    config = layer(3, name="mine").get_config()
    before = json.dumps(config)
    keras.config.set_dtype_policy("bfloat16")
    reloaded = layer.from_config(json.loads(before))
    assert reloaded.get_config() == config
    assert (reloaded.units, reloaded.compute_dtype, reloaded.variable_dtype) == (3, "float32", "float32")
    assert json.dumps(config) == before


OPTIONS = {
    "Softmax": {"axis": 1},
    "Activation": {"activation": "relu"},
    "BatchNormalization": {"momentum": 0.5, "epsilon": 1e-12},
    "LayerNormalization": {"epsilon": 1e-12, "center": False},
    "GroupNormalization": {"groups": 2, "scale": False},
    "RMSNormalization": {"epsilon": 1e-12},
}
LAYERS = pytest.mark.parametrize("name", OPTIONS)


@LAYERS
@pytest.mark.parametrize(
    ("policy", "output_dtype", "expected"),
    [
        ("mixed_float16", None, "float32"),
        ("mixed_float16", "compute", "float16"),
        ("float32", "compute", "float32"),
        ("mixed_float16", "bfloat16", "bfloat16"),
    ],
)
def test_symbolic_dtype_is_the_real_one(name, policy, output_dtype, expected, dtype_of):
    set_global_policy(policy)
    layer = getattr(layers, name)(output_dtype=output_dtype, **OPTIONS[name])
    assert layer(keras.Input((4,))).dtype == expected
    assert dtype_of(layer(np.ones((2, 4), "float32"))) == expected
    assert layer(keras.Input((4,))).shape == (None, 4)
    assert layer.compute_dtype == layer.variable_dtype == "float32"


@LAYERS
def test_config_keeps_every_option_and_does_not_depend_on_the_global_policy(name):
    set_global_policy("mixed_float16")
    config = getattr(layers, name)(output_dtype="compute", name="mine", **OPTIONS[name]).get_config()
    before = json.dumps(config)
    set_global_policy("mixed_bfloat16")
    reloaded = getattr(layers, name).from_config(json.loads(before))
    assert reloaded.get_config() == config and reloaded.output_dtype == config["output_dtype"] == "float16"
    assert {key: config[key] for key in OPTIONS[name]} == OPTIONS[name]


def test_a_saved_model_keeps_its_dtypes(tmp_path, numbers):
    set_global_policy("mixed_bfloat16")
    stock = [getattr(layers, name)(output_dtype="compute", **options) for name, options in OPTIONS.items()]
    inner = [keras.layers.Dense(4), *stock, Float32Dense(3), Float32Composite(2)]
    model = keras.Sequential([keras.Input((4,)), *inner])
    model.save(tmp_path / "model.keras")
    set_global_policy("mixed_float16")
    reloaded = keras.models.load_model(tmp_path / "model.keras")
    x = y = np.array([[7e4, 1.0, 2.0, 3.0]], "float32")
    for layer, other in zip(model.layers, reloaded.layers, strict=True):
        x, y = layer(x), other(y)
        np.testing.assert_array_equal(numbers(y), numbers(x))


@pytest.mark.parametrize("output_dtype", ["int8", "half", 16, "Compute"])
def test_bad_output_dtype(output_dtype):
    with pytest.raises(ValueError, match=r"`output_dtype` to be None.*Received: output_dtype=.*Use 'compute'"):
        layers.Softmax(output_dtype=output_dtype)


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


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float16", "float32"])
def test_variables_of_a_method_are_read_in_float32(policy, dtype_of):
    layer = Scaled(dtype=policy)
    outputs = layer({"x": [np.ones((2, 3), "float32")]})
    assert layer.seen == ["float32", "float32"]
    assert dtype_of(outputs) == layer({"x": [keras.Input((3,))]}).dtype == "float32"
    # Outside, everything is as before.
    assert _keras.autocast_dtype() is None


@pytest.mark.backends("tensorflow", "torch")
def test_float64_stays_float64():
    layer = Scaled(dtype="float64")
    layer({"x": [np.ones((2, 3), "float64")]})
    assert layer.seen == ["float64", "float64"]


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


def test_the_scope_ends_with_an_exception(dtype_of):
    assert dtype_of(Failing(dtype="mixed_float16")(np.ones((1, 2), "float32"))) == "float16"


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


def test_variables_names_docstrings_and_signatures_stay():
    variable = keras.Variable([1.0], dtype="float16")
    assert float32_island(lambda x: x)(variable) is variable
    assert (dtypes.__name__, dtypes.__doc__) == ("dtypes", "The dtypes of what arrives.")
    assert list(inspect.signature(Scaled().call).parameters) == ["inputs", "mask"]


@pytest.mark.parametrize("argument", [keras.layers.Dense, None])
def test_what_is_no_function_is_an_error(argument):
    with pytest.raises(TypeError, match="without parentheses.*Float32Mixin"):
        float32_island(argument)
