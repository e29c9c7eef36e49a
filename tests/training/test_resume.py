"""G6: training goes on exactly from every format, in a new process and under another global policy."""

import signal
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from tests.training import resume_program

ROOT = Path(__file__).parents[2]
# As in setup.cfg: NumPy 2 on TensorFlow variables.
NOT_OURS = "ignore:__array__ implementation doesn't accept a copy keyword:DeprecationWarning"


def run(command, directory):
    return subprocess.run(
        [sys.executable, "-W", "error", "-W", NOT_OURS, "-m", "tests.training.resume_program", command, str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """The folder with every outcome, and what the runs without interruption came to."""
    directory = tmp_path_factory.mktemp("resume")
    resume_program.first_half(directory)
    killed = run("kill", directory)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    done = run("resume", directory)
    assert done.returncode == 0, done.stderr[-2000:]
    return directory, {dropout: resume_program.whole_run(dropout) for dropout in (False, True)}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy"), resume_program.CASES)
def test_training_goes_on_exactly(resumed, name, policy):
    if name in resume_program.TF_FORMATS and keras.backend.backend() != "tensorflow":
        pytest.skip("for tensorflow")
    directory, whole = resumed
    expected = whole[name in resume_program.WITH_DROPOUT]
    outcome = np.load(directory / f"{name} {policy}.npz")
    assert set(outcome) == set(expected)
    different = [key for key in expected if outcome[key].tobytes() != expected[key].tobytes()]
    if name == "killed":
        # Weight files hold no metrics: the means over the broken epoch are those of its last batches.
        different = [key for key in different if key not in ("loss", "mae")]
        assert [outcome[key][-1] for key in ("loss", "mae")] == [expected[key][-1] for key in ("loss", "mae")]
    assert not different
