"""How many milliseconds does `import mpkeras` add to `import keras`?

Every round is a fresh interpreter, which imports Keras, then mpkeras and, before or after it in turn, an empty module:
the least that an import costs here. What mpkeras imports is counted, and it must not be another backend.

    python benchmarks/import_time.py --backend jax --rounds 20
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import harness

# The most that `import mpkeras` may add.
GOAL_MS = 30.0
EMPTY = "empty_module_of_this_benchmark"
NAMES = {"keras": "import keras", EMPTY: "empty module after it", "mpkeras": "import mpkeras after it"}
# By the name of its backend, what an interpreter that uses it has imported.
PACKAGES = {"tensorflow": "tensorflow", "jax": "jax", "torch": "torch"}

# Runs in the fresh interpreter; prints one line, after whatever the imports print.
MEASURE = """
import importlib, json, sys, time
imports = []
for name in sys.argv[1:]:
    before = set(sys.modules)
    start = time.perf_counter()
    importlib.import_module(name)
    time_ms = (time.perf_counter() - start) * 1e3
    imports.append({"name": name, "time_ms": time_ms, "modules": sorted(set(sys.modules) - before)})
print(json.dumps(imports))
"""


def import_in_process(names: list[str], backend: str, folder: str) -> dict[str, dict]:
    """Returns `{name: {"time_ms", "modules"}}` of importing `names` in this order in a fresh interpreter.

    Args:
        names: Of modules.
        backend: Of Keras.
        folder: Where the empty module is.
    """
    done = harness.run_fresh(MEASURE, names, backend, folder)
    if done.returncode:
        raise RuntimeError(
            f"Expected `import {', '.join(names)}` to succeed with KERAS_BACKEND={backend}. Received:\n{done.stderr}\n"
            "Install what is missing, or choose other backends with `--backend`."
        )
    return {entry.pop("name"): entry for entry in json.loads(done.stdout.splitlines()[-1])}


def other_backends(modules: list[str], backend: str) -> list[str]:
    """Returns the backends besides `backend` that are among the imported `modules`."""
    return [name for name, package in PACKAGES.items() if name != backend and package in modules]


def measure(backend: str, rounds: int) -> dict:
    """Returns `{"environment", "results"}`: what is imported, how long it takes, and what comes with it."""
    seen = []
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / f"{EMPTY}.py").touch()
        orders = harness.round_orders([EMPTY, "mpkeras"], rounds)
        # The first, not counted, compiles mpkeras and the empty module to bytecode and fills the file cache.
        for order in [orders[0], *orders]:
            seen.append(import_in_process(["keras", *order], backend, folder))
    results = []
    for name, variant in NAMES.items():
        modules = seen[-1][name]["modules"]
        result = {"backend": backend, "variant": variant, "modules": len(modules)}
        result["time_ms"] = harness.summarize([entry[name]["time_ms"] for entry in seen[1:]])
        result["other_backends"] = other_backends(modules, backend)
        results.append({**result, "goal_time_ms": GOAL_MS} if name == "mpkeras" else result)
    return {"environment": harness.environment(), "results": results}


def table_rows(results: list[dict]) -> list[dict[str, str]]:
    """Returns the rows to print, all as text."""
    return [
        {
            "backend": result["backend"],
            "what": result["variant"],
            "median ms": f"{result['time_ms']['median']:.2f}",
            "quartiles": f"{result['time_ms']['q1']:.2f} - {result['time_ms']['q3']:.2f}",
            "goal ms": f"{result['goal_time_ms']:g}" if "goal_time_ms" in result else "",
            "modules": str(result["modules"]),
            "other backends": ", ".join(result["other_backends"]) or "none",
        }
        for result in results
    ]


def write_plot(path: str, results: list[dict]) -> None:
    """Writes the times of what comes after Keras as bars."""
    groups = {}
    for result in results:
        if result["variant"] != NAMES["keras"]:
            groups.setdefault(result["backend"], {})[result["variant"]] = result["time_ms"]
    harness.write_bar_plot(
        path,
        groups,
        title="What `import mpkeras` adds to `import keras`",
        ylabel="milliseconds",
        goals=dict.fromkeys(groups, GOAL_MS),
    )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="interpreters started (default: 10; with --quick: 3), and one before"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    harness.add_options(parser)
    options = parser.parse_args(arguments)
    options.rounds = (3 if options.quick else 10) if options.rounds is None else options.rounds
    if options.rounds < 1:
        parser.error("--rounds must be 1 or more")
    return options


def main() -> int:
    options = parse_arguments()
    return harness.run_benchmark(
        __file__,
        __doc__.splitlines()[0],
        options,
        measure=lambda backend: measure(backend, options.rounds),
        arguments=["--rounds", str(options.rounds)],
        settings={"goal": f"{GOAL_MS:g} ms", "rounds": options.rounds},
        table_rows=table_rows,
        write_plot=write_plot,
    )


if __name__ == "__main__":
    sys.exit(main())
