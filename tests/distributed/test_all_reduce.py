"""`all_reduce_dtype`: the scaled gradients are summed over replicas in 16 bits."""

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras import LossScaleOptimizer
from tests.distributed.launch import run_program


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
def test_gradients_are_summed_over_two_replicas_in_16_bits():
    result = run_program("all_reduce.py", "mirrored")
    for case, value, scale in (
        # The sum is rounded to float16; by default it is not.
        ("rounded", -1 / 8, 8.0),
        ("as_they_are", -(1 + 2**-12) / 8, 8.0),
        # An overflow of the sum is a skipped step, as inf on one replica is.
        ("overflow", 0.0, 4.0),
        ("inf_on_one", 0.0, 4.0),
        # bfloat16 has 8 bits: 40000 becomes 39936, and the sum is exact.
        ("no_overflow", -2 * 39936 / 8, 8.0),
        ("eager", -3 / 8, 8.0),
        # The sum is clipped, not its parts.
        ("clipped_sum", -4.0, 8.0),
        # Twice 8 + 16, of which the update takes the mean.
        ("accumulated", -3.0, 8.0),
    ):
        assert result[case] == {"value": [value, value], "scale": scale}, case
    assert result["sparse"] == [[0.0], [-2.0], [0.0]]
    assert result["one_device"] == {"value": [-0.5], "scale": 8.0}
    assert "Expected scaled gradients" in result["unscaled"]
    # Gradients of small weights are summed in float32, unless another dtype is asked for.
    exact, rounded = [-(2**-9)] * 2, [0.0] * 2
    assert result["small"] == {"None": exact, "float32": exact, "bfloat16": rounded}
    # float16 has 11 significant bits
    for exact, rounded in zip(result["weights"]["None"], result["weights"]["float16"], strict=True):
        assert exact != rounded
        np.testing.assert_allclose(rounded, exact, rtol=2e-3, atol=2e-4)


@pytest.mark.backends("tensorflow")
def test_a_policy_says_it_to_the_optimizer():
    policy = mpkeras.Policy("mixed_float16", reduce_dtype="bfloat16")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)])
    model.compile(keras.optimizers.SGD(0.5), "mse")
    prepared = mpkeras.prepare(model, policy).optimizer
    assert prepared.all_reduce_dtype == "bfloat16"
    # Another policy without a dtype leaves what the optimizer has, in a new wrapper for another rule, too.
    assert mpkeras.prepare(model, "mixed_bfloat16").optimizer.all_reduce_dtype == "bfloat16"
    again = mpkeras.prepare(model, "mixed_float16", loss_scale=2.0**9).optimizer
    assert again.all_reduce_dtype == "bfloat16" and again is not prepared
    with mpkeras.policy_scope(policy):
        made_under = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)])
    assert mpkeras.make_train_step(made_under, "sgd", "mse").optimizer.all_reduce_dtype == "bfloat16"


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
