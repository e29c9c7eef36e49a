"""What every benchmark here shares: fair timing, medians with their spread, and the results on paper.

Variants are timed in interleaved rounds: each round runs every variant once, in an order of its own. A
machine that slows down for a second then slows all of them, and the ratio *within* a round stays what it was.
"""

import argparse
import importlib.util
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

BACKENDS = ("tensorflow", "jax", "torch")


def round_orders(names: Sequence[str], rounds: int, seed: int = 0) -> list[list[str]]:
    """Returns one order of `names` per round.

    Every block of `len(names)` rounds holds the rotations of one random order, so each name comes first,
    second, ... equally often. The first of a round can pay for what the last one left in the caches.
    """
    if not names:
        raise ValueError("Expected at least one step to time. Received: none. Name the steps.")
    generator = random.Random(seed)
    orders = []
    while len(orders) < rounds:
        order = list(names)
        generator.shuffle(order)
        orders += [order[start:] + order[:start] for start in range(len(order))]
    return orders[:rounds]


def time_interleaved(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    *,
    wait: Callable[[object], None] = lambda result: None,
    before: Callable[[], None] = lambda: None,
    warm_up: int = 3,
    seed: int = 0,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Returns the times of every step in milliseconds, by name, one a round.

    Args:
        steps: One call each is what gets timed; the first call compiles.
        rounds: How often each step is timed.
        wait: Gets what a step returned and comes back when the device has finished. Timed.
        before: Runs before each step and is not timed, such as putting gradients back.
        warm_up: Untimed calls of each step at the start, at least 1.
        seed: Of the orders of the rounds.
        clock: Seconds.
    """
    if rounds < 1 or warm_up < 1:
        raise ValueError(
            "Expected at least one round and one warm-up call. Received: "
            f"rounds={rounds}, warm_up={warm_up}. Pass 1 or more for both."
        )
    for step in steps.values():
        for _ in range(warm_up):
            before()
            wait(step())
    times = {name: [] for name in steps}
    for order in round_orders(list(steps), rounds, seed):
        for name in order:
            before()
            start = clock()
            wait(steps[name]())
            times[name].append((clock() - start) * 1e3)
    return times


def summarize(values: Sequence[float]) -> dict[str, float]:
    """Returns the median and the quartiles of `values` as `{"median", "q1", "q3"}`.

    Quartiles, not a standard deviation: one interrupted round moves a mean, and no median.
    """
    if len(values) == 1:
        return {"median": values[0], "q1": values[0], "q3": values[0]}
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def paired_ratios(values: Sequence[float], baseline: Sequence[float]) -> list[float]:
    """Returns `value / baseline` round by round."""
    if len(values) != len(baseline):
        raise ValueError(
            "Expected as many values as baseline values. Received: "
            f"{len(values)} and {len(baseline)}. Time both in the same rounds."
        )
    return [value / base for value, base in zip(values, baseline, strict=True)]


def compare(times_ms: Mapping[str, Sequence[float]], baseline: str) -> dict[str, dict[str, dict[str, float]]]:
    """Returns `{name: {"time_ms": summary, "ratio": summary}}`, the ratio to `baseline` within each round."""
    return {
        name: {"time_ms": summarize(values), "ratio": summarize(paired_ratios(values, times_ms[baseline]))}
        for name, values in times_ms.items()
    }


def environment() -> dict[str, object]:
    """Returns versions, device, processor and thread counts of this process, for the head of a result."""
    import keras
    import numpy

    from mpkeras._version import __version__

    backend = keras.backend.backend()
    found = {
        "backend": backend,
        "versions": {
            "python": platform.python_version(),
            "mpkeras": __version__,
            "keras": keras.__version__,
            "numpy": numpy.__version__,
        },
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "platform": platform.platform(),
    }
    if backend == "tensorflow":
        import tensorflow as tf

        found["versions"]["tensorflow"] = tf.__version__
        found["devices"] = [device.name for device in tf.config.list_logical_devices()]
        # 0 is TensorFlow's word for "one a core".
        found["threads"] = tf.config.threading.get_intra_op_parallelism_threads() or found["cores"]
    elif backend == "jax":
        import jax

        found["versions"]["jax"] = jax.__version__
        found["devices"] = [f"{device.platform}:{device.id} {device.device_kind}" for device in jax.devices()]
        found["threads"] = found["cores"]
    elif backend == "torch":
        import torch

        found["versions"]["torch"] = torch.__version__
        found["devices"] = [torch.cuda.get_device_name()] if torch.cuda.is_available() else ["cpu"]
        found["threads"] = torch.get_num_threads()
    return found


def cpu_name() -> str:
    """Returns the processor's name with those of its instruction sets that matter to 16-bit arithmetic."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    entries = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    entries = {key.strip(): value.strip() for key, value in entries.items()}
    flags = entries.get("flags", "").split()
    notable = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16") if flag in flags]
    name = entries.get("model name", platform.machine())
    return f"{name} ({' '.join(notable)})" if notable else name


def wait_for_device(result=None) -> None:
    """Comes back when the active backend has computed `result` and everything queued before it."""
    import keras

    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        tf.test.experimental.sync_devices()
    elif backend == "jax":
        import jax

        jax.block_until_ready(result)
    elif backend == "torch":
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()


def installed_backends() -> list[str]:
    """Returns the backends that can be imported here."""
    return [name for name in BACKENDS if importlib.util.find_spec(name)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that every benchmark has."""
    parser.add_argument(
        "--backend",
        action="append",
        choices=BACKENDS,
        help="run this backend; may be given more than once (default: every installed one)",
    )
    parser.add_argument("--json", metavar="OUT", help="write the results here")
    parser.add_argument("--plot", metavar="OUT", help="write a picture here; needs matplotlib")
    parser.add_argument("--worker", choices=BACKENDS, help=argparse.SUPPRESS)


def run_fresh(code: str, arguments: Sequence[str], backend: str, *paths: str) -> subprocess.CompletedProcess:
    """Runs `code` in a fresh interpreter with a backend of Keras and the mpkeras of this repository.

    Args:
        code: Of Python.
        arguments: Its `sys.argv[1:]`.
        backend: Of Keras.
        *paths: Folders with more modules.
    """
    # What this script runs with, and this repository: mpkeras may not be installed.
    found = [*paths, str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    settings = {"TF_CPP_MIN_LOG_LEVEL": "3", **os.environ, "KERAS_BACKEND": backend}
    settings["PYTHONPATH"] = os.pathsep.join(path for path in found if path)
    # An installed package has its bytecode; without it every module would be compiled in every round.
    settings.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.run([sys.executable, "-c", code, *arguments], env=settings, capture_output=True, text=True)


def measure_in_process(script: str, backend: str, arguments: Sequence[str]) -> dict:
    """Returns what `script --worker BACKEND --json OUT` writes, run in a fresh process with `backend` active.

    Raises:
        RuntimeError: If that process fails; its messages have been printed by then.
    """
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "results.json"
        command = [sys.executable, str(Path(script).resolve()), "--worker", backend, "--json", str(output)]
        # 2: TensorFlow's start-up messages are no part of the result; errors still show.
        settings = {"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, "KERAS_BACKEND": backend}
        status = subprocess.run([*command, *arguments], env=settings).returncode
        if status:
            raise RuntimeError(
                f"Expected the {backend} process to succeed. Received: exit status {status}. "
                "Read its messages above, or choose other backends with `--backend`."
            )
        return json.loads(output.read_text())


def run_benchmark(
    script: str,
    question: str,
    options: argparse.Namespace,
    measure: Callable[[str], dict],
    arguments: Sequence[str],
    settings: Mapping[str, object],
    table_rows: Callable[[list[dict]], list[dict[str, str]]],
    write_plot: Callable[[str, list[dict]], None],
) -> int:
    """Measures on every backend, prints and writes the results, and returns the exit status.

    Args:
        script: The benchmark's file, run once a backend as a worker.
        question: Heads the table and the JSON.
        options: Parsed, with those of `add_options`.
        measure: Called with the backend in a worker; returns `{"environment", "results"}`.
        arguments: The command line options a worker gets.
        settings: What was chosen, printed and kept with the results.
        table_rows: Makes the rows of the table from all results.
        write_plot: Writes the picture of all results to a path.
    """
    if options.worker:
        write_json(options.json, measure(options.worker))
        return 0
    results, environments = [], []
    for backend in options.backend or installed_backends():
        try:
            measured = measure_in_process(script, backend, arguments)
        except RuntimeError as error:
            print(error, file=sys.stderr)
            return 1
        environments.append(measured["environment"])
        results += measured["results"]
    for line in environment_lines(environments):
        print(line)
    print("; ".join(f"{name}: {value}" for name, value in settings.items()), end="\n\n")
    print_table(table_rows(results), title=question)
    if options.json:
        content = {"question": question, "settings": settings, "environments": environments}
        write_json(options.json, {**content, "results": results})
    if options.plot:
        write_plot(options.plot, results)
    return 0


def environment_lines(environments: Sequence[Mapping[str, object]]) -> list[str]:
    """Returns one line per environment, to print above a table."""
    return [
        "{backend}: {versions}; {devices}; {threads} threads; {cpu}, {cores} cores".format(
            backend=found["backend"],
            versions=", ".join(f"{name} {version}" for name, version in found["versions"].items()),
            devices=", ".join(found["devices"]),
            threads=found["threads"],
            cpu=found["cpu"],
            cores=found["cores"],
        )
        for found in environments
    ]


def summary_cells(result: Mapping[str, Mapping[str, float]]) -> dict[str, str]:
    """Returns the cells of one entry of `compare`: the time, its ratio to the baseline, and both spreads."""
    time_ms, ratio = result["time_ms"], result["ratio"]
    return {
        "median ms": f"{time_ms['median']:.3f}",
        "quartiles": f"{time_ms['q1']:.3f} - {time_ms['q3']:.3f}",
        "ratio": f"{ratio['median']:.2f}",
        "ratio quartiles": f"{ratio['q1']:.2f} - {ratio['q3']:.2f}",
    }


def format_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Returns `rows` as aligned text; the keys of the first row are the headings."""
    if not rows:
        return ""
    headings = list(rows[0])
    cells = [headings] + [[row[heading] for heading in headings] for row in rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(headings))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def print_table(rows: Sequence[Mapping[str, str]], title: str) -> None:
    """Prints `rows` with rich on a terminal, and as plain text in a file, a pipe or without rich."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        console = None
    else:
        console = Console()
    if console is None or not console.is_terminal:
        print(f"{title}\n\n{format_table(rows)}")
        return
    table = Table(title=title)
    for heading in rows[0] if rows else ():
        table.add_column(heading)
    for row in rows:
        table.add_row(*row.values())
    console.print(table)


def write_json(path: str | os.PathLike, content: object) -> None:
    """Writes `content` to `path`, making its folder; a number that is not finite, which JSON lacks, as `null`."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Read again, as JSON names every such number.
    content = json.loads(json.dumps(content), parse_constant=lambda name: None)
    path.write_text(json.dumps(content, indent=1) + "\n")


def write_bar_plot(
    path: str | os.PathLike,
    groups: Mapping[str, Mapping[str, Mapping[str, float]]],
    *,
    title: str,
    ylabel: str,
    goals: Mapping[str, float] | None = None,
) -> None:
    """Writes a plot with one group of bars per key of `groups`, the quartiles as error bars.

    Args:
        path: Where the picture goes; its ending names the format.
        groups: `{group: {variant: {"median", "q1", "q3"}}}`.
        title: Above the plot.
        ylabel: What the bars measure, with its unit.
        goals: A height per group, drawn as a line over that group.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    variants = list(dict.fromkeys(name for group in groups.values() for name in group))
    figure, axes = plt.subplots(figsize=(min(max(6.0, 1.6 * len(groups) + 2.0), 18.0), 4.5), layout="constrained")
    width = 0.8 / max(len(variants), 1)
    for index, variant in enumerate(variants):
        shown = [(place, group[variant]) for place, group in enumerate(groups.values()) if variant in group]
        places = [place + (index - (len(variants) - 1) / 2) * width for place, _ in shown]
        medians = [summary["median"] for _, summary in shown]
        spread = [
            [summary["median"] - summary["q1"] for _, summary in shown],
            [summary["q3"] - summary["median"] for _, summary in shown],
        ]
        bars = axes.bar(places, medians, width, yerr=spread, capsize=2, label=variant)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
    for place, name in enumerate(groups):
        if goals and name in goals:
            axes.hlines(
                goals[name],
                place - 0.45,
                place + 0.45,
                colors="black",
                linestyles="dashed",
                linewidth=1,
                label="goal" if name == next(iter(goals)) else None,
            )
    axes.set_xticks(range(len(groups)), list(groups), fontsize=8)
    axes.margins(x=0.01)
    axes.set_ylabel(ylabel)
    axes.set_title(title)
    # Over the bars it would hide some.
    if len(variants) > 6:
        figure.legend(loc="outside right upper", fontsize=8)
    else:
        figure.legend(loc="outside lower center", ncols=len(variants) + 1)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
