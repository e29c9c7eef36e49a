"""benchmarks/first_fit.py: both programs train, each in a process of its own."""

import keras
import pytest

import first_fit as benchmark


@pytest.mark.slow
def test_both_train():
    results = benchmark.measure(keras.backend.backend(), ["transformer"], rounds=1)["results"]
    assert {result["variant"] for result in results} == set(benchmark.VARIANTS)
    assert all(result["time_ms"]["median"] > 0 for result in results)
    assert len(benchmark.table_rows(results)) == len(results) == 4
