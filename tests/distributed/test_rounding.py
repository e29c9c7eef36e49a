"""Small weights and slots, and products in float8, on several devices: each rounds as the others, and as one alone."""

import keras
import numpy as np
import pytest

from tests.distributed.launch import run_processes, run_program

WAYS = {"tensorflow": ["mirrored"], "jax": ["data_parallel", "model_parallel"], "torch": ["ranks"]}


def found_by(way, *arguments) -> list:
    """Returns what each process has found."""
    if way == "ranks":
        results = run_processes("rounding.py", way, *arguments)
        assert results[0] == results[1]
        return results
    return [run_program("rounding.py", way, "--shards", 2, "--devices", 4, *arguments)]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS[keras.backend.backend()])
def test_all_devices_round_alike(way):
    for result in found_by(way):
        for case, one, many, with_faults in (found.values() for found in result):
            assert "bfloat16" in one["dtypes"] and one["moved"], case
            assert set(many["copies"]) == {1}, case
            assert many["bits"] == one["bits"], case
            # A fault in one shard is skipped by all, and leaves no trace.
            assert with_faults["bits"] == many["bits"], case
            assert (many["skipped"], with_faults["skipped"]) == (0, 2), case


@pytest.mark.slow
def test_products_in_float8_have_one_largest_value_over_all_devices(backend):
    result = found_by(WAYS[backend][0], "--float8", "--devices", 2)[0]
    assert len(result["one"]) == 8
    for one, many in zip(result["one"], result["many"], strict=True):
        largest = np.abs(one).max()
        assert largest > 0
        # Scales of their own move weights by 0.01 and more of the largest (seen with the sum over devices taken out).
        # On JAX devices sum gradients in float32, which one device rounds to the 8 bits of bfloat16. On TensorFlow
        # they sum those of biases in bfloat16, which one sums in float32: it rounds the sum of each, and that of both.
        if backend == "jax":
            atol = 2**-8
        else:
            atol = 3 * 2**-9 if backend == "tensorflow" and np.ndim(one) == 1 else 1e-3
        np.testing.assert_allclose(many, one, rtol=0, atol=atol * largest)
