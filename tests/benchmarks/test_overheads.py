"""What a guarded step, a rollback, a callback and 16 bits cost: tiny runs of the scripts on the active backend."""

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
