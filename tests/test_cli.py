"""The command line: exit statuses, one line on bad input, and what `demo` prints and writes."""

import argparse
import ast
import json
import os
import subprocess
import sys

import pytest

import _mpkeras_cli
from mpkeras import __version__, cli
from mpkeras.cli import main
from mpkeras.demo import command

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")


def failing_line(capsys, *arguments):
    """Runs a command that must fail before anything is trained, and returns its one line."""
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(["--version"], f"mpkeras {__version__}", id="version"),
        pytest.param(["--help"], "demo", id="help"),
        pytest.param([], "usage: mpkeras [-h]", id="no command prints the help"),
        pytest.param(["demo", "--help"], "--policy NAME[,NAME]", id="help of demo"),
    ],
)
def test_status_0(capsys, arguments, expected):
    assert main(arguments) == 0
    assert expected in capsys.readouterr().out


def test_the_message_with_which_a_module_ends_the_process_is_printed(capsys, monkeypatch):
    """As Python does: it goes to standard error, and the status is 1."""

    def run(args):
        raise SystemExit("no such data")

    parser = argparse.ArgumentParser()
    parser.set_defaults(run=run)
    monkeypatch.setattr(cli, "build_parser", lambda: parser)
    assert main([]) == 1
    assert capsys.readouterr().err == "no such data\n"


def test_help_says_that_float32_is_always_trained(capsys):
    main(["demo", "--help"])
    assert "float32 is always among them" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(["demos"], "invalid choice: 'demos'", id="unknown command"),
        pytest.param(["demo", "--task", "images"], "invalid choice: 'images'", id="unknown task"),
        pytest.param(
            ["demo", "--seeds", "0"], "--seeds: expected a whole number of at least 1, received '0'", id="no seeds"
        ),
        pytest.param(
            ["demo", "--epochs", "-1"],
            "--epochs: expected a whole number of at least 1, received '-1'",
            id="negative epochs",
        ),
        pytest.param(["demo", "--seeds", "two"], "received 'two'", id="not a number"),
        pytest.param(["demo", "--minutes", "0"], "a positive number of minutes, received '0'", id="no minutes"),
        pytest.param(["demo", "--minutes", "nan"], "a positive number of minutes, received 'nan'", id="NaN minutes"),
        pytest.param(["demo", "--policy"], "expected one argument", id="no policy"),
        pytest.param(["demo", "--fast"], "unrecognized arguments: --fast", id="unknown option"),
    ],
)
def test_bad_options_are_status_2_and_one_line(capsys, arguments, expected):
    line = failing_line(capsys, *arguments)
    assert line.startswith("mpkeras")
    assert "error: " in line
    assert expected in line


def test_unknown_policy_names_the_nearest(capsys, tmp_path):
    line = failing_line(capsys, "demo", "--policy", "mixed_flaot16", "--out", str(tmp_path / "new"))
    assert line.startswith("mpkeras demo: error: argument --policy: ")
    assert not (tmp_path / "new").exists()
    assert "'mixed_flaot16'" in line
    assert "mixed_float16" in line


def test_a_policy_with_float16_variables_is_refused(capsys, tmp_path):
    line = failing_line(capsys, "demo", "--policy", "float16", "--out", str(tmp_path))
    assert "received 'float16'" in line
    assert "use 'mixed_float16'" in line


def test_unwritable_directory(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    line = failing_line(capsys, "demo", "--out", str(tmp_path / "file" / "result"))
    assert line.startswith("mpkeras demo: error: argument --out: cannot write to ")
    assert "name another directory" in line


@pytest.mark.parametrize(
    ("module", "task", "package"),
    [
        ("matplotlib", "text", "matplotlib"),
        ("sklearn", "digits", "scikit-learn"),
    ],
)
def test_missing_package_names_what_to_install(capsys, monkeypatch, tmp_path, module, task, package):
    monkeypatch.setitem(sys.modules, module, None)
    line = failing_line(capsys, "demo", "--task", task, "--out", str(tmp_path))
    assert line == f'mpkeras demo: error: the demo needs {package}: run `pip install "mpkeras[demo]"`'


def test_a_python_without_its_source_is_status_2(capsys, monkeypatch, tmp_path):
    from mpkeras.demo import data

    monkeypatch.setattr(data.sysconfig, "get_path", lambda name: str(tmp_path))
    line = failing_line(capsys, "demo", "--task", "text", "--out", str(tmp_path))
    assert "Run `--task digits`" in line


def test_interrupt_is_status_130(capsys, monkeypatch, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_measure", interrupt)
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
    assert command._checked_policies(values, error=pytest.fail) == expected


@pytest.mark.parametrize(("values", "is_said"), [(["mixed_float16"], True), (["float32"], False)])
def test_adding_float32_is_said(capsys, values, is_said):
    command._checked_policies(values, error=pytest.fail)
    assert ("float32 is added" in capsys.readouterr().out) == is_said


def test_json_has_no_nan():
    nested = {"a": [1.0, float("nan")], "b": {"c": float("-inf")}, "d": "nan", "e": (True, None, 3)}
    assert command.without_non_finite(nested) == {
        "a": [1.0, None],
        "b": {"c": None},
        "d": "nan",
        "e": [True, None, 3],
    }


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
    assert set(result) == {
        "format",
        "environment",
        "settings",
        "verdict",
        "summary",
        "plans",
        "runs",
        "step_times_ms",
        "wall_time_s",
        "files",
    }
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


@pytest.mark.slow
def test_json_alone_is_on_standard_output(capsys, tmp_path):
    arguments = ["--quick", "--seeds", "1", "--epochs", "1", "--task", "digits", "--policy", "mixed_float16"]
    assert main(["demo", *arguments, "--json", "--out", str(tmp_path)]) == 0
    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert [row["policy"] for row in result["summary"]] == ["float32", "mixed_float16"]
    assert "11/11" in captured.err  # Keras' progress
    assert result == json.loads((tmp_path / "demo.json").read_text())


@pytest.mark.parametrize(("baseline_error", "expected"), [(None, 0), ("RuntimeError: no memory", 1)])
def test_status_where_even_float32_cannot_be_trained(monkeypatch, tmp_path, baseline_error, expected):
    summary = [{"policy": "float32", "error": baseline_error}, {"policy": "mixed_float16", "error": None}]
    monkeypatch.setattr(command, "_measure", lambda *_: ({"summary": summary}, ""))
    assert main(["demo", "--out", str(tmp_path)]) == expected


@pytest.mark.slow
def test_python_m_mpkeras():
    done = subprocess.run(
        [sys.executable, "-m", "mpkeras", "demo", "--seeds", "0"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines()[-1] == (
        "mpkeras demo: error: argument --seeds: expected a whole number of at least 1, received '0'"
    )


COMMAND = "import sys, _mpkeras_cli; sys.exit(_mpkeras_cli.main())"


@pytest.mark.slow
def test_the_installed_command_shows_its_own_line_and_no_other(tmp_path):
    """TensorFlow says what it found while it starts, whatever `TF_CPP_MIN_LOG_LEVEL` says."""
    environment = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "audit", str(tmp_path / "none.keras")],
        capture_output=True,
        text=True,
        env=environment | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith("mpkeras audit: error: Expected the file of a Keras model.")
    assert done.stdout == ""


def test_warnings_and_errors_at_the_start_are_shown(capfd):
    with _mpkeras_cli.without_notes():
        os.write(2, b"I0000 00:00:1 1 port.cc:1] a note\nE0000 00:00:1 1 cuda.cc:1] an error\nUserWarning: a warning\n")
    assert capfd.readouterr().err == "E0000 00:00:1 1 cuda.cc:1] an error\nUserWarning: a warning\n"


def test_nothing_is_held_back_where_no_file_can_be_written(capfd, monkeypatch):
    def refuse():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(_mpkeras_cli.tempfile, "TemporaryFile", refuse)
    with _mpkeras_cli.without_notes():
        os.write(2, b"I0000 a note\n")
    assert capfd.readouterr().err == "I0000 a note\n"


def test_what_fails_at_the_start_is_shown(capfd):
    with pytest.raises(ImportError), _mpkeras_cli.without_notes():
        os.write(2, b"E0000 no library\n")
        raise ImportError("no backend")
    os.write(2, b"and later lines\n")
    assert capfd.readouterr().err == "E0000 no library\nand later lines\n"


# ------------------------------------------------------------------------------------------------------ run

PROGRAM = """
import os, sys
os.environ["KERAS_BACKEND"] = "{backend}"
import keras
import beside
import numpy as np

keras.config.set_dtype_policy("{policy}")

if __name__ == "__main__":
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    history = model.fit(np.ones((4, 4)), np.ones((4, 2)), verbose=0).history
    found = dict(backend=keras.backend.backend(), dtype=model.layers[0].compute_dtype, logs=sorted(history))
    print(dict(**found, argv=sys.argv[1:], beside=beside.here, file=os.path.basename(__file__)))
    sys.exit(7)
"""


def run_command(*arguments, **environment):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    command = [sys.executable, "-m", "mpkeras", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize(
    ("options", "policy", "dtype"),
    [(["--policy", "mixed_float16"], "float32", "float16"), ([], "mixed_bfloat16", "bfloat16")],
    ids=["policy of the command", "policy of the program"],
)
def test_run_prepares_an_unmodified_program(tmp_path, options, policy, dtype):
    """It says itself on which backend, has its own arguments, its own folder to import from, and its exit status."""
    script = tmp_path / "program.py"
    # Not on the backend on which the command was started.
    script.write_text(PROGRAM.format(backend="jax", policy=policy))
    (tmp_path / "beside.py").write_text("here = True")
    done = run_command(*options, str(script), "--policy", "3", "-v")
    assert done.returncode == 7, done.stderr[-2000:]
    assert ast.literal_eval(done.stdout) == {
        "backend": "jax",
        "dtype": dtype,
        "logs": ["loss", "loss_scale", "skipped_steps"],
        "argv": ["--policy", "3", "-v"],
        "beside": True,
        "file": "program.py",
    }


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
def test_run_shows_the_error_of_a_program(tmp_path):
    script = tmp_path / "program.py"
    script.write_text("import mpkeras\nprint(type(mpkeras.autoprepare).__name__)\nraise KeyError('mine')")
    done = run_command(str(script))
    assert (done.returncode, done.stdout) == (1, "function\n")
    assert done.stderr.rstrip().endswith("KeyError: 'mine'")
    assert f'File "{script}", line 3' in done.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(["none.py"], "expected a Python file, received 'none.py'", id="no file"),
        pytest.param(["--policy", "mixed_flot16", __file__], "Did you mean 'mixed_float16'?", id="unknown policy"),
        pytest.param([], "SCRIPT", id="no script"),
        pytest.param(["--polcy", "float32", __file__], "--polcy", id="unknown option"),
    ],
)
def test_run_names_bad_input_in_one_line(capsys, arguments, expected):
    line = failing_line(capsys, "run", *arguments)
    assert line.startswith("mpkeras")
    assert expected in line


def test_help_of_run(capsys):
    assert main(["run", "--help"]) == 0
    assert "every `compile` followed by `mpkeras.prepare`" in " ".join(capsys.readouterr().out.split())
