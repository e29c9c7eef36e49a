"""`mpkeras replay`: what it prints of a capsule, and one line on bad input."""

import json
import sys

import numpy as np
import pytest

import mpkeras
from tests.cli.lines import lines_of
from tests.tools.blackbox import faults

# The faults are in the data, among others.
pytestmark = pytest.mark.filterwarnings("ignore:.*is given numbers beyond float16")

printed, failing_line = lines_of("replay")


def capsule(tmp_path, *fault, loss="mse", **data):
    optimizer = mpkeras.LossScaleOptimizer("sgd", loss_scale=4.0)
    step = mpkeras.make_train_step(faults.model_with(*fault), optimizer, loss, jit_compile=False)
    assert bool(step(*faults.batch(**data))["skipped"])
    step.capsule(tmp_path / "failure.mpk")
    return str(tmp_path / "failure.mpk")


@pytest.mark.slow
def test_what_happened_is_printed(capsys, tmp_path):
    lines = printed(capsys, capsule(tmp_path, scale=1e6)).splitlines()
    assert lines[0] == "Step 0 of 'net' was skipped."
    assert lines[1] == "Loss not finite, loss scale 4, after it 4."
    assert lines[2] == "The same bits as when it happened."
    assert lines[3].startswith("First layer: layer ") and "is given up to" in lines[3]
    assert lines[4].startswith("First operation: '") and ", forward in layer 'net/hidden': makes inf" in lines[4]
    assert lines[5].startswith("What to do: Layer 'net/hidden'") and "'path:^net/hidden$'" in lines[5]
    assert len(lines) == 6


@pytest.mark.slow
def test_a_line_of_the_user(capsys, tmp_path, monkeypatch):
    path = capsule(tmp_path, faults.Log(name="fault", dtype="float32"))
    line = failing_line(capsys, path)
    assert line.endswith("Name the module that defines them: `--import MODULE`.") and "custom_objects" not in line
    monkeypatch.setattr(sys, "path", [*sys.path])
    text = printed(capsys, path, "--import", "tests.tools.blackbox.faults")
    assert "faults.py:" in text and "call: return inputs + ops.log(shifted)" in text


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
def test_json_comparison_and_a_bad_batch(capsys, tmp_path):
    report = json.loads(printed(capsys, capsule(tmp_path, scale=1e6), "--json", "--compare"))
    assert report["run"]["same_bits"] and report["run"]["loss"] == "nan" and report["step"] == 0
    assert report["operation"]["side"] == "forward" and report["operation"]["where"] == "net/hidden"
    assert report["comparison"]["first"]["path"].endswith("hidden")
    assert "How far each layer is from float32" in printed(capsys, tmp_path / "failure.mpk", "--compare")
    text = printed(capsys, capsule(tmp_path, scale=np.nan))
    assert "First operation: none before the batch: 'x' holds 24 values that are not finite." in text


@pytest.mark.backends("tensorflow")
def test_a_run_with_other_bits_names_the_version(tmp_path):
    from _mpkeras_cli.saved_model import Replay

    run = {"loss": 1.5, "loss_scale": 2.0, "skipped": True, "same_bits": False, "different": ["logs/loss"]}
    run["versions"] = {"keras": ("3.10.0", "3.15.1")}
    replay = Replay("a.mpk", "net", 3, 1, True, 1, 4.0, run, None, None, "Nothing.")
    assert "Step 3 of epoch 2 of 'net' was skipped.\nLoss 1.5, loss scale 4, after it 2." in str(replay)
    assert "Not the same bits as when it happened (1 values: logs/loss): different versions: keras 3.10.0 then" in str(
        replay
    )
    assert "First operation: none, op by op everything is finite." in str(replay)
    run["versions"] = {}
    assert "moved weights all the same" in str(Replay("a", "net", 3, 1, False, 1, 4.0, run, None, None, "Nothing."))
    assert "2 devices shared that step." in str(Replay("a", "net", 3, 1, True, 2, 4.0, run, None, None, "Nothing."))


@pytest.mark.backends("tensorflow")
def test_bad_input_is_status_2(capsys, tmp_path):
    assert "does not exist" in failing_line(capsys, tmp_path / "none.mpk")
    (tmp_path / "text.mpk").write_text("no capsule")
    assert "Expected a whole capsule" in failing_line(capsys, tmp_path / "text.mpk")
    assert "nowhere" in failing_line(capsys, tmp_path / "text.mpk", "--import", "nowhere")
    assert "--compare" in printed(capsys, "--help")
