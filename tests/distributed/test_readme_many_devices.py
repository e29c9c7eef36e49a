"""Runs what the README shows about many devices, on one device and on several."""

import os
import re
import subprocess
import sys

import pytest

from tests.distributed.launch import ROOT, free_ports

DRAFT = ROOT / "README_many_devices.md"
TEXT = (DRAFT if DRAFT.exists() else ROOT / "README.md").read_text().split("## Many devices\n")[1].split("\n## ")[0]
FIT, DDP = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


def run(path, text, environment):
    path.write_text(text)
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.backends("tensorflow", "jax")
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_fit_example(tmp_path, backend, devices):
    text, environment = FIT, {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    if devices > 1 and backend == "tensorflow":
        # TensorFlow has no setting outside the program for this.
        text = f"""
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * {devices})
""" + FIT.replace("MirroredStrategy()", f"MirroredStrategy(['CPU:%d' % i for i in range({devices})])")
        environment = {}
    assert "skipped_steps: 0" in run(tmp_path / "block.py", text, environment)


@pytest.mark.backends("torch")
def test_the_ddp_example_on_two_ranks(tmp_path):
    script = tmp_path / "block.py"
    script.write_text(DDP)
    (port,) = free_ports(1)
    # `torchrun`, which needs not be on the path.
    arguments = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_addr", "127.0.0.1"]
    done = subprocess.run(
        [sys.executable, *arguments, "--master_port", str(port), str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert sorted(re.findall(r"rank \d: loss scale \d+\.0, skipped 0", done.stdout)) == [
        f"rank {rank}: loss scale 32768.0, skipped 0" for rank in range(2)
    ]
