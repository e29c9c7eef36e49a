"""benchmarks/remat.py, memory_plan.py and remat_time.py: ratios, goals, and what is kept of an earlier run."""

import json

import pytest

import memory_plan
import remat
import remat_time

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")


def program(remat, temporary_bytes, flops, policy="mixed_float16", model="gpt2_small"):
    place = {"model": model, "device": "t4", "policy": policy, "remat": remat, "batch": 16}
    figures = {"persistent_bytes": 2**30, "peak_bytes": 2**31, "fits": True, "step_time_lower_bound_ms": 1.0}
    return {**place, "temporary_bytes": temporary_bytes, "matrix_flops": flops, **figures}


def test_ratios_are_to_the_step_that_keeps_everything_and_goals_are_of_16_bits():
    found = remat.with_ratios(
        [
            program("blocks", 100, 12.0),
            program(None, 500, 10.0),
            program("blocks", 400, 14.0, policy="float32"),
            program(None, 800, 10.0, policy="float32"),
            {**program("RematScope full", 0, 0.0), "refused": "a tracer leaks"},
        ]
    )
    assert [row.get("temporary_share") for row in found] == [0.2, 1.0, 0.5, 1.0, None]
    assert [row.get("flops_factor") for row in found] == [1.2, 1.0, 1.4, 1.0, None]
    assert [row.get("goal_temporary_share") for row in found] == [0.15, None, None, None, None]
    cells = remat.rows_of(found)
    assert (cells[0]["of everything kept"], cells[0]["FLOPs"]) == ("0.20 (goal 0.15)", "1.20 (goal 1.25)")
    assert cells[-1]["fits"] == "no program" and cells[-1]["FLOPs"] == ""


def test_what_is_there_is_kept_and_what_is_missing_is_compiled(tmp_path, monkeypatch, capsys):
    def compile_steps(name, device, policy, remats, *, is_tiny):
        asked.append((device, policy, tuple(remats)))
        return [{**program(remat, 500, 10.0, policy), "device": device} for remat in remats]

    asked = []
    monkeypatch.setattr(remat, "compile_steps", compile_steps)
    options = ["--model", "gpt2_small", "--json", str(tmp_path / "found.json")]
    remat.main([*options, "--device", "t4"])
    remat.main([*options, "--device", "t4", "--device", "l4"])
    remat.main([*options, "--device", "t4", "--peer", "full"])
    everything = (None, "products", "blocks")
    assert asked == [
        ("t4", "mixed_float16", everything),
        ("l4", "mixed_bfloat16", everything),
        ("t4", "mixed_float16", ("RematScope full",)),
    ]
    results = json.loads((tmp_path / "found.json").read_text())["results"]
    assert [(row["device"], row["remat"]) for row in results] == [
        *(("l4", remat) for remat in everything),
        *(("t4", remat) for remat in (*everything, "RematScope full")),
    ]
    # A table at the end of each run, of all that is known.
    assert capsys.readouterr().out.count("gpt2_small") == 3 + 6 + 7


def test_plans_are_kept_and_the_drawn_one_is_made_anew(tmp_path, monkeypatch, capsys):
    class Plan:
        def to_dict(self):
            row = {"policy": "float32", "slot_dtype": "auto", "remat": None, "accumulate_steps": 2, "batch": 64}
            row |= {"persistent_bytes": 2**30, "temporary_bytes": 2**30, "peak_bytes": 3 * 2**30}
            row |= {"step_time_lower_bound_ms": 7.0, "flops_factor": 1.0, "fits": False, "is_the_plan": True}
            return {"usable_bytes": 2**31, "candidates": [row]}

        def plot(self):
            from mpkeras.tools.shared.report import make_figure

            return make_figure()

    asked = []
    monkeypatch.setattr(memory_plan, "plan_for", lambda question, is_tiny: asked.append(question) or Plan())
    options = ["--json", str(tmp_path / "plans.json"), "--question", "32"]
    memory_plan.main(options)
    memory_plan.main([*options, "--question", "largest"])
    memory_plan.main([*options, "--plot", str(tmp_path / "assets" / "plan.png")])
    assert asked == ["32", "largest", "32"] and (tmp_path / "assets" / "plan.png").stat().st_size > 1000
    shown = capsys.readouterr().out
    assert "2 x 32" in shown and "no, by 1.00 GiB" in shown


@pytest.mark.slow
@pytest.mark.backends("jax")
@pytest.mark.parametrize("name", ["gpt2_small", "resnet50"])
def test_tiny_steps_are_compiled_for_this_cpu(name):
    remats = [None, "products", "blocks", "RematScope full"]
    found = remat.compile_steps(name, "cpu", "float32", remats, is_tiny=True)
    assert [row["remat"] for row in found] == remats
    own = found[:3]
    assert all(row["temporary_bytes"] > 0 and row["matrix_flops"] > 0 and row["fits"] for row in own)
    assert len({row["persistent_bytes"] for row in own}) == 1


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


@pytest.mark.slow
@pytest.mark.backends("torch")
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_budget_of_torch_changes_the_program_and_not_the_loss():
    case = remat_time.CASES["tiny"]
    steps = [remat_time.torch_step(case, budget) for budget in (None, 1.0, 0.0)]
    losses = [step() for step in steps]
    # Operations are decomposed, and rounded elsewhere.
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-5)
    assert len({remat_time.peak_bytes_of(step) for step in steps}) == 3
