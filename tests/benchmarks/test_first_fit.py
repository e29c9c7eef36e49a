"""benchmarks/first_fit.py: its ratios are those of one round, and both programs train."""

import json

import keras
import pytest

import first_fit as benchmark


@pytest.mark.backends("tensorflow")
def test_ratios_are_those_of_one_round(monkeypatch):
    times = {"keras": iter([[400.0, 20.0], [100.0, 10.0]]), "mpkeras": iter([[200.0, 40.0], [300.0, 10.0]])}
    monkeypatch.setattr(benchmark, "fits_in_process", lambda variant, model, backend: next(times[variant]))
    results = json.loads(json.dumps(benchmark.measure("jax", ["mobilenet"], rounds=2)))["results"]
    assert [row["median ms"] for row in benchmark.table_rows(results)] == ["250.000", "250.000", "15.000", "25.000"]
    # 0.5 and 3, 2 and 1.
    assert [result["ratio"]["median"] for result in results if result["variant"] == "mpkeras"] == [1.75, 1.5]


@pytest.mark.slow
@pytest.mark.parametrize("variant", benchmark.VARIANTS)
def test_both_train(variant):
    first, second = benchmark.fits_in_process(variant, "transformer", keras.backend.backend())
    assert first > 0 and second > 0
