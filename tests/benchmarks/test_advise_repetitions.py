"""benchmarks/advise_repetitions.py: how choices are judged."""

import pytest

import advise_repetitions as benchmark

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")


def test_choices_are_compared_with_the_best_of_the_grid():
    def choice(policy, jit_compile):
        return {"policy": policy, "jit_compile": jit_compile, "seconds": 9.0, "load": 1.0}

    times_ms = {
        "float32, jit_compile=False": [20.0, 30.0, 20.0],
        "mixed_bfloat16, jit_compile=False": [10.0, 15.0, 10.0],
        "mixed_bfloat16, jit_compile=True": [10.4, 15.6, 10.4],
    }
    choices = [choice("mixed_bfloat16", True), choice("mixed_bfloat16", False), choice("float32", False)]
    choices.append(choice("mixed_float16", True))  # not in the grid: no success
    result = benchmark.judged({"task": "text", "backend": "jax", "times_ms": times_ms, "choices": choices})
    assert result["best"] == "mixed_bfloat16, jit_compile=False"
    assert [entry["ratio"] for entry in result["choices"]] == pytest.approx([1.04, 1.0, 2.0, float("inf")])
    assert result["share_within"] == 0.5
    (row,) = benchmark.table_rows([result])
    assert row["within 5 %"] == "50% of 4" and row["goal"] == "90%"
