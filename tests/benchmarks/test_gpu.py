"""benchmarks/gpu_training.py: what follows from the times, and a tiny run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import gpu_training as benchmark
from gpu import cases, report, rounds, variants
from gpu.variants import FLOAT32, KERAS_FLOAT16, MPKERAS_BFLOAT16, MPKERAS_FLOAT16, TF32, VARIANTS

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")
JAX = pytest.mark.backends("jax")


def measured(step_ms, *, group=0, peak_bytes=None):
    blocks = [{"step_ms": ms, "queue_ms": 1.0} for ms in step_ms]
    found = {"group": group, "blocks": blocks, "unavailable": None, "peak_bytes": peak_bytes}
    return {**found, "losses": [1.0, 0.5], "attention": "cuDNN flash"}


BARE = f"{MPKERAS_FLOAT16}, no scaling"


def results_of(found, peak_flops_per_s=1e12):
    results = report.summarized("bert_base", cases.TINY_CASES["bert_base"], found, peak_flops_per_s, False)
    return {result["variant"]: result for result in results}


def test_what_follows_from_the_times():
    found = results_of(
        {
            FLOAT32: measured([8.0, 12.0], peak_bytes=4000),
            MPKERAS_FLOAT16: measured([4.0, 4.0], peak_bytes=2000),
            BARE: measured([3.0, 3.5], peak_bytes=2000),
            MPKERAS_BFLOAT16: measured([4.0, 4.0], group=1),
            KERAS_FLOAT16: {"group": 0, "blocks": [], "unavailable": "out of memory"},
        }
    )
    ours = found[MPKERAS_FLOAT16]
    # Four sequences of sixteen tokens in 4 ms.
    assert ours["per_s"]["median"] == 16_000
    assert ours["speedup"] == {"median": 2.5, "q1": 2.25, "q3": 2.75, "paired": True}
    assert ours["scaling_ms"]["median"] == 0.75
    assert ours["memory_ratio"] == 0.5
    flops = cases.flops_per_step(cases.TINY_CASES["bert_base"])
    assert ours["utilisation"] == pytest.approx(flops / 4e-3 / 1e12)
    assert found[FLOAT32]["scaling_ms"] is None and ours["notes"] == []
    of_another_group = found[MPKERAS_BFLOAT16]
    assert of_another_group["speedup"] == {"median": 2.5, "q1": 2.5, "q3": 2.5, "paired": False}
    assert any("not in the same rounds" in note for note in of_another_group["notes"])
    failed = found[KERAS_FLOAT16]
    assert failed["per_s"] is failed["speedup"] is failed["peak_bytes"] is None
    assert failed["notes"] == ["out of memory"]
    rows = {row["variant"]: row["x float32"] for row in report.table_rows(list(found.values()))}
    assert rows[KERAS_FLOAT16] == "-" and rows[MPKERAS_FLOAT16] != "-"


@JAX
@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2_small", "resnet50", "bert_base"])
def test_tiny_run_without_tensorflow(tmp_path, model):
    # Where TensorFlow is installed, this is what importing it finds instead.
    (tmp_path / "tensorflow.py").write_text("raise ImportError('no TensorFlow here')\n")
    root = Path(benchmark.__file__).parents[1]
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])}
    output = tmp_path / "results.json"
    command = [sys.executable, benchmark.__file__, "--tiny", "--model", model, "--json", str(output)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=settings)
    assert run.returncode == 0, run.stderr
    content = json.loads(output.read_text())

    has_torch = "plain torch" in [entry["backend"] for entry in content["environments"]]
    names = [name for name, variant in VARIANTS.items() if has_torch or variant.framework != "torch"]
    found = {(result["model"], result["variant"]): result for result in content["results"]}
    assert list(found) == [(model, name) for name in names]
    for name in names:
        result = found[model, name]
        if content["device"]["kind"] == "cpu":
            assert result["peak_bytes"] is None and result["utilisation"] is None and result["notes"]
            if name == TF32:
                assert result["per_s"] is None and result["notes"] == [rounds.NO_TF32]
                continue
        assert result["per_s"]["median"] > 0, result["notes"]
        assert np.isfinite(result["losses"]).all() and result["losses"][-1] < result["losses"][0]
        assert (result["scaling_ms"] is not None) == (VARIANTS[name].unscaled is not None)
        assert result["params"] == found[model, FLOAT32]["params"]
        if VARIANTS[name].framework == "keras":
            # The same seed and data: 16 bits change the loss in the third digit.
            np.testing.assert_allclose(result["losses"], found[model, FLOAT32]["losses"], rtol=2e-2)
    assert {goal["met"] for goal in content["goals"]} == {None}
    assert variants.TF32 in run.stdout and "FLOPs" in run.stdout
