"""`mpkeras run SCRIPT`: an unmodified program, guarded."""

import ast
import os
import subprocess
import sys

import pytest

from tests.cli.lines import failing_line

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")


PROGRAM = """
import os, sys
os.environ["KERAS_BACKEND"] = "{backend}"
import keras
import beside
import numpy as np

keras.config.set_dtype_policy("{policy}")

if __name__ == "__main__":
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    history = model.fit(np.ones((4, 4)), np.ones((4, 2)), verbose=0).history
    found = dict(backend=keras.backend.backend(), dtype=model.layers[0].compute_dtype, logs=sorted(history))
    print(dict(**found, argv=sys.argv[1:], beside=beside.here, file=os.path.basename(__file__)))
    sys.exit(7)
"""


def run_command(*arguments, **environment):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    # As the installed command does: `python -m mpkeras` needs the backend that is chosen when it starts.
    command = [sys.executable, "-c", "import sys, _mpkeras_cli; sys.exit(_mpkeras_cli.main())", "run", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


@pytest.mark.slow
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
def test_run_shows_the_error_of_a_program(tmp_path):
    script = tmp_path / "program.py"
    script.write_text("import mpkeras\nprint(type(mpkeras.autoprepare).__name__)\nraise KeyError('mine')")
    done = run_command(str(script))
    assert (done.returncode, done.stdout) == (1, "function\n")
    assert done.stderr.rstrip().endswith("KeyError: 'mine'")
    assert f'File "{script}", line 3' in done.stderr


def run_without(backend, folder, program, *options):
    """Runs `program` on a machine on which Keras is to run on `backend`, and that is not installed."""
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules['{backend}'] = None\n")
    script = folder / "program.py"
    script.write_text(program)
    environment = {"KERAS_BACKEND": backend, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    return script, run_command(*options, str(script), **environment)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "program", "options"),
    [
        pytest.param("jax", "import keras", [], id="the program imports Keras"),
        pytest.param("torch", "import mpkeras", [], id="the program imports mpkeras"),
        pytest.param("tensorflow", "from keras import layers", ["--policy", "mixed_float16"], id="with a policy"),
    ],
)
def test_without_a_backend_run_says_what_to_install(tmp_path, backend, program, options):
    """As every other command does: one line and status 2."""
    _, done = run_without(backend, tmp_path, program, *options)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(
        f"mpkeras run: error: Expected a backend of Keras that is installed. Received: '{backend}', which is not. "
    )
    assert f'`pip install "mpkeras[{backend}]"`' in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        pytest.param("import none_such", "ModuleNotFoundError: No module named 'none_such'", id="another package"),
        pytest.param("import jax", "ModuleNotFoundError: import of jax halted", id="the backend, without Keras"),
        pytest.param("from os import none_such", "ImportError: cannot import name 'none_such'", id="a missing name"),
    ],
)
def test_what_a_program_itself_cannot_import_shows_its_traceback(tmp_path, line, expected):
    script, done = run_without("jax", tmp_path, f"import sys\n{line}\n")
    assert done.returncode == 1
    assert f'File "{script}", line 2' in done.stderr
    assert done.stderr.splitlines()[-1].startswith(expected)
    assert "mpkeras run: error" not in done.stderr


@pytest.mark.slow
def test_a_program_may_catch_that_its_backend_is_missing(tmp_path):
    program = "try:\n    import keras\nexcept ImportError as error:\n    print('without', error.name)\n"
    _, done = run_without("jax", tmp_path, program)
    assert (done.returncode, done.stdout, done.stderr) == (0, "without jax\n", "")


@pytest.mark.slow
def test_a_program_may_choose_a_backend_that_is_installed(tmp_path):
    """Where `mpkeras run --policy` starts on one that is not; an unknown policy is then named by the program."""
    program = "import os\nos.environ['KERAS_BACKEND'] = 'torch'\nimport keras\nprint(keras.backend.backend())\n"
    _, done = run_without("jax", tmp_path, program, "--policy", "mixed_float16")
    assert (done.returncode, done.stdout) == (0, "torch\n"), done.stderr[-2000:]
    _, done = run_without("jax", tmp_path, program, "--policy", "mixed_flot16")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("mpkeras run: error: argument --policy: ") and "Did you mean 'mixed_float16'?" in line


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        pytest.param(["none.py"], "expected a Python file, received 'none.py'", id="no file"),
        pytest.param(["--policy", "mixed_flot16", __file__], "Did you mean 'mixed_float16'?", id="unknown policy"),
        pytest.param(["--polcy", "float32", __file__], "--polcy", id="unknown option"),
    ],
)
def test_run_names_bad_input_in_one_line(capsys, arguments, expected):
    assert expected in failing_line(capsys, "run", *arguments)


def test_run_asks_for_a_script_and_for_no_arguments(capsys):
    assert failing_line(capsys, "run", "--policy", "float32").endswith("required: SCRIPT")
