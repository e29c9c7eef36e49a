"""`mpkeras demo`: its options, what it prints and what it writes."""

import json
import re
import sys

import pytest

from _mpkeras_cli import demo, main
from mpkeras.demo.runs import without_non_finite
from tests.cli.lines import failing_line

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")


@pytest.fixture
def demo_that(monkeypatch):
    """Replaces the training of the demo by a function."""
    return lambda function: monkeypatch.setattr("mpkeras.demo.runs.run_demo", function)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(
            ["--policy", "mixed_flaot16"],
            "argument --policy: .* policy. Received: 'mixed_flaot16'. Did you mean 'mixed_float16'",
            id="unknown",
        ),
        pytest.param(["--policy", "float16"], "received 'float16'.*use 'mixed_float16'", id="float16 variables"),
    ],
)
def test_policies_that_are_refused_leave_no_folder(capsys, tmp_path, arguments, expected):
    line = failing_line(capsys, "demo", *arguments, "--out", tmp_path / "new")
    assert re.search(f"^mpkeras demo: error: .*{expected}", line) and not (tmp_path / "new").exists()


def test_unwritable_directory(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    line = failing_line(capsys, "demo", "--out", tmp_path / "file" / "result")
    assert line.startswith("mpkeras demo: error: argument --out: cannot write to ") and "name another directory" in line


@pytest.mark.parametrize(
    ("module", "task", "package"), [("matplotlib", "text", "matplotlib"), ("sklearn", "digits", "scikit-learn")]
)
def test_missing_package_names_what_to_install(capsys, monkeypatch, tmp_path, module, task, package):
    monkeypatch.setitem(sys.modules, module, None)
    line = failing_line(capsys, "demo", "--task", task, "--out", tmp_path)
    assert line == f'mpkeras demo: error: the demo needs {package}: run `pip install "mpkeras[demo]"`'


def test_a_python_without_its_source_is_status_2(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("mpkeras.demo.tasks.sysconfig.get_path", lambda name: str(tmp_path))
    assert "Run `--task digits`" in failing_line(capsys, "demo", "--task", "text", "--out", tmp_path)


def test_interrupt_is_status_130(capsys, demo_that, tmp_path):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    demo_that(interrupt)
    assert main(["demo", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err.splitlines() == ["mpkeras: interrupted"]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param(None, ["float32", "mixed_bfloat16", "mixed_float16"], id="default"),
        pytest.param(["bfloat16, float32", "mixed_float16"], ["float32", "bfloat16", "mixed_float16"], id="both"),
        pytest.param(["mixed_float16", "mixed_float16"], ["float32", "mixed_float16"], id="twice"),
    ],
)
def test_policies(values, expected):
    assert demo._checked_policies(values, error=pytest.fail) == expected


@pytest.mark.parametrize(("values", "is_said"), [(["mixed_float16"], True), (["float32"], False)])
def test_adding_float32_is_said(capsys, values, is_said):
    demo._checked_policies(values, error=pytest.fail)
    assert ("float32 is added" in capsys.readouterr().out) == is_said


def test_json_has_no_nan():
    nested = {"a": [1.0, float("nan")], "b": {"c": float("-inf")}, "d": "nan", "e": (True, None, 3)}
    assert without_non_finite(nested) == {"a": [1.0, None], "b": {"c": None}, "d": "nan", "e": [True, None, 3]}


@pytest.mark.slow
def test_demo_prints_and_writes(capsys, tmp_path, backend):
    out = tmp_path / "new" / "directory"
    arguments = ["--quick", "--seeds", "1", "--epochs", "1", "--task", "text", "--policy", "mixed_bfloat16"]
    assert main(["demo", *arguments, "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert "float32 is added" in captured.out
    assert "10/10" in captured.out  # Keras' progress
    assert "text (bits/byte)" in captured.out
    assert "measure anything" in captured.out
    assert f"Written to {out / 'demo.json'} and {out / 'demo.png'}" in captured.out
    assert (out / "demo.png").read_bytes().startswith(b"\x89PNG")

    result = json.loads((out / "demo.json").read_text())
    names = {"format", "environment", "settings", "verdict", "summary", "plans", "runs", "step_times_ms"}
    assert set(result) == names | {"wall_time_s", "files"}
    assert set(result["step_times_ms"]["text"]) == {"float32", "mixed_bfloat16"}
    assert result["environment"]["backend"] == backend
    assert {"python", "keras", "mpkeras", "device", "cpu", "cpu_cores"} <= set(result["environment"])
    assert result["settings"]["policies"] == ["float32", "mixed_bfloat16"]
    assert result["settings"]["quick"] is True
    assert result["settings"]["minutes"] == 2.0 and result["settings"]["timed_rounds"] == {"text": 30}
    assert result["plans"]["text"]["mixed_bfloat16"]["seeds"] == 1
    assert result["plans"]["text"]["mixed_bfloat16"]["step_ms"] > 0
    assert "text, mixed_bfloat16: about " in captured.out
    assert result["settings"]["tasks"]["text"]["epochs"] == 1
    assert result["settings"]["tasks"]["text"]["data"]["held_out_files"]
    assert [(run["policy"], run["seed"]) for run in result["runs"]] == [("float32", 0), ("mixed_bfloat16", 0)]
    assert {"loss", "val_loss", "loss_scale", "skipped_steps", "quality"} <= set(result["runs"][0]["history"])
    assert [row["policy"] for row in result["summary"]] == ["float32", "mixed_bfloat16"]
    assert result["summary"][0]["speed_up"] == 1.0


def test_json_alone_is_on_standard_output(capsys, demo_that, tmp_path):
    result = {"summary": [{"policy": "float32", "error": None}]}

    def train(*_, **__):
        print("11/11")  # as Keras' progress
        return result, "a table"

    demo_that(train)
    assert main(["demo", "--json", "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == result and captured.err == "11/11\na table\n"


@pytest.mark.parametrize(("baseline_error", "expected"), [(None, 0), ("RuntimeError: no memory", 1)])
def test_status_where_even_float32_cannot_be_trained(demo_that, tmp_path, baseline_error, expected):
    summary = [{"policy": "float32", "error": baseline_error}, {"policy": "mixed_float16", "error": None}]
    demo_that(lambda *_, **__: ({"summary": summary}, ""))
    assert main(["demo", "--out", str(tmp_path)]) == expected
