"""What do loss scaling and a mixed-precision step cost in mpkeras, and what in the libraries next to it?

jmp and flax on JAX, torch.amp on torch, tf_keras on TensorFlow, and stock Keras on all, in the same process and in the
same rounds. Two questions. `optimizer`: Adam's update alone, as in loss_scale_overhead.py; each library is a ratio to
its own Adam without loss scaling. `training`: a whole step of one network in mixed_bfloat16 with dynamic loss scaling,
the same weights and batch for all; each is a ratio to mpkeras, like to like: `train_on_batch` to `train_on_batch`, and
a loop of one's own (what the other libraries are used in) to `mpkeras.make_train_step`. Above 1 is slower than mpkeras.
A library that is not installed is named as such.

    python benchmarks/peers.py --backend jax --peer flax --part training
"""

import argparse
import importlib.metadata
import importlib.util
import logging
import sys
import warnings

import harness
import loss_scale_overhead
import peers_keras
from models import MODES

PARTS = ("optimizer", "training")
# By backend; what each needs is in `REQUIRES` of the module `peers_BACKEND`.
PEERS = {"tensorflow": ("keras", "tf_keras"), "jax": ("keras", "jmp", "flax"), "torch": ("keras", "torch")}
NAMES = sorted({name for names in PEERS.values() for name in names})
SIZES = peers_keras.Sizes()
KERAS_VARIANTS = {
    "bare": "keras Adam",
    "keras": "keras LossScaleOptimizer",
    "mpkeras": "mpkeras LossScaleOptimizer",
}
# Loss scaling, and the same optimizer without it.
BARE = {
    "keras LossScaleOptimizer": "keras Adam",
    "mpkeras LossScaleOptimizer": "keras Adam",
    "jmp + optax.adam": "optax.adam",
    "flax + optax.adam": "optax.adam",
    "GradScaler + torch Adam": "torch Adam",
    "GradScaler + torch Adam, fused": "torch Adam, fused",
    "tf_keras LossScaleOptimizer": "tf_keras Adam",
}


def baseline_of(part: str, name: str) -> str:
    """Returns the name of what `name` is a ratio to."""
    if part == "optimizer":
        return BARE.get(name, name)
    return "mpkeras train_on_batch" if name.endswith("train_on_batch") else "mpkeras loop"


def peer_module(backend: str):
    """Returns the module with the peers of `backend`."""
    return importlib.import_module(f"peers_{backend}")


def find_peers(backend: str, wanted: list[str]) -> tuple[list[str], dict[str, str]]:
    """Returns the wanted peers of `backend` that can be imported, and the version of everything they need."""
    usable, versions = [], {}
    for peer in (peer for peer in PEERS[backend] if peer in wanted):
        versions |= {name: version_of(name) for name in requirements(backend, peer)}
        if why_absent(backend, peer, versions) is None:
            usable.append(peer)
    return usable, versions


def requirements(backend: str, peer: str) -> tuple[str, ...]:
    """Returns the packages that `peer` needs."""
    return (peer,) if peer == "keras" else peer_module(backend).REQUIRES[peer]


def why_absent(backend: str, peer: str, versions: dict[str, str]) -> str | None:
    """Returns what stands in place of the version of a package that `peer` cannot have; `None` if it has all."""
    found = (versions[name] for name in requirements(backend, peer))
    return next((version for version in found if version.startswith("not ")), None)


def version_of(name: str) -> str:
    """Returns the version of a library, "not installed", or "not usable" and why: it must not stop the others."""
    if importlib.util.find_spec(name) is None:
        return "not installed"
    try:
        importlib.import_module(name)
    except Exception as error:
        return f"not usable ({type(error).__name__}: {error})"
    return importlib.metadata.version(name)


def optimizer_cases(backend: str, peers: list[str], params: int):
    """Yields `(mode, steps, before)` for each way `backend` runs an optimizer's update."""

    def named(steps):
        kept = [variant for variant in steps if variant != "keras" or "keras" in peers]
        return {KERAS_VARIANTS[variant]: steps[variant] for variant in kept}

    module = peer_module(backend)
    if backend == "torch":
        weights, grads, restore = loss_scale_overhead.torch_gradients(params)
        steps, _ = loss_scale_overhead.torch_steps(weights, grads)
        yield "torch eager", named(steps) | module.optimizer_steps(weights, grads, peers), restore
        return
    for mode, steps, _, before in loss_scale_overhead.make_steps(backend, params):
        yield mode, named(steps) | module.optimizer_steps(mode, params, peers), before


def training_cases(backend: str, peers: list[str], sizes: peers_keras.Sizes):
    """Yields `(mode, steps, before)` for each way `backend` runs a training step."""
    for mode, jit_compile in MODES[backend]:
        steps = peers_keras.training_steps(jit_compile, sizes, peers)
        yield mode, steps | peer_module(backend).training_steps(mode, sizes, peers), lambda: None


def measure(
    backend: str,
    parts: list[str],
    wanted: list[str],
    params: int,
    rounds: int,
    sizes: peers_keras.Sizes = SIZES,
) -> dict:
    """Returns `{"environment", "results"}` of this process, whose Keras backend must be `backend`."""
    # The step alone is timed: nothing there calls `scale_loss`, and mpkeras, Keras and tf_keras say so.
    warnings.filterwarnings("ignore", message=".*scale_loss.*")
    # Each variant is a function of its own, which TensorFlow takes for a function traced too often.
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    peers, versions = find_peers(backend, wanted)
    results = []
    for part in parts:
        if part == "optimizer":
            cases = optimizer_cases(backend, peers, params)
        else:
            cases = training_cases(backend, peers, sizes)
        for mode, steps, before in cases:
            times_ms = harness.time_interleaved(steps, rounds, wait=harness.wait_for_device, before=before)
            for name, own in times_ms.items():
                baseline = baseline_of(part, name)
                summary = harness.compare({baseline: times_ms[baseline], name: own}, baseline)[name]
                results.append({"part": part, "mode": mode, "variant": name, "baseline": baseline, **summary})
    absent = [name for name in PEERS[backend] if name in wanted and name not in peers]
    results += [{"mode": backend, "variant": name, "absent": why_absent(backend, name, versions)} for name in absent]
    environment = harness.environment()
    environment["versions"] |= versions
    return {"environment": environment, "results": results}


def table_rows(results: list[dict]) -> list[dict[str, str]]:
    """Returns the rows to print, all as text."""
    rows = []
    for result in results:
        row = {"step": result["mode"], "of": result.get("part", ""), "library": result["variant"]}
        if "absent" in result:
            headings = ("median ms", "quartiles", "ratio", "ratio quartiles")
            row |= dict.fromkeys(headings, "") | {"median ms": result["absent"]}
        else:
            row |= harness.summary_cells(result)
        rows.append({**row, "ratio to": result.get("baseline", "")})
    return rows


def write_plot(path: str, results: list[dict]) -> None:
    """Writes the ratios of everything but the baselines as bars."""
    groups = {}
    for result in results:
        if result["variant"] != result.get("baseline", result["variant"]):
            groups.setdefault(f"{result['part']}\n{result['mode']}", {})[result["variant"]] = result["ratio"]
    harness.write_bar_plot(
        path,
        groups,
        title="optimizer: what loss scaling costs each library; training: a whole step next to mpkeras",
        ylabel="optimizer: time / own Adam; training: time / mpkeras",
    )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", action="append", choices=PARTS, help="may be given more than once (default: both)")
    parser.add_argument(
        "--peer", action="append", choices=NAMES, help="next to mpkeras; may be given more than once (default: all)"
    )
    parser.add_argument(
        "--params", type=int, default=3_000_000, metavar="N", help="of the optimizer alone (default: 3000000)"
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="timed steps of each library (default: 40; with --quick: 10)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    harness.add_options(parser)
    options = parser.parse_args(arguments)
    options.part = options.part or list(PARTS)
    options.peer = options.peer or NAMES
    options.rounds = (10 if options.quick else 40) if options.rounds is None else options.rounds
    if options.rounds < 1 or options.params < loss_scale_overhead.TENSORS:
        parser.error(f"--rounds must be 1 or more and --params {loss_scale_overhead.TENSORS} or more")
    return options


def main() -> int:
    options = parse_arguments()
    chosen = [argument for name in options.part for argument in ("--part", name)]
    chosen += [argument for name in options.peer for argument in ("--peer", name)]
    return harness.run_benchmark(
        __file__,
        __doc__.splitlines()[0],
        options,
        measure=lambda backend: measure(backend, options.part, options.peer, options.params, options.rounds),
        arguments=["--rounds", str(options.rounds), "--params", str(options.params), *chosen],
        settings={
            "optimizer": f"Adam of {options.params} parameters in {loss_scale_overhead.TENSORS} float32 matrices",
            "training": f"{SIZES.hidden} layers of {SIZES.width}, batch {SIZES.batch_size}, mixed_bfloat16",
            "loss_scale": f"dynamic, from {peers_keras.LOSS_SCALE:g}",
            "rounds": options.rounds,
        },
        table_rows=table_rows,
        write_plot=write_plot,
    )


if __name__ == "__main__":
    sys.exit(main())
