"""What do the finite check and the rollback of a skipped step cost a whole training step?

Three models under `mpkeras.make_train_step`: forward, loss, backward, update. `bare` checks nothing, `check` finds
steps that are not finite and skips their update, and `check, rollback` also puts every other variable back. The
scale is 1 in all of them and no step is skipped, so all do the same arithmetic; what differs is the guard.

    python benchmarks/rollback_overhead.py --backend jax --model cnn
"""

import argparse
import logging
import sys

import harness
from models import MODELS, MODES, make_batch, ratios_by_case

VARIANTS = ("bare", "check", "check, rollback")
# The first has state besides its weights, the statistics of BatchNormalization; the others have none.
NAMES = ("cnn", "transformer", "lstm")
# The most that the rollback may cost, as a ratio to `check`.
ROLLBACK_GOAL = 1.02


def make_step(name: str, variant: str, jit_compile: bool):
    """Returns `(step, batch_size, parameters)`: one training step of a fresh model on a fixed batch."""
    import keras

    import mpkeras
    from mpkeras.training.step import make_train_step

    keras.utils.set_random_seed(0)
    build, batch_size = MODELS[name]
    model = build(keras)
    # Small: the loss stays finite for as long as the rounds last.
    optimizer = keras.optimizers.Adam(1e-4)
    if variant != "bare":
        optimizer = mpkeras.LossScaleOptimizer(optimizer, loss_scale=1.0)
    step = make_train_step(
        model,
        optimizer,
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit_compile,
        rollback=variant.endswith("rollback"),
    )
    # Tensors of the backend: what is measured is the step, not the way of a batch to the device.
    x, y = (keras.ops.convert_to_tensor(values) for values in make_batch(model, batch_size))
    # Reading the loss waits for the step, as a loop that logs it would.
    return lambda: float(step(x, y)["loss"]), batch_size, model.count_params()


def measure(backend: str, models: list[str], rounds: int) -> dict:
    """Returns `{"environment", "results"}` of this process, whose Keras backend must be `backend`."""
    # Each variant is a function of its own, which TensorFlow takes for a function traced too often.
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    results = []
    for name in models:
        for mode, jit_compile in MODES[backend]:
            made = {variant: make_step(name, variant, jit_compile) for variant in VARIANTS}
            _, batch_size, params = made["bare"]
            steps = {variant: step for variant, (step, _, _) in made.items()}
            times_ms = harness.time_interleaved(steps, rounds, wait=harness.wait_for_device)
            for variant, summary in harness.compare(times_ms, baseline="bare").items():
                result = {"mode": mode, "model": name, "variant": variant, **summary}
                result |= {"batch_size": batch_size, "params": params}
                if variant == "check, rollback":
                    ratios = harness.paired_ratios(times_ms[variant], times_ms["check"])
                    result |= {"rollback_ratio": harness.summarize(ratios), "goal_rollback_ratio": ROLLBACK_GOAL}
                results.append(result)
    return {"environment": harness.environment(), "results": results}


def table_rows(results: list[dict]) -> list[dict[str, str]]:
    """Returns the rows to print, all as text."""
    rows = []
    for result in results:
        row = {"model": result["model"], "batch": str(result["batch_size"]), "step": result["mode"]}
        row |= {"variant": result["variant"], **harness.summary_cells(result)}
        to_check = result.get("rollback_ratio")
        row["ratio to check"] = f"{to_check['median']:.3f}" if to_check else ""
        row["goal"] = f"{result['goal_rollback_ratio']:.2f}" if to_check else ""
        rows.append(row)
    return rows


def write_plot(path: str, results: list[dict]) -> None:
    """Writes the ratios to `bare` as bars."""
    harness.write_bar_plot(
        path,
        ratios_by_case(results),
        title="What the finite check and the rollback cost a whole training step",
        ylabel="time / time without check",
    )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=NAMES, help="may be given more than once (default: all)")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="timed steps of each variant (default: 60; with --quick: 15)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds; cnn only")
    harness.add_options(parser)
    options = parser.parse_args(arguments)
    options.model = options.model or (["cnn"] if options.quick else list(NAMES))
    options.rounds = (15 if options.quick else 60) if options.rounds is None else options.rounds
    if options.rounds < 1:
        parser.error("--rounds must be 1 or more")
    return options


def main() -> int:
    options = parse_arguments()
    chosen = [argument for name in options.model for argument in ("--model", name)]
    return harness.run_benchmark(
        __file__,
        __doc__.splitlines()[0],
        options,
        measure=lambda backend: measure(backend, options.model, options.rounds),
        arguments=["--rounds", str(options.rounds), *chosen],
        settings={"optimizer": "Adam", "policy": "float32", "rounds": options.rounds},
        table_rows=table_rows,
        write_plot=write_plot,
    )


if __name__ == "__main__":
    sys.exit(main())
