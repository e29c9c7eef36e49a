"""`mpkeras plan`: what it prints of a file, and one line on bad input."""

import importlib.util
import json

import keras
import pytest
from keras import layers

import mpkeras
from mpkeras.tools.forecast.compiler import NotCompiled
from tests.cli.lines import lines_of

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")
needs_jax = pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="JAX compiles, which is not installed")

printed, failing_line = lines_of("plan")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = keras.Sequential([keras.Input((24,)), layers.Dense(48, "relu"), layers.Dense(8)], name="small")
    model.compile("adam", "mse")
    path = tmp_path_factory.mktemp("saved") / "small.keras"
    model.save(path)
    return str(path)


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
        (["--memory", "16GX"], "argument --memory: expected a size such as 16GB or 16GiB, received '16GX'"),
        (["--device", "h10"], "argument --device: Expected `--device` to be one that can be compiled"),
        (["--device", "t4", "--policy", "mixed_half"], "argument --policy: Expected the name of a registered policy"),
        (["--device", "t4", "--allow", "slot"], "argument --allow: invalid choice: 'slot'"),
        (["--device", "t4", "--plot", "plot.xyz"], "argument --plot: cannot draw into 'plot.xyz'"),
    ],
)
def test_bad_input_is_one_line(capsys, monkeypatch, tmp_path, saved, arguments, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("mpkeras.tools.forecast.memory_plan.Compiler", None)
    assert message in failing_line(capsys, saved, *arguments)
    assert list(tmp_path.iterdir()) == []


def test_accumulation_is_written_without_sums_that_no_plan_counts():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Dense(1)])
    model.compile("adam", "mse")
    mpkeras.prepare(model, "mixed_float16")
    model.optimizer.accumulate(4)
    model.optimizer.build(model.trainable_variables)
    # Adam made with `gradient_accumulation_steps=4` has four more, which are not used.
    assert len([variable for variable in model.optimizer.variables if "gradient" in variable.name]) == 4


class Compiler:
    """Temporaries are 120 bytes of each row, and the state is smaller with small slots."""

    def __init__(self, request, deadline):
        self.state = {n: 2000 if p.slot_dtype == "bfloat16" else 2400 for n, p in request.policies.items()}

    def __enter__(self):
        return self

    def __exit__(self, *reason):
        pass

    def compile(self, name, rows, accumulate_steps):
        if rows % 3:
            raise NotCompiled("Expected a model that JAX can trace", f"rows of {rows}")
        state = {"persistent_bytes": self.state[name], "temporary_bytes": 120 * rows}
        flops = {"matrix_flops": {"float16": 10 * rows}, "moved_bytes": 1}
        return {**state, "peak_bytes": sum(state.values()), **flops}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--policy", "mixed_float16"], "`mpkeras.prepare(model, 'mixed_float16')`, and batches of 12 rows."),
        (
            ["--policy", "mixed_float16", "--memory", "2700", "--allow", "slots", "--allow", "accumulation"],
            "`mpkeras.prepare(model, mpkeras.Policy('mixed_float16', slot_dtype='bfloat16'))`, and batches of 3 rows, "
            "4 of which make one update: `model.optimizer.accumulate(4)` behind it.",
        ),
    ],
    ids=["as it is", "slots and parts"],
)
def test_a_plan_is_said_as_the_program_that_trains_writes_it(capsys, monkeypatch, saved, options, expected):
    monkeypatch.setattr("mpkeras.tools.forecast.memory_plan.Compiler", Compiler)
    text = printed(capsys, saved, "--device", "cpu", "--batch", "12", *options)
    assert f"Plan: in the program that trains {expected}" in text and "prepare(model, plan)" not in text


def test_what_is_not_possible_is_said_in_options(capsys, monkeypatch, tmp_path):
    inputs = keras.Input(batch_shape=(6, 5, 3))
    keras.Model(inputs, layers.GRU(2, stateful=True)(inputs)).save(tmp_path / "one.keras")
    monkeypatch.setattr("mpkeras.tools.forecast.memory_plan.Compiler", Compiler)
    options = ["--device", "cpu", "--memory", "1KB"]
    lines = printed(capsys, tmp_path / "one.keras", *options, "--policy", "float32").splitlines()
    (line,) = [line for line in lines if "remat blocks: not possible. Expected a model with repeated blocks" in line]
    assert line.endswith("in a policy that a module registers: `--import MODULE`, `--policy NAME`.")
    line = failing_line(capsys, tmp_path / "one.keras", *options, "--policy", "float32", "--largest-batch")
    assert "and not 1 (rows of 1). Leave out `--largest-batch`, or make the model" in line
