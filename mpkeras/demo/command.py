"""`mpkeras demo`: its options, and what it prints and writes."""

import argparse
import contextlib
import importlib.util
import json
import math
import pathlib
import shutil
import sys
import textwrap
import time

from mpkeras.export.options import count, positive

# Nothing at the top imports Keras or a package that `pip install mpkeras` leaves out: `--help` is quick and
# always works.

_DESCRIPTION = """\
Trains two small tasks in float32, mixed_bfloat16 and mixed_float16, and says which policy pays off here.

  digits  a BatchNorm CNN on scikit-learn's handwritten digits: held-out accuracy
  text    a byte-level transformer on the source of Python's standard library: held-out bits per byte

Each run is a plain `model.fit` with the callback `mpkeras.callbacks.MixedPrecision`. The whole demo takes
about three minutes on two CPU cores. One step of each policy is timed first: what would take longer than
`--minutes` (float16 on some CPUs) is run with fewer seeds or left out, and the result says so. It prints a
table and writes demo.json (all that was measured) and demo.png (curves, speed and memory). The environment
variable KERAS_BACKEND chooses the backend: tensorflow, jax or torch.
"""
_BASELINE = "float32"
_DEFAULT_POLICIES = (_BASELINE, "mixed_bfloat16", "mixed_float16")
_TASK_NAMES = ("digits", "text")
_WIDTH = 110  # of the table where standard output is no terminal


def add_parser(subparsers):
    """Adds the subcommand to `subparsers` of an `argparse` parser."""
    parser = subparsers.add_parser(
        "demo",
        help="train two tasks under each policy and say which one pays off here",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option("--task", choices=[*_TASK_NAMES, "all"], default="all", help="what to train (default: all)")
    option(
        "--policy",
        action="append",
        metavar="NAME[,NAME]",
        help="policies to compare; may be repeated. float32 is always among them, as the others are measured "
        f"against it (default: {','.join(_DEFAULT_POLICIES)})",
    )
    option("--seeds", type=count, default=3, metavar="N", help="runs of each case (default: 3)")
    option("--epochs", type=count, metavar="N", help="epochs of a run (default: 10 digits, 6 text)")
    option(
        "--minutes",
        type=positive("minutes"),
        default=2.0,
        metavar="M",
        help="what all runs of one policy on one task may take, by its first step (default: 2)",
    )
    option(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("mpkeras-demo"),
        metavar="DIR",
        help="where demo.json and demo.png go (default: mpkeras-demo)",
    )
    option("--json", action="store_true", help="print the result as JSON; all else goes to standard error")
    option("--quick", action="store_true", help="tiny models, to see that everything runs; measures nothing")
    parser.set_defaults(run=run, error=parser.error)


def run(args) -> int:
    """Runs the demo and returns the exit status: 0, or 1 if no task could be trained even in float32.

    Bad input ends the program through `args.error`, with one line and status 2, before anything is trained.
    """
    task_names = _TASK_NAMES if args.task == "all" else (args.task,)
    _check_packages(task_names, args.error)
    progress = sys.stderr if args.json else sys.stdout
    # Keras' progress bar writes to standard output, which with `--json` belongs to the result alone.
    with contextlib.redirect_stdout(progress):
        policies = _checked_policies(args.policy, args.error)
        _check_out(args.out, args.error)
        result, text = _measure(args, task_names, policies, progress.isatty())
        print(text, flush=True)
    if args.json:
        print(json.dumps(result, indent=2, allow_nan=False))
    return 0 if any(r["policy"] == _BASELINE and r["error"] is None for r in result["summary"]) else 1


def _check_packages(task_names, error):
    needed = {"matplotlib": "matplotlib"}
    if "digits" in task_names:
        needed["sklearn"] = "scikit-learn"
    missing = [package for module, package in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        error(f'the demo needs {" and ".join(missing)}: run `pip install "mpkeras[demo]"`')


def _check_out(out, error):
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as reason:
        error(f"argument --out: cannot write to {str(out)!r} ({reason.strerror}); name another directory")


def _checked_policies(values, error) -> list:
    """Returns the names of the policies, float32 first, or ends the program."""
    from mpkeras.policies.registry import get_policy

    values = values or _DEFAULT_POLICIES
    names = [name.strip() for value in values for name in value.split(",") if name.strip()]
    for name in names:
        try:
            policy = get_policy(name)
        except ValueError as reason:
            error(f"argument --policy: {reason}")
        if policy.variable_dtype == "float16":
            error(
                f"argument --policy: expected a policy with float32 variables, received {name!r}, in which "
                "small updates round to zero; use 'mixed_float16'"
            )
    if _BASELINE not in names:
        print(f"{_BASELINE} is added: the other policies are measured against it.")
    return list(dict.fromkeys([_BASELINE, *names]))


def _measure(args, task_names, policies, is_terminal: bool) -> tuple:
    """Trains, writes the files, and returns the result as a dictionary for JSON and as text."""
    from mpkeras.demo import comparison, plot, summary, table
    from mpkeras.demo.environment import environment
    from mpkeras.demo.tasks import TASKS

    started = time.perf_counter()
    tasks = [TASKS[name](quick=args.quick) for name in task_names]
    try:
        data_sets = [task.load() for task in tasks]
    except FileNotFoundError as reason:
        args.error(reason)
    where = environment()
    heading = f"mpkeras demo: Keras {where['keras']}, {where['backend']} on {where['device']}, {where['cpu']}"
    print(f"{len(tasks) * len(policies) * args.seeds} runs of `fit`: {', '.join(policies)}", flush=True)
    verbose = 1 if is_terminal else 2
    records, step_times_ms, plans = comparison.compare(
        tasks, data_sets, policies, args.seeds, args.epochs, limit_s=60 * args.minutes, verbose=verbose
    )
    rows = summary.summarize(tasks, policies, records, step_times_ms, plans)
    sentence = "--quick shows that everything runs; its models are too small to measure anything."
    if not args.quick:
        sentence = summary.verdict(rows)
    json_path, png_path = args.out / "demo.json", args.out / "demo.png"
    plot.save(png_path, rows, records, {task.name: task.title for task in tasks}, heading)
    wall_time_s = round(time.perf_counter() - started, 1)
    result = {
        "format": 2,
        "environment": where,
        "settings": {
            "tasks": {
                task.name: comparison.settings(task, data_set, args.epochs)
                for task, data_set in zip(tasks, data_sets, strict=True)
            },
            "policies": policies,
            "seeds": args.seeds,
            "quick": args.quick,
            "jit_compile": comparison.uses_xla(),
            "minutes": args.minutes,
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
    width = shutil.get_terminal_size((_WIDTH, 24)).columns if is_terminal else _WIDTH
    rounds = sorted({len(times) for of_task in step_times_ms.values() for times in of_task.values()} or {0})
    text = table.render(rows, heading, " or ".join(map(str, rounds)), width)
    written = f"Written to {json_path} and {png_path} after {wall_time_s:.0f} s."
    return result, f"\n{text}\n\n{textwrap.fill(sentence, width)}\n\n{written}"


def without_non_finite(value):
    """Returns `value` with every NaN and infinity in it as `None`: JSON has no word for them."""
    if isinstance(value, dict):
        return {key: without_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
