"""Runs what docs/many_devices.md shows, on one device and on several."""

import re

import pytest

from tests.distributed.launch import run_torchrun
from tests.pages import ROOT, SEEDED, run

TEXT = (ROOT / "docs/many_devices.md").read_text()
FIT, DDP, AVERAGE = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "jax")
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_fit_example(tmp_path, backend, devices):
    text, environment = SEEDED + FIT, {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    if devices > 1 and backend == "tensorflow":
        # TensorFlow has no setting outside the program for this.
        text = f"""
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * {devices})
""" + text.replace("MirroredStrategy()", f"MirroredStrategy(['CPU:%d' % i for i in range({devices})])")
        environment = {}
    assert "skipped_steps: 0" in run(tmp_path / "block.py", text, environment)


def run_on_two_ranks(script, pattern: str) -> list:
    """Returns what was printed that matches `pattern`; two ranks may share a line."""
    return sorted(re.findall(pattern, run_torchrun(script)))


@pytest.mark.slow
@pytest.mark.backends("torch")
def test_the_ddp_example_on_two_ranks(tmp_path):
    script = tmp_path / "block.py"
    script.write_text(SEEDED + DDP)
    found = run_on_two_ranks(script, r"rank \d: loss scale \d+\.0, skipped 0")
    assert found == [f"rank {rank}: loss scale 32768.0, skipped 0" for rank in range(2)]


@pytest.mark.slow
@pytest.mark.backends("torch")
def test_our_step_with_averaged_gradients_on_two_ranks(tmp_path):
    script = tmp_path / "block.py"
    setup = DDP.split("module = ")[0] + "loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)\n"
    report = """
import numpy as np
result = step(np.full((4, 64), rank, "float32"), np.arange(4))
weights = float(keras.ops.sum(model.trainable_variables[0].value))
print(f"rank {rank}: {weights:.6f} {bool(result['skipped'])}")
# Without it a rank that ends later may find its connection to the other broken, and abort.
torch.distributed.destroy_process_group()
"""
    script.write_text(setup + AVERAGE + report)
    first, second = run_on_two_ranks(script, r"rank \d: -?\d+\.\d{6} (?:True|False)")
    # Different rows, the same update.
    assert first.endswith("False") and second == first.replace("rank 0", "rank 1")
