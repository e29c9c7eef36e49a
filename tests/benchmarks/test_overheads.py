"""What a guarded step, a rollback, a callback and 16 bits cost: the goals, and tiny runs on the active backend."""

import itertools
import json
import os
import subprocess
import sys

import keras
import pytest

import loss_scale_overhead
import monitor_overhead
import precision_speed
import rollback_overhead
import train_step_overhead

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")

BACKEND = keras.backend.backend()


@pytest.fixture
def small_models(monkeypatch):
    """In place of the models of the scripts: what takes time is compiling three of them in each mode."""

    def small(keras):
        layers = [keras.layers.BatchNormalization(), keras.layers.Dense(10)]
        return keras.Sequential([keras.Input((4,)), *layers])

    for script in (train_step_overhead, rollback_overhead, monitor_overhead, precision_speed):
        monkeypatch.setitem(script.MODELS, "cnn", (small, 8))


@pytest.mark.parametrize(
    ("mode", "params", "ratio"),
    [
        pytest.param("tensorflow XLA", 999_999, None, id="none for few parameters"),
        pytest.param("tensorflow XLA", 1_000_000, 1.25, id="first size with a goal"),
        pytest.param("tensorflow XLA", 9_999_999, 1.25, id="below the larger size"),
        pytest.param("tensorflow XLA", 10_000_000, 1.20, id="at the larger size"),
        pytest.param("jax jit", 30_000_000, 1.25, id="one goal for all sizes"),
    ],
)
def test_goal_of_the_loss_scale(mode, params, ratio):
    assert loss_scale_overhead.goal(mode, params) == ratio


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
def test_goal_of_a_train_step(mode, model, variant, ratio):
    assert train_step_overhead.goal(mode, model, variant) == (None if ratio is None else pytest.approx(ratio))


def test_tensors_have_as_many_elements_as_asked_for():
    shapes = {4: (1, 1), 1000: (1, 250), 3_000_000: (750, 1000)}
    assert {params: loss_scale_overhead.tensor_shapes(params) for params in shapes} == {
        params: [shape] * 4 for params, shape in shapes.items()
    }
    assert loss_scale_overhead.tensor_shapes(1000, 10) == [(1, 100)] * 10


def test_in_a_window_every_variant_sees_the_same_calls():
    calls = []
    window = loss_scale_overhead.whole_window(lambda: calls.append("step"), lambda: calls.append("before"), 3)
    window()
    assert calls == ["step", "before", "step", "before", "step"]


@pytest.mark.parametrize("name", list(train_step_overhead.MODELS))
def test_a_batch_fits_its_model(name):
    build, batch_size = train_step_overhead.MODELS[name]
    model = build(keras)
    x, y = train_step_overhead.make_batch(model, batch_size)
    assert x.shape == (batch_size, *model.input_shape[1:]) and model.output_shape == (None, 10)
    assert y.shape == (batch_size,) and set(y) <= set(range(10))


def test_a_speed_up_above_1_is_faster(monkeypatch):
    # float32 takes 30 ms, bfloat16 20 ms, float16 60 ms.
    times_ms = {"float32": 30.0, "mixed_bfloat16": 20.0, "mixed_float16": 60.0}
    monkeypatch.setattr(precision_speed, "load", lambda name: (None, None, None, None, 8))
    monkeypatch.setattr(precision_speed, "advised", lambda *arguments: ("mixed_bfloat16", True))
    monkeypatch.setattr(precision_speed, "make_step", lambda *arguments: None)
    monkeypatch.setattr(
        precision_speed.harness,
        "time_interleaved",
        lambda steps, rounds, **options: {key: [times_ms[key[1]]] * rounds for key in steps},
    )
    results = precision_speed.measure(BACKEND, ["digits"], 2, budget_s=1.0)["results"][:3]
    assert [entry["speedup"]["median"] for entry in results] == [1.0, 1.5, 0.5]
    assert [entry["speedup_to_fastest_float32"] for entry in results] == [1.0, 1.5, 0.5]


@pytest.mark.backends("tensorflow", "jax", "torch")
@pytest.mark.slow
def test_the_loss_scale_is_measured_by_the_script_itself(tmp_path):
    output, backend = tmp_path / "results.json", ["--backend", BACKEND]
    command = [sys.executable, loss_scale_overhead.__file__, *backend, "--params", "1000", "--rounds", "2"]
    done = subprocess.run(
        [*command, "--json", str(output)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "MPLBACKEND": "Agg"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{BACKEND}: python" in done.stdout and "1,000" in done.stdout
    content = json.loads(output.read_text())
    modes = {"tensorflow": ["tensorflow graph", "tensorflow XLA"], "jax": ["jax jit"], "torch": ["torch eager"]}
    found = [(entry["mode"], entry["variant"]) for entry in content["results"]]
    assert found == list(itertools.product(modes[BACKEND], ("bare", "keras", "mpkeras")))
    assert all(entry["time_ms"]["median"] > 0 for entry in content["results"])
    assert {entry["ratio"]["median"] for entry in content["results"] if entry["variant"] == "bare"} == {1.0}
    assert content["environments"][0]["backend"] == BACKEND


@pytest.mark.slow
def test_many_tensors_and_windows_have_no_goal():
    results = loss_scale_overhead.measure(BACKEND, [1000], 1, accumulate=2, tensors=10)["results"]
    assert {(entry["tensors"], entry["accumulate"]) for entry in results} == {(10, 2)}
    assert not any("goal_ratio" in entry for entry in results)


@pytest.mark.slow
@pytest.mark.parametrize("variant", rollback_overhead.VARIANTS)
def test_variants_of_the_rollback_differ_in_the_guard_alone(small_models, variant):
    mode, jit_compile = rollback_overhead.MODES[BACKEND][0]
    losses = {}
    for name in ("bare", variant):
        step, batch_size, params = rollback_overhead.make_step("cnn", name, jit_compile)
        losses[name] = [step() for _ in range(3)]
        assert (batch_size, params) == (8, 4 * 4 + 50)
    # The same sums, perhaps in another order.
    assert losses[variant] == pytest.approx(losses["bare"], rel=1e-5)
    assert losses["bare"][2] < losses["bare"][0]


@pytest.mark.slow
@pytest.mark.parametrize("script", [train_step_overhead, rollback_overhead], ids=lambda script: script.__name__)
def test_every_variant_of_a_step_is_measured(small_models, script):
    options = ["float32"] if script is train_step_overhead else []
    results = json.loads(json.dumps(script.measure(BACKEND, ["cnn"], 1, *options)))["results"]
    found = [(entry["mode"], entry["variant"]) for entry in results]
    assert found == [(mode, variant) for mode, _ in script.MODES[BACKEND] for variant in script.VARIANTS]
    assert {entry["params"] for entry in results} == {66} and {entry["batch_size"] for entry in results} == {8}
    assert all(("rollback_ratio" in entry) == entry["variant"].endswith("rollback") for entry in results)
    rows = script.table_rows(results)
    assert len(rows) == len(results)
    if script is rollback_overhead:
        assert rows[2]["goal"] == "1.02" and rows[0]["goal"] == ""


@pytest.mark.slow
def test_every_callback_is_measured(small_models):
    results = json.loads(json.dumps(monitor_overhead.measure(BACKEND, ["cnn"], 1, steps=3)))["results"]
    found = [(entry["mode"], entry["display"], entry["variant"]) for entry in results]
    cases = (monitor_overhead.MODES[BACKEND], monitor_overhead.DISPLAYS)
    assert found == list(itertools.product(*([name for name, _ in case] for case in cases), monitor_overhead.VARIANTS))
    rows = [(row["callback"], row["goal"]) for row in monitor_overhead.table_rows(results)[:3]]
    assert rows == [("bare", ""), ("bare again", ""), ("ResourceMonitor", "1.02")]


@pytest.mark.slow
def test_every_policy_is_measured_in_every_mode(small_models):
    results = json.loads(json.dumps(precision_speed.measure(BACKEND, ["cnn"], 1, budget_s=2.0)))["results"]
    modes = [mode for mode, _ in precision_speed.MODES[BACKEND]]
    assert [(entry["mode"], entry["policy"]) for entry in results] == list(
        itertools.product(modes, precision_speed.POLICIES)
    )
    assert sum(entry["advised"] for entry in results) == 1
    assert [entry["speedup"]["median"] for entry in results if entry["policy"] == "float32"] == [1.0] * len(modes)
    for row, entry in zip(precision_speed.table_rows(results), results, strict=True):
        assert row["policy"] == entry["policy"] and (row["advised"] == "advised") == entry["advised"]
