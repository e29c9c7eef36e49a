"""`run_demo`: trains the tasks under each policy, and writes and returns what was found."""

import json
import math
import textwrap
import time

from mpkeras.demo import plot, runs, summary
from mpkeras.demo.summary import BASELINE
from mpkeras.demo.tasks import TASKS
from mpkeras.devices import environment

__all__ = ["BASELINE", "run_demo", "without_non_finite"]


def run_demo(
    task_names, policies, *, seeds: int, epochs=None, minutes: float, quick: bool, out, width: int = 110, verbose=2
) -> tuple:
    """Trains, writes `demo.json` and `demo.png`, and returns the result as a dictionary for JSON and as text."""
    started = time.perf_counter()
    tasks = [TASKS[name](quick=quick) for name in task_names]
    data_sets = [task.load() for task in tasks]
    where = environment()
    heading = f"mpkeras demo: Keras {where['keras']}, {where['backend']} on {where['device']}, {where['cpu']}"
    print(f"{len(tasks) * len(policies) * seeds} runs of `fit`: {', '.join(policies)}", flush=True)
    records, step_times_ms, plans = runs.compare(
        tasks, data_sets, policies, seeds, epochs, limit_s=60 * minutes, verbose=verbose
    )
    rows = summary.summarize(tasks, policies, records, step_times_ms, plans)
    sentence = "--quick shows that everything runs; its models are too small to measure anything."
    if not quick:
        sentence = summary.verdict(rows)
    json_path, png_path = out / "demo.json", out / "demo.png"
    plot.save(png_path, rows, records, {task.name: task.title for task in tasks}, heading)
    wall_time_s = round(time.perf_counter() - started, 1)
    result = {
        "format": 2,
        "environment": where,
        "settings": {
            "tasks": {
                task.name: runs.settings(task, data_set, epochs)
                for task, data_set in zip(tasks, data_sets, strict=True)
            },
            "policies": policies,
            "seeds": seeds,
            "quick": quick,
            "jit_compile": runs.uses_xla(),
            "minutes": minutes,
            "timed_rounds": {task: len(next(iter(times.values()), [])) for task, times in step_times_ms.items()},
        },
        "verdict": sentence,
        "summary": rows,
        "plans": {task: {name: plan.to_dict() for name, plan in of_task.items()} for task, of_task in plans.items()},
        "runs": records,
        "step_times_ms": step_times_ms,
        "wall_time_s": wall_time_s,
        "files": {"json": str(json_path), "png": str(png_path)},
    }
    result = without_non_finite(result)
    json_path.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    rounds = sorted({len(times) for of_task in step_times_ms.values() for times in of_task.values()} or {0})
    text = summary.render(rows, heading, " or ".join(map(str, rounds)), width)
    written = f"Written to {json_path} and {png_path} after {wall_time_s:.0f} s."
    return result, f"\n{text}\n\n{textwrap.fill(sentence, width)}\n\n{written}"


def without_non_finite(value):
    """Returns `value` with every NaN and infinity in it as `None`: JSON has no word for them."""
    if isinstance(value, dict):
        return {key: without_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
