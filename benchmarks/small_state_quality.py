"""Do 16-bit weights and optimizer states reach the quality of float32, with every optimizer?

Three small tasks on real data (handwritten digits, the bytes of Python's standard library, patches of two photographs
for a model of `keras.applications`) are trained with ten optimizers and five seeds, stored in five ways:

    float32         everything in float32
    mixed           `mixed_bfloat16`: computes in bfloat16; weights and slots in float32
    mixed, slots    the same with `slot_dtype="bfloat16"`: float32 weights, bfloat16 slots
    bfloat16        weights and slots in bfloat16, under `mpkeras.LossScaleOptimizer`
    stock bfloat16  plain Keras under the policy "bfloat16"

A seed gives the same first weights (rounded to bfloat16 where they are stored so) and the same order of the data to all
of them. Learning rates were chosen once, in float32, from three a task and optimizer with seed 100, which is none of
the five (`--sweep`).

The rule, written before any result: a cell is *inside* float32's spread if its mean is no worse than float32's mean by
more than the larger of two standard errors of the difference of both means and the tolerance of the task. A run that
ends in NaN counts as the worst there is: accuracy 0, or 8 bits a byte.

    python benchmarks/small_state_quality.py --json quality.json --plot quality.png --resume
"""

import argparse
import dataclasses
import json
import math
import os
import statistics
import sys
import time
from pathlib import Path

import harness

BACKEND = "jax"
KINDS = ("float32", "mixed", "mixed, slots", "bfloat16", "stock bfloat16")
BASELINE = KINDS[0]
TASKS = ("digits", "text", "patches")
OPTIMIZERS = ("adam", "sgd", "adafactor", "lion", "rmsprop", "adagrad", "lamb", "adamw", "nadam", "muon")
SWEEP_SEED = 100
SETTINGS = ("task", "optimizer", "kind")


def build_compiled(task, optimizer, kind: str):
    """Returns a compiled model of `task` that is stored and computes as `kind` says.

    Args:
        task: A `small_state_tasks.Task`.
        optimizer: A Keras optimizer, not built.
        kind: One of `KINDS`.
    """
    import keras

    import mpkeras

    policies = {
        "mixed": "mixed_bfloat16",
        "mixed, slots": mpkeras.Policy("mixed_bfloat16", slot_dtype="bfloat16"),
        "bfloat16": "bfloat16",
    }
    with mpkeras.policy_scope("float32"):
        if kind == "stock bfloat16":
            keras.config.set_dtype_policy("bfloat16")
        model = task.build()
    metrics = ["accuracy"] if task.quality_name == "held-out accuracy" else []
    model.compile(optimizer, task.loss(), metrics=metrics, jit_compile=True)
    return mpkeras.prepare(model, policies[kind]) if kind in policies else model


class Cell:
    """One model and its optimizer, compiled once and trained again from each seed."""

    def __init__(self, name: str, optimizer: str, kind: str, quick: bool = False):
        import small_state_tasks as tasks

        self.task = tasks.TASKS[name]
        if quick:
            self.task = dataclasses.replace(self.task, epochs=2, steps_per_epoch=2)
        self.data = self.task.load()
        self.steps = self.task.steps(len(self.data[0]))
        self.peak = tasks.LEARNING_RATES.get(optimizer, {}).get(name)
        self.model = build_compiled(self.task, tasks.OPTIMIZERS[optimizer](), kind)
        self.model.optimizer.build(self.model.trainable_variables)
        self.first_state = [variable.numpy() for variable in self.model.optimizer.variables]

    def run(self, seed: int, peak: float | None = None) -> dict:
        """Trains from the first weights of `seed` and returns the quality, and what the run took.

        Args:
            seed: Of the first weights and of the order of the data.
            peak: The largest learning rate; by default the one that was chosen.
        """
        import keras

        import mpkeras
        import small_state_tasks as tasks

        started = time.perf_counter()
        keras.utils.set_random_seed(seed)
        with mpkeras.policy_scope("float32"):
            self.model.set_weights(self.task.build().get_weights())
        for variable, value in zip(self.model.optimizer.variables, self.first_state, strict=True):
            variable.assign(value)
        keras.utils.set_random_seed(seed)
        x, y, x_held_out, y_held_out = self.data
        peak = self.peak if peak is None else peak
        rates = [tasks.learning_rate(peak, epoch, self.task.epochs) for epoch in range(self.task.epochs)]
        losses = self.model.fit(
            x,
            y,
            batch_size=self.task.batch_size,
            epochs=self.task.epochs,
            steps_per_epoch=self.task.steps_per_epoch,
            callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch, rate: rates[epoch])],
            verbose=0,
        ).history["loss"]
        logs = self.model.evaluate(x_held_out, y_held_out, batch_size=128, verbose=0, return_dict=True)
        quality = self.task.quality(logs)
        is_finite = math.isfinite(logs["loss"]) and math.isfinite(quality)
        worst = 0.0 if self.task.higher_is_better else 8.0
        return {
            "seed": seed,
            "quality": quality if is_finite else worst,
            "is_finite": is_finite,
            "train_loss": losses[-1] if math.isfinite(losses[-1]) else None,
            "wall_time_s": round(time.perf_counter() - started, 2),
        }

    def bytes_a_parameter(self) -> float:
        """Returns the bytes of the trainable variables and of what the optimizer keeps for them, a parameter."""
        variables = self.model.trainable_variables
        inner = getattr(self.model.optimizer, "inner_optimizer", self.model.optimizer)
        held = [*variables, *inner.variables]
        total = sum(math.prod(v.shape) * (2 if v.dtype == "bfloat16" else 4) for v in held)
        return total / sum(math.prod(v.shape) for v in variables)


def measure(options: argparse.Namespace, runs: list[dict], write) -> None:
    """Runs what is missing in `runs`, appends to it, and calls `write()` after each run."""
    import keras

    done = {(*(run[key] for key in SETTINGS), run["seed"]) for run in runs}
    for optimizer in options.optimizer:
        for name in options.task:
            for kind in options.kind:
                seeds = [seed for seed in range(options.seeds) if (name, optimizer, kind, seed) not in done]
                if not seeds:
                    continue
                keras.backend.clear_session()
                cell = Cell(name, optimizer, kind, options.quick)
                for seed in seeds:
                    run = {"task": name, "optimizer": optimizer, "kind": kind, **cell.run(seed)}
                    run |= {"steps": cell.steps, "state_bytes_a_parameter": round(cell.bytes_a_parameter(), 3)}
                    runs.append(run)
                    write()
                    print(
                        f"{name}, {optimizer}, {kind}, seed {seed}: {run['quality']:.4f}, {run['wall_time_s']} s",
                        flush=True,
                    )


def sweep(options: argparse.Namespace) -> dict:
    """Returns `{optimizer: {task: best learning rate}}`, from one float32 run each, and prints all."""
    import small_state_tasks as tasks

    best: dict = {}
    for optimizer in options.optimizer:
        for name in options.task:
            cell = Cell(name, optimizer, BASELINE, options.quick)
            rates = [rate * tasks.SWEEP_FACTOR[name] for rate in tasks.SWEEP[optimizer]]
            found = {rate: cell.run(SWEEP_SEED, rate)["quality"] for rate in rates}
            sign = 1 if tasks.TASKS[name].higher_is_better else -1
            best.setdefault(optimizer, {})[name] = max(
                found, key=lambda rate, sign=sign, found=found: sign * found[rate]
            )
            print(f"{optimizer}, {name}: " + ", ".join(f"{rate:g} {q:.4f}" for rate, q in found.items()), flush=True)
    return best


def cells(runs: list[dict], facts: dict[str, dict]) -> list[dict]:
    """Returns one entry a task, optimizer and kind: mean, spread, and whether it is inside float32's spread.

    Args:
        runs: As they are in the file.
        facts: By task, `"higher_is_better"` and `"tolerance"`.
    """
    grouped: dict[tuple, list[float]] = {}
    for run in runs:
        grouped.setdefault(tuple(run[key] for key in SETTINGS), []).append(run["quality"])
    found = []
    for (task, optimizer, kind), values in grouped.items():
        base = grouped.get((task, optimizer, BASELINE), [])
        entry = {"task": task, "optimizer": optimizer, "kind": kind, "runs": len(values)}
        entry |= {"mean": statistics.fmean(values), "sd": _deviation(values)}
        if base and kind != BASELINE:
            sign = 1 if facts[task]["higher_is_better"] else -1
            error = math.sqrt(_deviation(values) ** 2 / len(values) + _deviation(base) ** 2 / len(base))
            entry["worse_by"] = sign * (statistics.fmean(base) - entry["mean"])
            entry["allowed"] = max(2 * error, facts[task]["tolerance"])
            entry["inside"] = entry["worse_by"] <= entry["allowed"]
        found.append(entry)
    return found


def _deviation(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def table_rows(found: list[dict]) -> list[dict[str, str]]:
    """Returns the rows to print: one a task and optimizer, one column a kind; `*` marks what is not inside."""
    rows: dict[tuple, dict[str, str]] = {}
    for entry in sorted(found, key=lambda entry: (TASKS.index(entry["task"]), OPTIMIZERS.index(entry["optimizer"]))):
        key = entry["task"], entry["optimizer"]
        row = rows.setdefault(key, {"task": key[0], "optimizer": key[1], **dict.fromkeys(KINDS, "")})
        mark = "" if entry.get("inside", True) else " *"
        row[entry["kind"]] = f"{entry['mean']:.4f} ± {entry['sd']:.4f}{mark}"
    return list(rows.values())


def counts(found: list[dict]) -> list[str]:
    """Returns one line a kind: how many of its cells are inside."""
    lines = []
    for kind in KINDS[1:]:
        judged = [entry for entry in found if entry["kind"] == kind and "inside" in entry]
        lines.append(f"{kind}: {sum(entry['inside'] for entry in judged)} of {len(judged)} inside")
    return lines


def write_plot(path: str, found: list[dict], facts: dict[str, dict]) -> None:
    """Draws the mean of each cell with its standard deviation; hollow where it is not inside."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in TASKS if any(entry["task"] == name for entry in found)]
    figure, all_axes = plt.subplots(len(names), 1, figsize=(10, 3.4 * len(names)), layout="constrained", squeeze=False)
    for name, axes in zip(names, all_axes[:, 0], strict=True):
        shown = [o for o in OPTIMIZERS if any((e["task"], e["optimizer"]) == (name, o) for e in found)]
        for i, kind in enumerate(KINDS):
            entries = [e for e in found if e["task"] == name and e["kind"] == kind]
            for j, entry in enumerate(entries):
                axes.errorbar(
                    shown.index(entry["optimizer"]) + 0.15 * (i - 2),
                    entry["mean"],
                    yerr=entry["sd"],
                    fmt="o",
                    markersize=5,
                    capsize=2,
                    color=f"C{i}",
                    markerfacecolor=f"C{i}" if entry.get("inside", True) else "white",
                    label=kind if j == 0 else None,
                )
        axes.set_xticks(range(len(shown)), shown)
        axes.set(title=facts[name]["title"], ylabel=facts[name]["quality_name"])
    all_axes[0, 0].legend(fontsize=8, ncols=len(KINDS), loc="lower center", bbox_to_anchor=(0.5, 1.12))
    figure.suptitle("Hollow: worse than float32 by more than its spread", fontsize=9, y=-0.01)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


def parse_arguments(arguments=None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="OUT", help="append each run to this file")
    parser.add_argument("--plot", metavar="OUT", help="write a picture here; needs matplotlib")
    parser.add_argument("--resume", action="store_true", help="keep the runs that are in the file, and make the others")
    parser.add_argument("--task", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--optimizer", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seeds", type=int, metavar="N", help="runs of each cell (default: 5; with --quick: 2)")
    parser.add_argument("--sweep", action="store_true", help="look for learning rates in float32 instead")
    parser.add_argument("--quick", action="store_true", help="four steps a run: shows that it runs")
    options = parser.parse_args(arguments)
    options.seeds = (2 if options.quick else 5) if options.seeds is None else options.seeds
    if options.seeds < 1:
        parser.error(f"argument --seeds: expected at least 1, received {options.seeds}")
    return options


def main(arguments=None) -> int:
    options = parse_arguments(arguments)
    os.environ["KERAS_BACKEND"] = BACKEND
    import small_state_tasks as tasks

    if options.sweep:
        print(json.dumps(sweep(options)))
        return 0
    facts = {
        name: {key: getattr(task, key) for key in ("title", "quality_name", "higher_is_better", "tolerance")}
        for name, task in tasks.TASKS.items()
    }
    content = {
        "question": __doc__.splitlines()[0],
        "tasks": facts,
        "learning_rates": tasks.LEARNING_RATES,
        "environment": harness.environment(),
        "runs": [],
    }
    path = Path(options.json) if options.json else None
    if options.resume and path and path.exists():
        content["runs"] = json.loads(path.read_text())["runs"]

    def write():
        if path:
            # First beside it: a run that is stopped leaves a whole file.
            harness.write_json(path.with_suffix(".part"), content)
            path.with_suffix(".part").replace(path)

    measure(options, content["runs"], write)
    content["cells"] = cells(content["runs"], facts)
    write()
    for line in harness.environment_lines([content["environment"]]):
        print(line)
    print(f"{len(content['runs'])} runs; mean ± standard deviation; * is not inside\n")
    harness.print_table(table_rows(content["cells"]), title=content["question"])
    print("", *counts(content["cells"]), sep="\n")
    if options.plot:
        write_plot(options.plot, content["cells"], facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
