"""benchmarks/many_devices.py: tiny steps."""

import pytest

import many_devices as benchmark

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")


@pytest.mark.slow
@pytest.mark.backends("jax")
def test_tiny_steps_are_compiled_for_this_cpu():
    """A part in four of the state, and on stock Keras the same layout of the same weights, without the loss scale."""
    found = {}
    for who, compile_steps in (("mpkeras", benchmark.compile_ours), ("stock", benchmark.compile_stock)):
        for count, layout in ((1, "data"), (4, "weights")):
            steps = compile_steps(benchmark.TINY, "cpu", count, layout, ["mixed_bfloat16"])
            found[who, count] = steps["mixed_bfloat16"]
    whole, split, stock_whole, stock_split = (said["persistent_bytes"] for said in found.values())
    assert 0.25 < split / whole < 0.3
    assert 0 <= whole - stock_whole < 256 and 0 <= split - stock_split < 256
    assert all(bool(said["collectives"]) == (count > 1) for (_, count), said in found.items())
