"""benchmarks/monitor_overhead.py: its options, and a tiny run on the active backend."""

import itertools
import json

import keras
import pytest

import monitor_overhead as benchmark

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")


def test_options():
    options = benchmark.parse_arguments(["--quick"])
    assert (options.model, options.rounds) == (["cnn"], 5)


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--steps", "0"], ["--model", "lstm"]], ids=str)
def test_bad_options_exit_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        benchmark.parse_arguments(arguments)
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.slow
def test_tiny_run_measures_every_callback(monkeypatch):
    def small(keras):
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(10)])

    monkeypatch.setitem(benchmark.MODELS, "cnn", (small, 8))
    backend = keras.backend.backend()
    results = json.loads(json.dumps(benchmark.measure(backend, ["cnn"], 1, steps=3)))["results"]
    found = [(entry["mode"], entry["display"], entry["variant"]) for entry in results]
    modes, displays = ([name for name, _ in cases] for cases in (benchmark.MODES[backend], benchmark.DISPLAYS))
    assert found == list(itertools.product(modes, displays, benchmark.VARIANTS))
    rows = benchmark.table_rows(results)
    assert [(row["callback"], row["goal"]) for row in rows[:3]] == [
        ("bare", ""),
        ("bare again", ""),
        ("ResourceMonitor", "1.02"),
    ]
