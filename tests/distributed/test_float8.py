"""Products in float8 on several devices: one largest value over all, so that they round as one device does."""

import numpy as np
import pytest

from tests.distributed.launch import run_processes, run_program


@pytest.mark.slow
def test_two_devices_round_as_one(backend):
    if backend == "torch":
        result, other = run_processes("float8.py", "ranks")
        assert result == other
    else:
        where = {"tensorflow": "mirrored", "jax": "data_parallel"}[backend]
        result = run_program("float8.py", where, "--devices", 2)
    assert len(result["one"]) == 8
    for one, two in zip(result["one"], result["two"], strict=True):
        largest = np.abs(one).max()
        assert largest > 0
        # Scales of their own move weights by 0.01 and more of the largest (seen with the sum over devices taken out).
        # On JAX two devices sum gradients in float32, which one device rounds to the 8 bits of bfloat16. On TensorFlow
        # two sum those of biases in bfloat16, which one sums in float32.
        has_8_bits = backend == "jax" or (backend == "tensorflow" and np.ndim(one) == 1)
        np.testing.assert_allclose(two, one, rtol=0, atol=(2**-8 if has_8_bits else 1e-3) * largest)
