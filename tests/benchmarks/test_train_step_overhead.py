"""benchmarks/train_step_overhead.py: its options, its goals, and a tiny run on the active backend."""

import json

import keras
import pytest

import train_step_overhead as benchmark

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")


@pytest.mark.parametrize(
    ("mode", "model", "variant", "ratio"),
    [
        pytest.param("jax jit", "cnn", "keras", None, id="none for stock Keras"),
        pytest.param("torch eager", "cnn", "mpkeras", None, id="none on torch"),
        pytest.param("jax jit", "cnn", "mpkeras", 1.03, id="compiled"),
        pytest.param("tensorflow graph", "cnn", "mpkeras", 1.05, id="graph"),
        pytest.param("tensorflow graph", "mlp", "mpkeras", 1.20, id="graph, mostly update"),
        pytest.param("tensorflow graph", "cnn", "mpkeras, rollback", 1.071, id="rollback: 2 % more"),
    ],
)
def test_goal(mode, model, variant, ratio):
    assert benchmark.goal(mode, model, variant) == (None if ratio is None else pytest.approx(ratio))


def test_quick_means_fewer_rounds_and_models():
    options = benchmark.parse_arguments(["--quick"])
    assert (options.model, options.rounds, options.policy) == (["cnn", "mlp"], 15, "float32")
    options = benchmark.parse_arguments(["--quick", "--model", "lstm", "--rounds", "2"])
    assert (options.model, options.rounds) == (["lstm"], 2)


@pytest.mark.parametrize("name", list(benchmark.MODELS))
def test_batch_fits_the_model(name):
    build, batch_size = benchmark.MODELS[name]
    model = build(keras)
    x, y = benchmark.make_batch(model, batch_size)
    assert x.shape == (batch_size, *model.input_shape[1:])
    assert model.output_shape == (None, 10)
    assert y.shape == (batch_size,) and set(y) <= set(range(10))


@pytest.mark.slow
def test_tiny_run_measures_every_variant(monkeypatch):
    def one_layer(keras):
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(10)])

    # In this process and with one small layer: what takes time is compiling four models in each mode.
    monkeypatch.setitem(benchmark.MODELS, "mlp", (one_layer, 8))
    backend = keras.backend.backend()
    results = json.loads(json.dumps(benchmark.measure(backend, ["mlp"], 1, "float32")))["results"]

    found = [(entry["mode"], entry["variant"]) for entry in results]
    assert found == [(mode, variant) for mode, _ in benchmark.MODES[backend] for variant in benchmark.VARIANTS]
    assert all((entry["params"], entry["batch_size"]) == (50, 8) for entry in results)
    assert all(("rollback_ratio" in entry) == entry["variant"].endswith("rollback") for entry in results)
    assert len(benchmark.table_rows(results)) == len(results)
