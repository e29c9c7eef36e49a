"""benchmarks/small_state.py and small_state_quality.py: a tiny run, and what they read of XLA and of runs."""

import keras
import pytest

import small_state as benchmark
import small_state_quality as quality

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")

ALLOCATIONS = """BufferAssignment:
allocation 0: size 120, parameter 1, shape |bf16[60]| at ShapeIndex {}, maybe-live-out:
 value: <2 arg1 @0> (size=120,offset=0): bf16[60]{0}
allocation 1: size 240, parameter 0, shape |f32[60]| at ShapeIndex {}:
allocation 2: size 30, constant:
allocation 3: size 7, preallocated-temp:
"""
FACTS = {
    "digits": {"higher_is_better": True, "tolerance": 0.005},
    "text": {"higher_is_better": False, "tolerance": 0.01},
}


def run(task, kind, values, optimizer="adam"):
    return [
        {"task": task, "optimizer": optimizer, "kind": kind, "seed": seed, "quality": value}
        for seed, value in enumerate(values)
    ]


def test_buffers_as_xla_lists_them():
    expected = {"state_bytes": 120, "argument_bytes": 360, "temporary_bytes": 37}
    assert benchmark.read_allocations(ALLOCATIONS) == expected


@pytest.mark.backends("tensorflow", "jax")
@pytest.mark.slow
def test_tiny_run_has_every_variant():
    backend = keras.backend.backend()
    results = benchmark.measure(backend, [1000], 2)["results"]
    assert [entry["variant"] for entry in results] == list(benchmark.VARIANTS)
    assert all(entry["time_ms"]["median"] > 0 for entry in results)


def test_what_is_outside_is_marked():
    runs = run("text", "float32", [3.0]) + run("text", "stock bfloat16", [8.0])
    found = quality.cells(runs, FACTS)
    row = quality.table_rows(found)[0]
    assert row["float32"] == "3.0000 ± 0.0000" and row["stock bfloat16"] == "8.0000 ± 0.0000 *"
    assert quality.counts(found)[-1] == "stock bfloat16: 0 of 1 inside"
