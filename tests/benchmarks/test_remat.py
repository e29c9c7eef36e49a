"""benchmarks/remat.py, memory_plan.py and remat_time.py: tiny runs."""

import pytest

import memory_plan
import remat
import remat_time

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")


@pytest.mark.slow
@pytest.mark.backends("jax")
def test_tiny_steps_are_compiled_for_this_cpu():
    remats = [None, "products", "blocks", "RematScope full"]
    found = remat.compile_steps("gpt2_small", "cpu", "float32", remats, is_tiny=True)
    assert [row["remat"] for row in found] == remats
    own = found[:3]
    assert all(row["temporary_bytes"] > 0 and row["matrix_flops"] > 0 and row["fits"] for row in own)
    assert len({row["persistent_bytes"] for row in own}) == 1
    rows = [{"model": "gpt2_small", "device": "cpu", "policy": "float32", **row} for row in found]
    assert len(remat.rows_of(remat.with_ratios(rows))) == 4


@pytest.mark.slow
@pytest.mark.backends("jax")
def test_a_tiny_plan_for_this_cpu():
    plan = memory_plan.plan_for("32", is_tiny=True)
    (row,) = memory_plan.rows_of([{"question": "32", **plan.to_dict()}])[-1:]
    assert plan.batch == 32 and row["policy"] in ("float32", "mixed_float16")


@pytest.mark.slow
@pytest.mark.backends("torch")
def test_steps_of_torch_have_the_same_losses_and_a_peak():
    case = remat_time.CASES["transformer"]
    steps = {remat: remat_time.our_step(case, remat, jit_compile=False) for remat in (None, "blocks")}
    losses = {remat: [step() for _ in range(2)] for remat, step in steps.items()}
    assert losses[None] == losses["blocks"] and losses[None][1] < losses[None][0]
    peaks = {remat: remat_time.peak_bytes_of(step, collects=True) for remat, step in steps.items()}
    assert min(peaks.values()) > 10e6
