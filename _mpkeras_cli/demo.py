"""The subcommand `demo`."""

import contextlib
import importlib.util
import json
import pathlib
import shutil
import sys

from _mpkeras_cli.command import add_command, count, import_mpkeras, positive

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


def add_demo(subparsers):
    option = add_command(
        subparsers,
        "demo",
        _demo,
        help="train two tasks under each policy and say which one pays off here",
        description=_DESCRIPTION,
    )
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


def _demo(args) -> int:
    """Runs the demo and returns the exit status: 0, or 1 if no task could be trained even in float32."""
    task_names = _TASK_NAMES if args.task == "all" else (args.task,)
    _check_packages(task_names, args.error)
    progress = sys.stderr if args.json else sys.stdout
    # Keras' progress bar writes to standard output, which with `--json` belongs to the result alone.
    with contextlib.redirect_stdout(progress):
        import_mpkeras(args.error)
        from mpkeras.demo.runs import run_demo
        from mpkeras.demo.summary import BASELINE

        policies = _checked_policies(args.policy, args.error)
        _check_out(args.out, args.error)
        is_terminal = progress.isatty()
        try:
            result, text = run_demo(
                task_names,
                policies,
                seeds=args.seeds,
                epochs=args.epochs,
                minutes=args.minutes,
                quick=args.quick,
                out=args.out,
                width=shutil.get_terminal_size((_WIDTH, 24)).columns if is_terminal else _WIDTH,
                verbose=1 if is_terminal else 2,
            )
        except FileNotFoundError as reason:
            args.error(reason)
        print(text, flush=True)
    if args.json:
        print(json.dumps(result, indent=2, allow_nan=False))
    return 0 if any(r["policy"] == BASELINE and r["error"] is None for r in result["summary"]) else 1


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
    from mpkeras import get_policy

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
