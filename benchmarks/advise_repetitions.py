"""How often is what `mpkeras.advise` chooses within 5 % of the best setting?

On each model of the demo `advise` runs many times, each time anew. Then the whole grid of policies and jit settings is
measured once, for longer and in interleaved rounds, and every choice is compared with the best cell of that grid.

    python benchmarks/advise_repetitions.py --backend tensorflow --task digits
"""

import argparse
import logging
import os
import statistics
import sys
import time

import harness

TASKS = ("digits", "text")
# The choice may be so many times slower than the best cell, in at least this share of the repetitions.
WITHIN = 1.05
GOAL = 0.9


def measure(backend: str, tasks: list[str], repetitions: int, budget_s: float, grid_budget_s: float) -> dict:
    """Returns `{"environment", "results"}` of this process, whose Keras backend must be `backend`."""
    import keras

    import mpkeras
    from mpkeras.demo.tasks import TASKS as DEMO
    from mpkeras.tools.advise.advice import measured_advice

    # Each step is a function of its own, which TensorFlow takes for a function traced too often.
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    results = []
    for name in tasks:
        task = DEMO[name]()
        data = task.load()
        x, y = data.x_train[: task.batch_size], data.y_train[: task.batch_size]
        keras.utils.set_random_seed(0)
        model = task.build()
        model.compile("adam", task.loss())
        choices = []
        for _ in range(repetitions):
            started = time.perf_counter()
            report = mpkeras.advise(model, x, y, budget_s=budget_s, verbose=0)
            choice = {"policy": report.policy, "jit_compile": report.jit_compile, "sureness": report.sureness}
            choice |= {"seconds": time.perf_counter() - started, "load": os.getloadavg()[0]}
            choices.append(choice | {"measured": [cell.name for cell in report.cells if cell.is_measured]})
            print(f"{backend} {name}: {choice}", file=sys.stderr, flush=True)
        grid = measured_advice(model, x, y, model.loss, budget_s=grid_budget_s, rounds=200)
        results.append(
            {
                "task": name,
                "backend": backend,
                "batch_size": task.batch_size,
                "choices": choices,
                "grid": grid.to_dict()["cells"],
                "times_ms": {cell.name: cell.times_ms for cell in grid.cells if cell.is_measured},
                "load_at_end": os.getloadavg()[0],
            }
        )
    return {"environment": harness.environment(), "results": [judged(result) for result in results]}


def judged(result: dict) -> dict:
    """Returns `result` with each choice's time as a ratio to the best cell of the grid, and their share within 5 %."""
    times_ms = result["times_ms"]
    best = min(times_ms, key=lambda name: statistics.median(times_ms[name]))
    for choice in result["choices"]:
        name = f"{choice['policy']}, jit_compile={choice['jit_compile']}"
        pairs = zip(times_ms.get(name, ()), times_ms[best], strict=False)
        # A choice that the long run could not measure is no success.
        choice["ratio"] = statistics.median([ms / best_ms for ms, best_ms in pairs] or [float("inf")])
    ratios = [choice["ratio"] for choice in result["choices"]]
    within = sum(ratio <= WITHIN for ratio in ratios) / len(ratios)
    return {**result, "best": best, "share_within": within, "worst_ratio": max(ratios), "goal": GOAL}


def table_rows(results: list[dict]) -> list[dict[str, str]]:
    """Returns the rows to print, all as text."""
    rows = []
    for result in results:
        chosen = [f"{choice['policy']}, jit_compile={choice['jit_compile']}" for choice in result["choices"]]
        counts = {name: chosen.count(name) for name in sorted(set(chosen), key=lambda name: -chosen.count(name))}
        best_ms = statistics.median(result["times_ms"][result["best"]])
        rows.append(
            {
                "backend": result["backend"],
                "task": result["task"],
                "best of the grid": f"{result['best']} ({best_ms:.2f} ms)",
                "chosen": "; ".join(f"{count} x {name}" for name, count in counts.items()),
                "within 5 %": f"{result['share_within']:.0%} of {len(chosen)}",
                "worst": f"{result['worst_ratio']:.2f}",
                "s a call": f"{statistics.median(choice['seconds'] for choice in result['choices']):.0f}",
                "load": f"{statistics.median(choice['load'] for choice in result['choices']):.1f}",
                "goal": f"{result['goal']:.0%}",
            }
        )
    return rows


def write_plot(path: str, results: list[dict]) -> None:
    """Writes the times of the grid as bars."""
    groups = {
        f"{result['task']}\n{result['backend']}": {
            name: harness.summarize(times_ms) for name, times_ms in result["times_ms"].items()
        }
        for result in results
    }
    harness.write_bar_plot(path, groups, title="The grid that the advice is compared with", ylabel="ms a step")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", action="append", choices=TASKS, help="may be given more than once (default: both)")
    parser.add_argument("--repetitions", type=int, default=10, metavar="N", help="calls of `advise` (default: 10)")
    parser.add_argument("--budget", type=float, default=15.0, metavar="S", help="of each call (default: 15 seconds)")
    parser.add_argument(
        "--grid-budget", type=float, default=60.0, metavar="S", help="of the grid (default: 60 seconds)"
    )
    harness.add_options(parser)
    options = parser.parse_args(arguments)
    options.task = options.task or list(TASKS)
    if options.repetitions < 1 or options.budget <= 0 or options.grid_budget <= 0:
        parser.error("--repetitions, --budget and --grid-budget must be positive")
    return options


def main() -> int:
    options = parse_arguments()
    numbers = ["--repetitions", str(options.repetitions), "--budget", str(options.budget)]
    numbers += ["--grid-budget", str(options.grid_budget)]
    return harness.run_benchmark(
        __file__,
        __doc__.splitlines()[0],
        options,
        measure=lambda backend: measure(
            backend, options.task, options.repetitions, options.budget, options.grid_budget
        ),
        arguments=[*numbers, *(argument for name in options.task for argument in ("--task", name))],
        settings={"repetitions": options.repetitions, "budget_s": options.budget, "grid_budget_s": options.grid_budget},
        table_rows=table_rows,
        write_plot=write_plot,
    )


if __name__ == "__main__":
    sys.exit(main())
