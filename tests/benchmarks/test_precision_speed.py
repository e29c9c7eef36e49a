"""benchmarks/precision_speed.py: its options, and a tiny run on the active backend."""

import json

import keras
import pytest

import precision_speed as benchmark

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")


def test_options():
    options = benchmark.parse_arguments(["--quick"])
    assert (options.model, options.rounds, options.budget) == (["digits", "text"], 8, 8.0)
    assert benchmark.parse_arguments([]).model == list(benchmark.NAMES)


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--budget", "0"], ["--model", "resnet"]], ids=str)
def test_bad_options_exit_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        benchmark.parse_arguments(arguments)
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.slow
def test_tiny_run_measures_every_policy_in_every_mode(monkeypatch):
    def small(keras):
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(10)])

    monkeypatch.setitem(benchmark.MODELS, "cnn", (small, 8))
    backend = keras.backend.backend()
    results = json.loads(json.dumps(benchmark.measure(backend, ["cnn"], 1, budget_s=2.0)))["results"]
    modes = [mode for mode, _ in benchmark.MODES[backend]]
    found = [(entry["mode"], entry["policy"]) for entry in results]
    assert found == [(mode, policy) for mode in modes for policy in benchmark.POLICIES]
    assert sum(entry["advised"] for entry in results) == 1
    assert [entry["speedup"]["median"] for entry in results if entry["policy"] == "float32"] == [1.0] * len(modes)
    for row, entry in zip(benchmark.table_rows(results), results, strict=True):
        assert row["policy"] == entry["policy"] and (row["advised"] == "advised") == entry["advised"]


def test_a_speed_up_above_1_is_faster(monkeypatch):
    # float32 takes 30 ms, bfloat16 20 ms, float16 60 ms.
    times_ms = {"float32": 30.0, "mixed_bfloat16": 20.0, "mixed_float16": 60.0}
    monkeypatch.setattr(benchmark, "load", lambda name: (None, None, None, None, 8))
    monkeypatch.setattr(benchmark, "advised", lambda *arguments: ("mixed_bfloat16", True))
    monkeypatch.setattr(benchmark, "make_step", lambda *arguments: None)
    monkeypatch.setattr(
        benchmark.harness,
        "time_interleaved",
        lambda steps, rounds, **options: {key: [times_ms[key[1]]] * rounds for key in steps},
    )
    backend = keras.backend.backend()
    results = benchmark.measure(backend, ["digits"], 2, budget_s=1.0)["results"][:3]
    assert [entry["speedup"]["median"] for entry in results] == [1.0, 1.5, 0.5]
    assert [entry["speedup_to_fastest_float32"] for entry in results] == [1.0, 1.5, 0.5]
