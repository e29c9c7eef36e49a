"""P23, P39, G7: all replicas take the same decision."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytestmark = pytest.mark.backends("tensorflow")
SCRIPT = Path(__file__).parent / "mirrored.py"
ROOT = Path(__file__).parents[2]


def run(*arguments):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert done.returncode == 0 and lines, done.stderr[-2000:]
    return json.loads(lines[-1].removeprefix("RESULT "))


@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize(("bad", "scale"), [("input", 1024.0), ("gradient", 512.0)])
def test_inf_on_one_replica_alone_skips_on_all(replica, bad, scale):
    """The scale halves when only a gradient overflowed, and stays when the forward pass is at fault."""
    result = run("--bad-replica", str(replica), "--bad", bad)
    assert result["weights_unchanged"]
    assert result["state_finite"]
    assert result["scales"] == [scale, scale]


def test_inf_on_the_last_of_four_replicas_in_eager_mode():
    result = run("--replicas", "4", "--bad-replica", "3", "--eager")
    assert result["weights_unchanged"]
    assert result["state_finite"]
    assert result["scales"] == [1024.0] * 4


def test_two_replicas_without_faults_equal_one_device_with_the_joined_batch():
    # Without BatchNormalization, whose statistics are taken per replica.
    two, one = run("--no-batchnorm"), run("--no-batchnorm", "--replicas", "1")
    assert not two["weights_unchanged"]
    for a, b in zip(two["weights"], one["weights"], strict=True):
        # float16 has 11 significant bits, and the batch is summed in another order
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=5e-4)


def test_xla_under_a_strategy_is_refused_by_name():
    with pytest.raises(AssertionError, match="XLA"):
        run("--jit")
