"""benchmarks/import_time.py: what it makes of the times, and one import in a fresh interpreter."""

import json

import keras
import pytest

import import_time as benchmark

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")


@pytest.mark.slow
def test_mpkeras_imports_no_other_backend(tmp_path):
    (tmp_path / f"{benchmark.EMPTY}.py").touch()
    backend = keras.backend.backend()
    found = benchmark.import_in_process(["keras", benchmark.EMPTY, "mpkeras"], backend, str(tmp_path))
    assert found[benchmark.EMPTY]["modules"] == [benchmark.EMPTY]
    assert found["keras"]["time_ms"] > found["mpkeras"]["time_ms"] > found[benchmark.EMPTY]["time_ms"]
    assert "mpkeras.scaling.optimizer" in found["mpkeras"]["modules"] and "keras" in found["keras"]["modules"]
    assert benchmark.other_backends(found["mpkeras"]["modules"], backend) == []


def test_medians_leave_out_the_first_interpreter(monkeypatch):
    backend = keras.backend.backend()
    orders, times = [], iter([900.0, 40.0, 60.0, 50.0])

    def fake(names, backend, folder):
        orders.append(names)
        ours = {"time_ms": next(times), "modules": ["mpkeras", "torch", "torch.nn", "numpy"]}
        return {"keras": {"time_ms": 2000.0, "modules": ["keras"]}, benchmark.EMPTY: ours, "mpkeras": ours}

    monkeypatch.setattr(benchmark, "import_in_process", fake)
    results = json.loads(json.dumps(benchmark.measure(backend, rounds=3)))["results"]
    assert len(orders) == 4 and {names[0] for names in orders} == {"keras"}
    assert {names[1] for names in orders[1:]} == {benchmark.EMPTY, "mpkeras"}
    assert results[2]["time_ms"] == {"median": 50.0, "q1": 45.0, "q3": 55.0}
    rows = benchmark.table_rows(results)
    assert [row["goal ms"] for row in rows] == ["", "", "30"]
    assert [(row["modules"], row["other backends"]) for row in rows[::2]] == [("1", "none"), ("4", "torch")]
