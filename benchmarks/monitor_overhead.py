"""What does a monitoring callback cost a training step of `fit`?

The same model is trained by `fit` without a callback and with each of those in `CALLBACKS`, on the same batches. A
round is one `fit` of each, of a few epochs; what counts is the ratio within a round. The whole of `fit` is timed, the
callback's work at the ends of an epoch included, so short epochs exaggerate. With the progress bar, the default, and
with `verbose=0`: without a bar nothing on JAX waits for a step before the next begins, until a callback looks.

    python benchmarks/monitor_overhead.py --backend jax --model cnn
"""

import argparse
import contextlib
import itertools
import logging
import os
import sys

import harness
from models import MODELS, MODES, make_batch, ratios_by_case

# One line for each callback to measure: its name, and how it is made.
CALLBACKS = {
    "ResourceMonitor": lambda mpkeras: mpkeras.callbacks.ResourceMonitor(),
    "NumericsMonitor": lambda mpkeras: mpkeras.callbacks.NumericsMonitor(),
}
# `bare again` is another model without a callback: how much two models differ by themselves.
VARIANTS = ("bare", "bare again", *CALLBACKS)
NAMES = ("cnn", "transformer", "mlp")
# The most that a callback may cost, as a ratio to `bare`.
GOAL = 1.02
# Of one call of `fit`: one step alone would mostly measure how `fit` begins and ends.
EPOCHS, STEPS = 3, 50
# The name of what `fit` shows, and `verbose`.
DISPLAYS = (("progress bar", 1), ("nothing", 0))


def make_fit(name: str, variant: str, jit_compile: bool, steps: int, verbose: int, made_by=CALLBACKS, batch_size=None):
    """Returns `(fit, batch_size)`: a function that trains a fresh model for `EPOCHS` epochs of so many batches.

    `made_by` has a function for each callback, as `CALLBACKS`; of a variant that is not in it there is none. A
    `batch_size` of `None` is the model's own.
    """
    import keras
    import numpy as np

    import mpkeras

    keras.utils.set_random_seed(0)
    build, own_batch_size = MODELS[name]
    batch_size = batch_size or own_batch_size
    model = build(keras)
    # Small: the loss stays finite for as long as the rounds last.
    optimizer = keras.optimizers.Adam(1e-4)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=jit_compile)
    # As in real use; and a guarded step is what a callback may look into.
    mpkeras.prepare(model, "float32")
    x, y = make_batch(model, batch_size)
    data = np.concatenate([x] * steps), np.concatenate([y] * steps)
    callbacks = [made_by[variant](mpkeras)] if variant in made_by else []

    options = {"batch_size": batch_size, "epochs": EPOCHS, "shuffle": False, "verbose": verbose}

    def fit():
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            return model.fit(*data, **options, callbacks=list(callbacks)).history["loss"]

    return fit, batch_size


def measure(backend: str, models: list[str], rounds: int, steps: int = STEPS) -> dict:
    """Returns `{"environment", "results"}` of this process, whose Keras backend must be `backend`."""
    # Each variant is a function of its own, which TensorFlow takes for a function traced too often.
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    results = []
    for name in models:
        for (mode, jit_compile), (display, verbose) in itertools.product(MODES[backend], DISPLAYS):
            made = {variant: make_fit(name, variant, jit_compile, steps, verbose) for variant in VARIANTS}
            fits = {variant: fit for variant, (fit, _) in made.items()}
            times_ms = harness.time_interleaved(fits, rounds, wait=harness.wait_for_device, warm_up=1)
            times_ms = {variant: [ms / (EPOCHS * steps) for ms in values] for variant, values in times_ms.items()}
            for variant, summary in harness.compare(times_ms, baseline="bare").items():
                result = {"mode": mode, "model": name, "display": display, "variant": variant, **summary}
                result["batch_size"] = made[variant][1]
                results.append({**result, "goal_ratio": GOAL} if variant in CALLBACKS else result)
    return {"environment": harness.environment(), "results": results}


def table_rows(results: list[dict]) -> list[dict[str, str]]:
    """Returns the rows to print, all as text."""
    rows = []
    for result in results:
        row = {"model": result["model"], "batch": str(result["batch_size"]), "step": result["mode"]}
        row |= {"shown": result["display"], "callback": result["variant"], **harness.summary_cells(result)}
        row["ratio"] = f"{result['ratio']['median']:.3f}"
        row["goal"] = f"{result['goal_ratio']:.2f}" if "goal_ratio" in result else ""
        rows.append(row)
    return rows


def write_plot(path: str, results: list[dict]) -> None:
    """Writes the ratios to `bare` as bars."""
    cases = ratios_by_case([{**result, "mode": f"{result['mode']}\n{result['display']}"} for result in results])
    harness.write_bar_plot(
        path,
        cases,
        title="What a monitoring callback costs a training step of fit",
        ylabel="time / time without it",
        goals=dict.fromkeys(cases, GOAL),
    )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=NAMES, help="may be given more than once (default: all)")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="timed calls of `fit` of each variant (default: 12; with --quick: 5)"
    )
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"steps an epoch (default: {STEPS})")
    parser.add_argument("--quick", action="store_true", help="fewer rounds; cnn only")
    harness.add_options(parser)
    options = parser.parse_args(arguments)
    options.model = options.model or (["cnn"] if options.quick else list(NAMES))
    options.rounds = (5 if options.quick else 12) if options.rounds is None else options.rounds
    if options.rounds < 1 or options.steps < 1:
        parser.error("--rounds and --steps must be 1 or more")
    return options


def main() -> int:
    options = parse_arguments()
    numbers = ["--rounds", str(options.rounds), "--steps", str(options.steps)]
    return harness.run_benchmark(
        __file__,
        __doc__.splitlines()[0],
        options,
        measure=lambda backend: measure(backend, options.model, options.rounds, options.steps),
        arguments=[*numbers, *(argument for name in options.model for argument in ("--model", name))],
        settings={
            "optimizer": "Adam",
            "policy": "float32",
            "rounds": options.rounds,
            "epochs": EPOCHS,
            "steps": options.steps,
        },
        table_rows=table_rows,
        write_plot=write_plot,
    )


if __name__ == "__main__":
    sys.exit(main())
