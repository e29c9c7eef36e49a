import json

import keras
import numpy as np
import pytest

from mpkeras import layers
from mpkeras.policies import set_global_policy

LAYERS = pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("Softmax", {"axis": 1}, id="Softmax"),
        pytest.param("Activation", {"activation": "relu"}, id="Activation"),
        pytest.param("BatchNormalization", {"momentum": 0.5, "epsilon": 1e-12}, id="BatchNormalization"),
        pytest.param("LayerNormalization", {"epsilon": 1e-12, "center": False}, id="LayerNormalization"),
        pytest.param("GroupNormalization", {"groups": 2, "scale": False}, id="GroupNormalization"),
        pytest.param("RMSNormalization", {"epsilon": 1e-12}, id="RMSNormalization"),
    ],
)


@LAYERS
@pytest.mark.parametrize(
    ("policy", "output_dtype", "expected"),
    [
        pytest.param("mixed_float16", None, "float32", id="float32 by default"),
        pytest.param("mixed_float16", "compute", "float16", id="back to float16"),
        pytest.param("mixed_bfloat16", "compute", "bfloat16", id="back to bfloat16"),
        pytest.param("float32", "compute", "float32", id="nothing to go back to"),
        pytest.param("mixed_float16", "bfloat16", "bfloat16", id="by name"),
    ],
)
def test_symbolic_dtype_is_the_real_one(name, options, policy, output_dtype, expected, dtype_of):
    set_global_policy(policy)
    layer = getattr(layers, name)(output_dtype=output_dtype, **options)
    assert layer(keras.Input((4,))).dtype == expected
    assert dtype_of(layer(np.ones((2, 4), "float32"))) == expected
    assert layer(keras.Input((4,))).shape == (None, 4)
    assert layer.compute_dtype == layer.variable_dtype == "float32"


@LAYERS
def test_config_keeps_every_option_and_does_not_depend_on_the_global_policy(name, options):
    set_global_policy("mixed_float16")
    layer = getattr(layers, name)(output_dtype="compute", name="mine", **options)
    config = layer.get_config()
    assert config["output_dtype"] == "float16"
    before = json.dumps(config)
    set_global_policy("mixed_bfloat16")
    reloaded = type(layer).from_config(json.loads(before))
    assert reloaded.get_config() == config
    assert reloaded.output_dtype == "float16"
    assert {key: config[key] for key in options} == options
    assert json.dumps(config) == before


@LAYERS
def test_saved_model(name, options, tmp_path, numbers):
    set_global_policy("mixed_bfloat16")
    layer = getattr(layers, name)(output_dtype="compute", **options)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), layer])
    model.save(tmp_path / "model.keras")
    set_global_policy("float32")
    reloaded = keras.models.load_model(tmp_path / "model.keras")
    x = np.array([[7e4, 1.0, 2.0, 3.0]], "float32")
    np.testing.assert_array_equal(numbers(reloaded(x)), numbers(model(x)))


@pytest.mark.parametrize("output_dtype", ["int8", "half", 16, "Compute"])
def test_bad_output_dtype(output_dtype):
    with pytest.raises(ValueError, match=r"`output_dtype` to be None.*Received: output_dtype=.*Use 'compute'"):
        layers.Softmax(output_dtype=output_dtype)
