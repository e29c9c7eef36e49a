"""What does loss scaling, with and without rollback, cost a whole training step?

Four models under `model.train_on_batch`: forward, loss, backward, update. `bare` has plain Adam, `keras` the
stock `keras.optimizers.LossScaleOptimizer`, `mpkeras` is `mpkeras.prepare(..., rollback=False)`, and
`mpkeras, rollback` also puts every other variable back after a skipped step (no step is skipped here). All
scale the loss, whatever the policy. Under the float32 policy, the default, all four do the same arithmetic;
under a 16-bit one mpkeras' ratio includes the layers that its rules keep in float32.

    python benchmarks/train_step_overhead.py --backend tensorflow --model mlp
"""

import argparse
import logging
import sys

import harness
from models import MODELS, MODES, make_batch, ratios_by_case

VARIANTS = ("bare", "keras", "mpkeras", "mpkeras, rollback")
# The most that a step may cost, as a ratio to `bare`; rollback as a ratio to `mpkeras` without it.
GOALS = {"tensorflow graph": 1.05, "tensorflow XLA": 1.03, "jax jit": 1.03}
# Mostly update: stock Keras and the best of the ways tried are at 1.20 in a TensorFlow graph.
MODEL_GOALS = {("tensorflow graph", "mlp"): 1.20}
ROLLBACK_GOAL = 1.02


def goal(mode: str, model: str, variant: str) -> float | None:
    """Returns the highest ratio to `bare` that `variant` should have, `None` where there is no goal."""
    if mode not in GOALS or not variant.startswith("mpkeras"):
        return None
    ratio = MODEL_GOALS.get((mode, model), GOALS[mode])
    return ratio * ROLLBACK_GOAL if variant.endswith("rollback") else ratio


def make_step(name: str, variant: str, jit_compile: bool, policy: str):
    """Returns `(step, batch_size, parameters)`: one training step of a fresh model on a fixed batch."""
    import keras

    from mpkeras.training.prepare import prepare

    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    build, batch_size = MODELS[name]
    model = build(keras)
    # Small: the loss stays finite for as long as the rounds last.
    optimizer = keras.optimizers.Adam(1e-4)
    if variant == "keras":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # Without `auto_scale_loss=False` Keras would wrap `bare`, too.
    model.compile(optimizer, loss, jit_compile=jit_compile, auto_scale_loss=False)
    if variant.startswith("mpkeras"):
        prepare(model, policy, loss_scale="dynamic", rollback=variant.endswith("rollback"))
    x, y = make_batch(model, batch_size)

    # `train_on_batch` reads the loss, and with it waits for the step.
    return lambda: model.train_on_batch(x, y), batch_size, model.count_params()


def measure(backend: str, models: list[str], rounds: int, policy: str) -> dict:
    """Returns `{"environment", "results"}` of this process, whose Keras backend must be `backend`."""
    # Each variant is a function of its own, which TensorFlow takes for a function traced too often.
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    results = []
    for name in models:
        for mode, jit_compile in MODES[backend]:
            made = {variant: make_step(name, variant, jit_compile, policy) for variant in VARIANTS}
            _, batch_size, params = made["bare"]
            steps = {variant: step for variant, (step, _, _) in made.items()}
            times_ms = harness.time_interleaved(steps, rounds, wait=harness.wait_for_device)
            without = times_ms["mpkeras"]
            for variant, summary in harness.compare(times_ms, baseline="bare").items():
                result = {"mode": mode, "model": name, "variant": variant, **summary}
                result |= {"batch_size": batch_size, "params": params}
                if variant == "mpkeras, rollback":
                    ratios = harness.paired_ratios(times_ms[variant], without)
                    result["rollback_ratio"] = harness.summarize(ratios)
                if goal(mode, name, variant):
                    result["goal_ratio"] = goal(mode, name, variant)
                results.append(result)
    return {"environment": harness.environment(), "results": results}


def table_rows(results: list[dict]) -> list[dict[str, str]]:
    """Returns the rows to print, all as text."""
    return [
        {
            "model": result["model"],
            "batch": str(result["batch_size"]),
            "step": result["mode"],
            "variant": result["variant"],
            **harness.summary_cells(result),
            "goal": f"{result['goal_ratio']:.2f}" if "goal_ratio" in result else "",
        }
        for result in results
    ]


def write_plot(path: str, results: list[dict]) -> None:
    """Writes the ratios to `bare` as bars."""
    harness.write_bar_plot(
        path,
        ratios_by_case(results),
        title="What loss scaling costs a whole training step",
        ylabel="time / time with plain Adam",
    )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", action="append", choices=list(MODELS), help="may be given more than once (default: all)"
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="timed steps of each variant (default: 60; with --quick: 15)"
    )
    parser.add_argument(
        "--policy",
        default="float32",
        choices=("float32", "mixed_bfloat16", "mixed_float16"),
        help="dtype policy of all variants (default: float32)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds; cnn and mlp only")
    harness.add_options(parser)
    options = parser.parse_args(arguments)
    options.model = options.model or (["cnn", "mlp"] if options.quick else list(MODELS))
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
        measure=lambda backend: measure(backend, options.model, options.rounds, options.policy),
        arguments=["--rounds", str(options.rounds), "--policy", options.policy, *chosen],
        settings={"optimizer": "Adam", "policy": options.policy, "rounds": options.rounds},
        table_rows=table_rows,
        write_plot=write_plot,
    )


if __name__ == "__main__":
    sys.exit(main())
