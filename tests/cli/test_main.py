"""The command line: exit statuses, one line on bad input, how fast it answers and how quiet it is."""

import argparse
import os
import re
import subprocess
import sys

import pytest

import _mpkeras_cli.notes
from _mpkeras_cli import main
from mpkeras import __version__
from tests.cli.lines import failing_line

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(["--version"], f"mpkeras {__version__}", id="version"),
        pytest.param(["--help"], "demo", id="help"),
        pytest.param([], "usage: mpkeras [-h]", id="no command prints the help"),
        pytest.param(["demo", "--help"], "--policy NAME[,NAME]", id="help of demo"),
        pytest.param(["run", "--help"], "every `compile` followed by `mpkeras.prepare`", id="help of run"),
    ],
)
def test_status_0(capsys, arguments, expected):
    assert main(arguments) == 0
    assert expected in " ".join(capsys.readouterr().out.split())


def test_the_message_with_which_a_module_ends_the_process_is_printed(capsys, monkeypatch):
    """As Python does: it goes to standard error, and the status is 1."""

    def run(args):
        raise SystemExit("no such data")

    parser = argparse.ArgumentParser()
    parser.set_defaults(run=run)
    monkeypatch.setattr(_mpkeras_cli, "build_parser", lambda: parser)
    assert main([]) == 1
    assert capsys.readouterr().err == "no such data\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param("demos", "invalid choice: 'demos'", id="unknown command"),
        pytest.param("demo --task images", "invalid choice: 'images'", id="unknown task"),
        pytest.param("demo --seeds 0", "--seeds: expected a whole number of at least 1, received '0'", id="no seeds"),
        pytest.param("demo --seeds two", "received 'two'", id="not a number"),
        pytest.param("demo --minutes 0", "a positive number of minutes, received '0'", id="no minutes"),
        pytest.param("demo --minutes nan", "a positive number of minutes, received 'nan'", id="NaN minutes"),
        pytest.param("demo --fast", "unrecognized arguments: --fast", id="unknown option"),
    ],
)
def test_bad_options_are_status_2_and_one_line(capsys, arguments, expected):
    line = failing_line(capsys, *arguments.split())
    assert line.startswith("mpkeras") and "error: " in line and expected in line


def command(*arguments, module=False, **environment):
    """Runs the command in a process of its own: the installed one, or `python -m mpkeras`."""
    start = ["-m", "mpkeras"] if module else ["-c", "import sys, _mpkeras_cli; sys.exit(_mpkeras_cli.main())"]
    kept = {name: value for name, value in os.environ.items() if name != "TF_CPP_MIN_LOG_LEVEL"}
    environment = {**kept, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return subprocess.run(
        [sys.executable, *start, *map(str, arguments)], capture_output=True, text=True, timeout=120, env=environment
    )


@pytest.mark.slow
@pytest.mark.parametrize("module", [False, True], ids=["mpkeras", "python -m mpkeras"])
def test_the_command_shows_its_own_line_and_no_other(tmp_path, module):
    """TensorFlow says what it found while it starts, whatever `TF_CPP_MIN_LOG_LEVEL` says."""
    done = command("audit", tmp_path / "none.keras", module=module)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert line.startswith("mpkeras audit: error: Expected the file of a Keras model.")
    assert done.stdout == ""


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_answer_within_0_3_seconds(option):
    """Of the processor: other processes have their share of the clock. The fastest of three."""
    seconds = []
    for _ in range(3):
        before = os.times()
        assert command(option).returncode == 0
        after = os.times()
        seconds.append(after.children_user - before.children_user + after.children_system - before.children_system)
    assert min(seconds) < 0.3


def test_the_parsers_are_built_without_keras():
    code = (
        "import sys, _mpkeras_cli as cli; cli.build_parser(); print({'keras', 'mpkeras', 'numpy'} & set(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.check_output([sys.executable, "-c", code], text=True, env=environment) == "set()\n"


@pytest.mark.slow
def test_without_a_backend_it_says_what_to_install_and_python_m_mpkeras_runs_no_command(tmp_path):
    """Python imports the package, and Keras with it, before the command begins."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['jax'] = None\n")
    environment = {"KERAS_BACKEND": "jax", "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    for arguments in (["hardware"], ["--version"]):
        check_missing_backend(command(*arguments, module=True, **environment), "jax", program="mpkeras")
    check_missing_backend(command("hardware", **environment), "jax")
    done = command("--version", **environment)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"mpkeras {__version__}\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("module", [False, True], ids=["mpkeras", "python -m mpkeras"])
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"KERAS_BACKEND": "numpy"}, "Expected a Keras backend that trains: .* Received: KERAS_BACKEND='numpy'. Set"),
        ({"KERAS_BACKEND": "numpi"}, "numpi"),
        ({"MPKERAS_POLICY": "half"}, "MPKERAS_POLICY='half'.* Correct or unset MPKERAS_POLICY"),
    ],
    ids=["no training", "no backend", "no policy"],
)
def test_a_wrong_environment_is_status_2_and_one_line(module, environment, expected):
    done = command("hardware", module=module, **environment)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (2, "")
    assert re.match(f"mpkeras.*: error: .*{expected}", line)


def check_missing_backend(done, backend, program="mpkeras hardware"):
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(
        f"{program}: error: Expected a backend of Keras that is installed. Received: '{backend}'"
    )
    assert f'`pip install "mpkeras[{backend}]"`' in done.stderr


def test_warnings_and_errors_at_the_start_are_shown(capfd):
    with _mpkeras_cli.notes.without_notes():
        os.write(2, b"I0000 00:00:1 1 port.cc:1] a note\nE0000 00:00:1 1 cuda.cc:1] an error\nUserWarning: a warning\n")
    assert capfd.readouterr().err == "E0000 00:00:1 1 cuda.cc:1] an error\nUserWarning: a warning\n"


def test_nothing_is_held_back_where_no_file_can_be_written(capfd, monkeypatch):
    def refuse():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(_mpkeras_cli.notes.tempfile, "TemporaryFile", refuse)
    with _mpkeras_cli.notes.without_notes():
        os.write(2, b"I0000 a note\n")
    assert capfd.readouterr().err == "I0000 a note\n"


def test_what_fails_at_the_start_is_shown(capfd):
    with pytest.raises(ImportError), _mpkeras_cli.notes.without_notes():
        os.write(2, b"E0000 no library\n")
        raise ImportError("no backend")
    os.write(2, b"and later lines\n")
    assert capfd.readouterr().err == "E0000 no library\nand later lines\n"


@pytest.mark.parametrize("error", [ModuleNotFoundError, MemoryError])
def test_a_report_that_lacks_a_module_or_memory_ends_in_one_line(capsys, error):
    from _mpkeras_cli.command import add_report

    def make(args):
        raise error("No compiler of theirs")

    parser = argparse.ArgumentParser(prog="mpkeras")
    add_report(parser.add_subparsers(), "look", make, help="looks", description="Looks.")
    args = parser.parse_args(["look"])
    with pytest.raises(SystemExit) as ended:
        args.run(args)
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("error: No compiler of theirs")
