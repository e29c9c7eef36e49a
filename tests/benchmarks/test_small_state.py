"""benchmarks/small_state.py and small_state_quality.py: what they make of runs, and what they read of XLA."""

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


def test_goals_hold_for_many_parameters():
    found = {"state_bytes": 60_000_000, "temporary_bytes": 0}
    entry = benchmark.with_goals("mpkeras bfloat16", 10_000_000, found)
    assert (entry["state_bytes"], entry["temporary_bytes"], entry["goal_ratio"]) == (6.0, 0.0, 0.70)
    assert entry["goal_state_bytes"] == pytest.approx(6.01)
    assert not any(key.startswith("goal") for key in benchmark.with_goals("mpkeras bfloat16", 9_999_999, found))
    assert not any(key.startswith("goal") for key in benchmark.with_goals("bare", 10_000_000, found))


@pytest.mark.backends("tensorflow", "jax")
@pytest.mark.slow
def test_tiny_run_has_every_variant():
    backend = keras.backend.backend()
    results = benchmark.measure(backend, [1000], 2)["results"]
    assert [entry["variant"] for entry in results] == list(benchmark.VARIANTS)
    assert all(entry["time_ms"]["median"] > 0 for entry in results)


@pytest.mark.parametrize(
    ("task", "values", "inside"),
    [
        pytest.param("digits", [0.956, 0.956], True, id="within the tolerance"),
        pytest.param("digits", [0.954, 0.954], False, id="worse by more"),
        pytest.param("digits", [0.90, 1.0], True, id="as wide as the mean is low"),
        pytest.param("digits", [0.99, 0.99], True, id="better"),
        pytest.param("text", [0.969, 0.969], True, id="lower is better there"),
        pytest.param("text", [0.971, 0.971], False, id="and higher worse"),
    ],
)
def test_inside_the_spread_of_float32(task, values, inside):
    runs = run(task, "float32", [0.96, 0.96]) + run(task, "bfloat16", values)
    baseline, entry = quality.cells(runs, FACTS)
    assert entry["inside"] == inside
    assert "inside" not in baseline and baseline["mean"] == pytest.approx(0.96)


def test_two_standard_errors_are_allowed():
    # Standard deviations 0.02 and 0.04 of two runs each: the error of the difference is sqrt(0.0002 + 0.0008).
    runs = run("digits", "float32", [0.9 - 0.02 / 2**0.5, 0.9 + 0.02 / 2**0.5])
    runs += run("digits", "mixed", [0.8 - 0.04 / 2**0.5, 0.8 + 0.04 / 2**0.5])
    entry = quality.cells(runs, FACTS)[1]
    assert entry["allowed"] == pytest.approx(2 * 0.001**0.5)
    assert entry["worse_by"] == pytest.approx(0.1) and not entry["inside"]


def test_what_is_outside_is_marked():
    runs = run("text", "float32", [3.0]) + run("text", "stock bfloat16", [8.0])
    found = quality.cells(runs, FACTS)
    row = quality.table_rows(found)[0]
    assert row["float32"] == "3.0000 ± 0.0000" and row["stock bfloat16"] == "8.0000 ± 0.0000 *"
    assert quality.counts(found)[-1] == "stock bfloat16: 0 of 1 inside"
