"""The steps of one commit, timed one by one as `before_after.py` asks for them, line by line."""

import importlib
import json
import logging
import os
import sys
import warnings

if __name__ == "__main__":
    # The benchmarks are those of the commit, which `PYTHONPATH` names, and not those beside this file.
    sys.path.pop(0)

import harness  # noqa: E402

# Benchmark -> its variants, `bare` first.
VARIANTS = {
    "train_step_overhead": ("bare", "mpkeras", "mpkeras, rollback"),
    "rollback_overhead": ("bare", "check", "check, rollback"),
    "loss_scale_overhead": ("bare", "mpkeras"),
}


def steps_of(case: dict) -> tuple:
    """Returns `({variant: step}, before)`: what is timed, and what is called before each, untimed."""
    benchmark, variants = importlib.import_module(case["benchmark"]), VARIANTS[case["benchmark"]]
    if "params" in case:
        import keras

        for mode, steps, _, before in benchmark.make_steps(keras.backend.backend(), case["params"]):
            if mode == case["mode"]:
                return {variant: steps[variant] for variant in variants}, before
    policy = ("float32",) if case["benchmark"] == "train_step_overhead" else ()
    made = {variant: benchmark.make_step(case["model"], variant, case["jit_compile"], *policy) for variant in variants}
    return {variant: step for variant, (step, *_) in made.items()}, lambda: None


def answer(lines, say) -> None:
    """Runs in a process of one commit: makes the steps of a case, or times one, as it is told line by line."""
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*scale_loss.*")
    steps, before = {}, None
    for line in lines:
        asked = json.loads(line)
        if asked == "environment":
            say(harness.environment())
        elif isinstance(asked, dict):
            # The old ones first: both processes have to find room.
            steps.clear()
            steps, before = steps_of(asked)
            for step in steps.values():
                harness.time_interleaved({"step": step}, 1, wait=harness.wait_for_device, before=before)
            say("ready")
        else:
            options = {"wait": harness.wait_for_device, "before": before, "warm_up": 1}
            say(harness.time_interleaved({asked: steps[asked]}, 1, **options)[asked][0])


if __name__ == "__main__":
    # What is said to the other process, and not what libraries print.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    answer(sys.stdin, lambda what: print(json.dumps(what), file=out, flush=True))
