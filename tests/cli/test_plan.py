"""`mpkeras plan`: what it prints of a file, and one line on bad input."""

import importlib.util
import json

import keras
import pytest
from keras import layers

from tests.cli.lines import lines_of

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")
needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX compiles, which is not installed")

printed, failing_line = lines_of("plan")


@pytest.fixture
def saved(tmp_path):
    model = keras.Sequential([keras.Input((24,)), layers.Dense(48, "relu"), layers.Dense(8)], name="small")
    model.compile("adam", "mse")
    model.save(tmp_path / "small.keras")
    return str(tmp_path / "small.keras")


@needs_jax
@pytest.mark.slow
def test_a_file_as_it_was_saved(capsys, tmp_path, saved):
    options = ["--batch", "6", "--memory", "1GB", "--policy", "float32", "--plot", str(tmp_path / "plot.png")]
    found = json.loads(printed(capsys, saved, "--device", "cpu", "--json", *options))
    assert (found["fits"], found["batch"], found["accumulate_steps"]) == (True, 6, 1)
    assert found["usable_bytes"] == 950_000_000 and [row["fits"] for row in found["candidates"]] == [True]
    assert (tmp_path / "plot.png").stat().st_size > 5000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected --memory or --device, what the training is to fit into; pass --memory 16GB or --device t4"),
        (["--memory", "16GX"], "Received: memory='16GX'. Pass for example '16GB'"),
        (["--device", "h10"], "Received: 'h10'. Did you mean 'h100'?"),
        (["--device", "t4", "--allow", "slot"], "argument --allow: invalid choice: 'slot'"),
        (["--device", "t4", "--plot", "plot.xyz"], "argument --plot: cannot draw into 'plot.xyz'"),
    ],
)
def test_bad_input_is_one_line(capsys, monkeypatch, tmp_path, saved, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mpkeras.tools.forecast.memory_plan.Compiler", None)
    assert message in failing_line(capsys, saved, *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["small.keras"]
