"""What does mpkeras cost and gain on this machine, and which of its goals are reached here?

Runs the speed and memory benchmarks of this folder one after the other, each in a process of its own with `--json` and
`--plot`, and writes `NAME.json`, `NAME.png` and, with the table it prints, `NAME.txt`. In the end every goal is listed
with what was measured. A missed goal is a result; a benchmark that fails makes the exit status 1 and leaves the files
of an earlier run where they are.

    python benchmarks/run_all.py --quick --out /tmp/benchmarks
    python benchmarks/run_all.py --only peers import_time
"""

import argparse
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import harness

FOLDER = Path(__file__).resolve().parent
# By name, the options besides `--quick` of a quick run: all of them together take about ten minutes on two cores.
SCRIPTS = {
    "loss_scale_overhead": [],
    "small_state": [],
    "train_step_overhead": [],
    "rollback_overhead": [],
    # Short epochs exaggerate what a callback does at their ends; long ones took as long as all else together.
    "monitor_overhead": ["--rounds", "3", "--steps", "15"],
    "black_box": [],
    "peers": [],
    "precision_speed": [],
    "memory": [],
    "import_time": [],
}
# They have `--quick` as well, but ask for more than speed and take minutes: see CONTRIBUTING.md.
OTHERS = (
    "accelerators",
    "all_reduce",
    "before_after",
    "fine_tune",
    "first_fit",
    "float8",
    "hub",
    "many_devices",
    "memory_plan",
    "remat",
    "remat_time",
    "small_state_quality",
)
# What tells one entry of a result from another, and how it is written.
LABELS = dict.fromkeys(("backend", "mode", "model", "task", "policy", "part", "display"), "{}")
LABELS |= {"params": "{:,} parameters", "batch_size": "batch {}", "variant": "{}"}
# What should be at least its goal; everything else at most.
HIGHER_IS_BETTER = ("speedup", "same_bits_share", "right_share")


def goals_of(result: dict) -> list[dict]:
    """Returns every goal of one entry of `results` with what was measured.

    The goal of `NAME` is in `goal_NAME`. What was measured is a number or a summary with a median.

    Returns:
        Dictionaries with `"case"`, `"quantity"`, `"measured"`, `"goal"`, `"reached"` and `"margin"`: how much better
        than the goal, as a share of it; below 0 where it is missed.
    """
    found = []
    for key, goal in result.items():
        quantity = key.removeprefix("goal_")
        if quantity == key or quantity not in result:
            continue
        measured = result[quantity]
        measured = measured["median"] if isinstance(measured, dict) else measured
        margin = (measured - goal if quantity.endswith(HIGHER_IS_BETTER) else goal - measured) / goal
        case = ", ".join(form.format(result[label]) for label, form in LABELS.items() if label in result)
        numbers = {"measured": measured, "goal": goal, "reached": margin >= 0, "margin": margin}
        found.append({"case": case, "quantity": quantity, **numbers})
    return found


def goal_rows(goals: dict[str, list[dict]]) -> list[dict[str, str]]:
    """Returns the rows to print, from the goals by name of the benchmark."""
    return [
        {
            "benchmark": name,
            "case": found["case"],
            "quantity": found["quantity"],
            "measured": f"{found['measured']:.3g}",
            "goal": ("≥ " if found["quantity"].endswith(HIGHER_IS_BETTER) else "≤ ") + f"{found['goal']:.3g}",
            "result": f"reached, {found['margin']:.0%} better"
            if found["reached"]
            else f"missed by {-found['margin']:.0%}",
        }
        for name, entries in goals.items()
        for found in entries
    ]


def run_script(name: str, arguments: list[str], out: Path, folder: Path = FOLDER) -> dict | None:
    """Runs one benchmark and returns what its JSON holds, or `None` if it fails; its messages are printed.

    The files are written elsewhere first: `out` never holds a table of one run and a picture of another.
    """
    with tempfile.TemporaryDirectory() as temporary:
        written = {ending: Path(temporary) / f"{name}.{ending}" for ending in ("json", "png", "txt")}
        command = [sys.executable, str(folder / f"{name}.py"), "--json", str(written["json"])]
        if importlib.util.find_spec("matplotlib"):
            command += ["--plot", str(written["png"])]
        done = subprocess.run([*command, *arguments], stdout=subprocess.PIPE, text=True)
        print(done.stdout, flush=True)
        if done.returncode:
            print(f"{name}.py failed with exit status {done.returncode}.", file=sys.stderr)
            return None
        written["txt"].write_text(done.stdout)
        out.mkdir(parents=True, exist_ok=True)
        for path in written.values():
            if path.exists():
                shutil.move(path, out / path.name)
    return json.loads((out / f"{name}.json").read_text())


def run(names: list[str], quick: bool, backends: list[str], out: Path) -> int:
    """Runs the benchmarks, prints the goals and the times, and returns the exit status."""
    if not importlib.util.find_spec("matplotlib"):
        print("matplotlib is not installed: no pictures.")
    goals, times, failed = {}, [], []
    for name in names:
        arguments = [argument for backend in backends for argument in ("--backend", backend)]
        arguments += ["--quick", *SCRIPTS[name]] if quick else []
        print(f"--- {name} {' '.join(arguments)}", flush=True)
        start = time.perf_counter()
        content = run_script(name, arguments, out)
        times.append({"benchmark": name, "seconds": f"{time.perf_counter() - start:.0f}"})
        times[-1]["status"] = "failed" if content is None else "done"
        if content is None:
            failed.append(name)
        else:
            goals[name] = [goal for result in content["results"] for goal in goals_of(result)]
    rows = goal_rows(goals)
    reached = sum(row["result"].startswith("reached") for row in rows)
    harness.print_table(rows, title=f"Goals: {reached} of {len(rows)} reached")
    print()
    harness.print_table(times, title=f"Times; the results are in {out}")
    return 1 if failed else 0


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and cases; less than ten minutes in all")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FOLDER",
        default=FOLDER / "results",
        help="where the results go (default: benchmarks/results)",
    )
    parser.add_argument("--only", nargs="+", choices=list(SCRIPTS), metavar="NAME", help=", ".join(SCRIPTS))
    parser.add_argument(
        "--backend",
        action="append",
        choices=harness.BACKENDS,
        help="may be given more than once (default: every installed one)",
    )
    options = parser.parse_args(arguments)
    options.only = options.only or list(SCRIPTS)
    return options


def main() -> int:
    options = parse_arguments()
    return run(options.only, options.quick, options.backend or [], options.out)


if __name__ == "__main__":
    sys.exit(main())
