"""benchmarks/rollback_overhead.py: its options, and a tiny run on the active backend."""

import json

import keras
import pytest

import rollback_overhead as benchmark

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")


def test_quick_means_fewer_rounds_and_models():
    options = benchmark.parse_arguments(["--quick"])
    assert (options.model, options.rounds) == (["cnn"], 15)
    options = benchmark.parse_arguments(["--quick", "--model", "lstm", "--rounds", "2"])
    assert (options.model, options.rounds) == (["lstm"], 2)


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--model", "mlp"], ["--backend", "theano"]], ids=str)
def test_bad_options_exit_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        benchmark.parse_arguments(arguments)
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err


def with_statistics(keras):
    layers = [keras.layers.BatchNormalization(), keras.layers.Dense(10)]
    return keras.Sequential([keras.Input((4,)), *layers])


@pytest.mark.slow
@pytest.mark.parametrize("variant", benchmark.VARIANTS)
def test_variants_differ_in_the_guard_alone(monkeypatch, variant):
    monkeypatch.setitem(benchmark.MODELS, "cnn", (with_statistics, 8))
    mode, jit_compile = benchmark.MODES[keras.backend.backend()][0]
    losses = {}
    for name in ("bare", variant):
        step, batch_size, params = benchmark.make_step("cnn", name, jit_compile)
        losses[name] = [step() for _ in range(3)]
        assert (batch_size, params) == (8, 4 * 4 + 50)
    # The same sums, perhaps in another order.
    assert losses[variant] == pytest.approx(losses["bare"], rel=1e-5)
    assert losses["bare"][2] < losses["bare"][0]


@pytest.mark.slow
def test_tiny_run_measures_every_variant(monkeypatch):
    # In this process and with one small model: what takes time is compiling three models in each mode.
    monkeypatch.setitem(benchmark.MODELS, "cnn", (with_statistics, 8))
    backend = keras.backend.backend()
    results = json.loads(json.dumps(benchmark.measure(backend, ["cnn"], 1)))["results"]
    found = [(entry["mode"], entry["variant"]) for entry in results]
    assert found == [(mode, variant) for mode, _ in benchmark.MODES[backend] for variant in benchmark.VARIANTS]
    assert all(("rollback_ratio" in entry) == entry["variant"].endswith("rollback") for entry in results)
    rows = benchmark.table_rows(results)
    assert len(rows) == len(results) and rows[2]["goal"] == "1.02" and rows[0]["goal"] == ""
