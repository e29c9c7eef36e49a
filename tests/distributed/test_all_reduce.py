"""`all_reduce_dtype`: the scaled gradients are summed over replicas in 16 bits."""

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras import LossScaleOptimizer
from tests.distributed.launch import run_program


@pytest.fixture(scope="module")
def result():
    return run_program("all_reduce.py")


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize(
    ("case", "value", "scale"),
    [
        pytest.param("rounded", -1 / 8, 8.0, id="the sum is rounded to float16"),
        pytest.param("as_they_are", -(1 + 2**-12) / 8, 8.0, id="by default it is not"),
        pytest.param("overflow", 0.0, 4.0, id="an overflow of the sum is a skipped step"),
        # bfloat16 has 8 bits: 40000 becomes 39936, and the sum is exact
        pytest.param("no_overflow", -2 * 39936 / 8, 8.0, id="bfloat16 reaches further"),
        pytest.param("inf_on_one", 0.0, 4.0, id="inf on one replica"),
        pytest.param("eager", -3 / 8, 8.0, id="eager mode"),
        pytest.param("clipped_sum", -4.0, 8.0, id="the sum is clipped, not its parts"),
        # twice 8 + 16, of which the update takes the mean
        pytest.param("accumulated", -3.0, 8.0, id="accumulated steps"),
    ],
)
def test_one_step_on_two_replicas(result, case, value, scale):
    assert result[case] == {"value": [value, value], "scale": scale}


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
def test_gradients_of_small_weights_are_summed_in_float32(result):
    exact, rounded = [-(2**-9)] * 2, [0.0] * 2
    assert result["small"] == {"None": exact, "float32": exact, "bfloat16": rounded}


@pytest.mark.backends("tensorflow")
def test_a_policy_says_it_to_the_optimizer():
    policy = mpkeras.Policy("mixed_float16", reduce_dtype="bfloat16")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    assert mpkeras.prepare(model, policy).optimizer.all_reduce_dtype == "bfloat16"
    # Another policy without a dtype leaves what the optimizer has.
    assert mpkeras.prepare(model, "mixed_bfloat16").optimizer.all_reduce_dtype == "bfloat16"
    with mpkeras.policy_scope(policy):
        made_under = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)])
    assert mpkeras.make_train_step(made_under, "sgd", "mse").optimizer.all_reduce_dtype == "bfloat16"


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
def test_other_kinds_of_gradients_and_of_devices(result):
    assert result["sparse"] == [[0.0], [-2.0], [0.0]]
    assert result["one_device"] == {"value": [-0.5], "scale": 8.0}
    assert "Expected scaled gradients" in result["unscaled"]


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        pytest.param("float16", 2e-3, id="float16 has 11 significant bits"),
        pytest.param("bfloat16", 1.6e-2, id="bfloat16 has 8 significant bits"),
    ],
)
def test_training_equals_the_float32_sum_to_rounding(result, dtype, tolerance):
    for exact, rounded in zip(result["weights"]["none"], result["weights"][dtype], strict=True):
        assert exact != rounded
        np.testing.assert_allclose(rounded, exact, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.backends("tensorflow")
def test_the_option_is_in_the_configuration_only_where_it_is_set():
    assert "all_reduce_dtype" not in LossScaleOptimizer("sgd").get_config()
    optimizer = LossScaleOptimizer("sgd", all_reduce_dtype="bfloat16")
    assert LossScaleOptimizer.from_config(optimizer.get_config()).all_reduce_dtype == "bfloat16"


@pytest.mark.backends("tensorflow")
def test_another_dtype_is_refused():
    with pytest.raises(ValueError, match=r"all_reduce_dtype='float64'\. Leave it out"):
        LossScaleOptimizer("sgd", all_reduce_dtype="float64")


@pytest.mark.backends("jax", "torch")
def test_backends_that_sum_elsewhere_say_where():
    remedy = {"jax": r"Train under `mpkeras\.Policy\(\.\.\., reduce_dtype='float16'\)`", "torch": r"fp16_compress_hook"}
    with pytest.raises(ValueError, match=remedy[keras.backend.backend()]):
        LossScaleOptimizer("sgd", all_reduce_dtype="float16")
