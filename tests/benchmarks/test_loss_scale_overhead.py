"""benchmarks/loss_scale_overhead.py: its options, its goals, and a tiny run on the active backend."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import pytest

import loss_scale_overhead as benchmark

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")

FOLDER = Path(benchmark.__file__).parent
# Those that are run, and not only imported by others, or started by them.
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if "argparse.ArgumentParser(" in path.read_text())


def run(*arguments):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "MPLBACKEND": "Agg"},
    )


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_help_works_and_starts_with_the_question(script):
    result = run(script, "--help")
    assert result.returncode == 0, result.stderr
    assert "?" in result.stdout and "--json" in result.stdout


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
def test_goal(mode, params, ratio):
    assert benchmark.goal(mode, params) == ratio


@pytest.mark.parametrize(
    ("params", "shape"),
    [
        pytest.param(4, (1, 1), id="one element each"),
        pytest.param(1000, (1, 250), id="one row each"),
        pytest.param(3_000_000, (750, 1000), id="many rows"),
    ],
)
def test_tensor_shapes(params, shape):
    assert benchmark.tensor_shapes(params) == [shape] * 4


def test_quick_means_fewer_rounds_and_one_size():
    options = benchmark.parse_arguments(["--quick"])
    assert (options.params, options.rounds) == ([3_000_000], 12)
    options = benchmark.parse_arguments(["--quick", "--params", "1000", "5000", "--rounds", "2"])
    assert (options.params, options.rounds) == ([1000, 5000], 2)


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--params", "3"], ["--backend", "theano"]], ids=str)
def test_bad_options_exit_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        benchmark.parse_arguments(arguments)
    assert stopped.value.code == 2
    assert arguments[0] in capsys.readouterr().err


@pytest.mark.backends("tensorflow", "jax", "torch")
@pytest.mark.slow
def test_tiny_run_writes_every_variant(tmp_path):
    output = tmp_path / "results.json"
    backend = keras.backend.backend()
    arguments = ["--backend", backend, "--params", "1000", "--rounds", "2", "--json", output]
    result = run(FOLDER / "loss_scale_overhead.py", *arguments)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"{backend}: python" in result.stdout and "1,000" in result.stdout

    content = json.loads(output.read_text())
    modes = {
        "tensorflow": ["tensorflow graph", "tensorflow XLA"],
        "jax": ["jax jit"],
        "torch": ["torch eager"],
    }
    found = [(entry["mode"], entry["variant"]) for entry in content["results"]]
    assert found == [(mode, variant) for mode in modes[backend] for variant in ("bare", "keras", "mpkeras")]
    assert all(entry["time_ms"]["median"] > 0 for entry in content["results"])
    assert [entry["ratio"]["median"] for entry in content["results"] if entry["variant"] == "bare"] == [1.0] * (
        len(modes[backend])
    )
    assert content["environments"][0]["backend"] == backend


@pytest.mark.slow
def test_many_tensors_and_windows():
    backend = keras.backend.backend()
    results = benchmark.measure(backend, [1000], 1, accumulate=2, tensors=10)["results"]
    assert {(entry["tensors"], entry["accumulate"]) for entry in results} == {(10, 2)}
    assert not any("goal_ratio" in entry for entry in results)
    assert benchmark.tensor_shapes(1000, 10) == [(1, 100)] * 10


def test_in_a_window_every_variant_sees_the_same_calls():
    calls = []
    window = benchmark.whole_window(lambda: calls.append("step"), lambda: calls.append("before"), 3)
    window()
    assert calls == ["step", "before", "step", "before", "step"]


@pytest.mark.parametrize("arguments", [["--tensors", "0"], ["--accumulate", "0"]], ids=str)
def test_bad_windows_and_tensors_exit_with_status_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        benchmark.parse_arguments(arguments)
    assert stopped.value.code == 2 and arguments[0] in capsys.readouterr().err
