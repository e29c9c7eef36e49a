"""What does `mpkeras.plan_memory` choose for GPT-2-small on a T4, and what is the largest batch?

The model of `gpu_training.py`, sequences of 1024 tokens, Adam, each candidate compiled for a T4 that need not be there:
`pip install "mpkeras[forecast]"`. Four questions: 16 sequences in float32 within 16 GB; 32 sequences in float32 or
`mixed_float16`; the largest batch in `mixed_float16` with nothing else changed, and with all that `plan_memory` may
change.
`--plot` draws the bytes of each candidate of the 32 sequences. Each question takes two to six minutes on two cores;
what is there in `--json` is kept, so that a run goes on where one was stopped.

    python benchmarks/memory_plan.py --json benchmarks/results/memory_plan.json --plot docs/assets/memory_plan.png
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path

import harness
from gpu.cases import case_of

# Name: sequences, and what `plan_memory` is asked.
QUESTIONS = {
    "16 in float32 within 16 GB": (16, {"policies": ["float32"], "memory": "16GB"}),
    "32": (32, {"policies": ["float32", "mixed_float16"]}),
    "largest, policy alone": (16, {"policies": ["mixed_float16"], "batch": "largest", "allow": ()}),
    "largest": (16, {"policies": ["mixed_float16"], "batch": "largest"}),
}
# The question whose candidates are drawn.
DRAWN = "32"
# A T4 for the tiny model.
TINY_MEMORY = "1MB"


def plan_for(question: str, *, is_tiny: bool):
    """Returns the `MemoryPlan` that answers one of `QUESTIONS`."""
    import keras

    import mpkeras
    from gpu import keras_models

    sequences, options = QUESTIONS[question]
    case = case_of("gpt2_small", is_tiny, batch_size=sequences)
    settings = {"device": "t4", **options}
    if is_tiny:
        # Blocks are what repeats.
        case = case._replace(sizes=dataclasses.replace(case.sizes, blocks=2))
        settings |= {"device": "cpu", "memory": TINY_MEMORY}
    keras.utils.clear_session()
    model = keras_models.build(case)
    model = keras.Model(model.inputs[0], model.outputs[0], name="gpt2_small")
    return mpkeras.plan_memory(
        model,
        keras.KerasTensor((sequences, case.sizes.length), "int32"),
        optimizer="adam",
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        budget_s=None,
        verbose=0,
        **settings,
    )


def rows_of(results: list[dict]) -> list[dict[str, str]]:
    """Returns one row of the table for each candidate of each plan."""

    def gib(row, key):
        return "" if row[key] is None else f"{row[key] / 2**30:.2f}"

    rows = []
    for result in results:
        for row in result["candidates"]:
            missing = (row["peak_bytes"] - result["usable_bytes"]) / 2**30
            steps = row["accumulate_steps"]
            bound = row["step_time_lower_bound_ms"]
            rows.append(
                {
                    "sequences": result["question"],
                    "policy": row["policy"],
                    "slots": row["slot_dtype"],
                    "remat": f"{row['remat']}",
                    "parts x rows": f"{steps} x {row['batch'] // steps}",
                    "state GiB": gib(row, "persistent_bytes"),
                    "temporary GiB": gib(row, "temporary_bytes"),
                    "peak GiB": gib(row, "peak_bytes"),
                    "FLOPs": "" if row["flops_factor"] is None else f"{row['flops_factor']:.2f}",
                    "at least ms": "" if bound is None else f"{bound:.0f}",
                    "fits": ("yes, the plan" if row["is_the_plan"] else "yes")
                    if row["fits"]
                    else f"no, by {missing:.2f} GiB",
                }
            )
    return rows


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--question", action="append", choices=tuple(QUESTIONS), help="may be repeated (default: all)")
    option("--quick", action="store_true", help="a tiny model, compiled for this machine's CPU")
    option("--json", type=Path, help="write the plans here, and keep those that are there")
    option("--plot", type=Path, help=f"draw the candidates of {DRAWN!r}, which is then planned anew")
    options = parser.parse_args(argv)
    questions = options.question or list(QUESTIONS)
    if options.plot and DRAWN not in questions:
        parser.error(f"--plot draws {DRAWN!r}, which is not among the questions")
    results = {}
    if options.json and options.json.exists():
        results = {result["question"]: result for result in json.loads(options.json.read_text())["results"]}
    for question in questions:
        is_drawn = options.plot is not None and question == DRAWN
        if question in results and not is_drawn:
            continue
        started = time.monotonic()
        plan = plan_for(question, is_tiny=options.quick)
        results[question] = {"question": question, "seconds": time.monotonic() - started, **plan.to_dict()}
        if is_drawn:
            options.plot.parent.mkdir(parents=True, exist_ok=True)
            plan.plot().savefig(options.plot, dpi=120)
        if options.json:
            content = {"environment": harness.environment(), "results": [results[q] for q in QUESTIONS if q in results]}
            harness.write_json(options.json, content)
    asked = [results[question] for question in QUESTIONS if question in results]
    harness.print_table(rows_of(asked), "Ways to train GPT-2-small on a T4 that were compiled")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
