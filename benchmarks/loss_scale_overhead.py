"""What does loss scaling cost an optimizer step?

Adam's update alone, no model: `bare` is plain Adam, `keras` the stock `keras.optimizers.LossScaleOptimizer`
around it, `mpkeras` ours. Gradients go in as inputs, finite, times the loss scale, so that no compiler can
fold the check away. Each backend runs in a process of its own, and each number is a ratio to `bare` within
the same round. The best a finite check beside Adam can do is about 8/7 = 1.14: Adam passes over memory seven
times (reads the gradient, both moments and the weights, writes all but the gradient), the check reads the
gradients once more.

    python benchmarks/loss_scale_overhead.py --backend jax --params 3000000

With `--accumulate 4`, `keras` and `mpkeras` update with the mean of the gradients of four calls, and `bare` at each
call; the times are those of one call, a quarter of a window.
"""

import argparse
import sys
import warnings

import harness

VARIANTS = ("bare", "keras", "mpkeras")
LOSS_SCALE = 2.0**15
TENSORS = 4

# The most that `mpkeras` may cost, as a ratio to `bare`: the project's own bar, from what fifteen ways of
# writing the step reached. From the number of parameters in the first place upwards; below that the time is
# that of starting the step, and a ratio says little.
GOALS = {
    "tensorflow graph": ((1_000_000, 1.20),),
    "tensorflow XLA": ((1_000_000, 1.25), (10_000_000, 1.20)),
    "jax jit": ((1_000_000, 1.25),),
    "torch eager": ((1_000_000, 1.20),),
}


def goal(mode: str, params: int) -> float | None:
    """Returns the highest ratio to `bare` that `mpkeras` should have, `None` for few parameters."""
    reached = [ratio for least, ratio in GOALS[mode] if params >= least]
    return reached[-1] if reached else None


def tensor_shapes(params: int, tensors: int = TENSORS) -> list[tuple[int, int]]:
    """Returns the shapes of so many equal matrices with about `params` elements together."""
    columns = max(1, min(1000, params // tensors))
    rows = max(1, params // tensors // columns)
    return [(rows, columns)] * tensors


def make_values(params: int, tensors: int = TENSORS):
    """Returns the initial weights and the scaled gradients as float32 arrays, seeded."""
    import numpy as np

    generator = np.random.default_rng(0)
    shapes = tensor_shapes(params, tensors)
    weights = [generator.normal(size=shape).astype("float32") for shape in shapes]
    grads = [(generator.normal(size=shape) * LOSS_SCALE).astype("float32") for shape in shapes]
    return weights, grads


def make_optimizer(variant: str, weights, accumulate: int = 1):
    """Returns `(optimizer, variables)`: fresh variables of `weights`, the optimizer built for them."""
    import keras

    from mpkeras.scaling.optimizer import LossScaleOptimizer

    window = {"gradient_accumulation_steps": accumulate} if accumulate > 1 and variant != "bare" else {}
    optimizer = keras.optimizers.Adam(1e-3, **window)
    if variant == "keras":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=LOSS_SCALE)
    elif variant == "mpkeras":
        optimizer = LossScaleOptimizer(optimizer, initial_scale=LOSS_SCALE)
    variables = [keras.Variable(value, name=f"weight_{index}") for index, value in enumerate(weights)]
    optimizer.build(variables)
    return optimizer, variables


def tensorflow_steps(params: int, jit_compile: bool, accumulate: int = 1, tensors: int = TENSORS):
    """Returns `{variant: step}` and no temporary memory; gradients are arguments of a `tf.function`."""
    import tensorflow as tf

    weights, grads = make_values(params, tensors)
    grads = [tf.constant(grad) for grad in grads]

    def make_step(variant):
        optimizer, variables = make_optimizer(variant, weights, accumulate)

        @tf.function(jit_compile=jit_compile)
        def step(grads):
            optimizer.apply(grads, variables)

        return lambda: step(grads)

    return {variant: make_step(variant) for variant in VARIANTS}, {}


def jax_steps(params: int, accumulate: int = 1, tensors: int = TENSORS):
    """Returns `{variant: step}` and `{variant: temporary bytes}` of `jax.jit` with donated state."""
    import jax

    weights, grads = make_values(params, tensors)
    grads = [jax.numpy.asarray(grad) for grad in grads]
    temporary_bytes = {}

    def make_step(variant):
        optimizer, variables = make_optimizer(variant, weights, accumulate)

        # Donated inputs come back in the same order: XLA then writes every result over its old value.
        def update(trainable_variables, optimizer_variables, grads):
            return optimizer.stateless_apply(optimizer_variables, grads, trainable_variables)

        # Copies: the arrays are donated, and Keras' own variables must keep theirs.
        state = [
            [variable.value.copy() for variable in variables],
            [variable.value.copy() for variable in optimizer.variables],
        ]
        compiled = jax.jit(update, donate_argnums=(0, 1)).lower(*state, grads).compile()
        memory = compiled.memory_analysis()
        if memory is not None:
            temporary_bytes[variant] = int(memory.temp_size_in_bytes)

        def step():
            state[:] = compiled(*state, grads)
            return state

        return step

    return {variant: make_step(variant) for variant in VARIANTS}, temporary_bytes


def torch_gradients(params: int, tensors: int = TENSORS):
    """Returns the weights, the gradients that every variant gets, and how to put the gradients back."""
    import keras
    import torch

    weights, source = make_values(params, tensors)
    source = [keras.ops.convert_to_tensor(grad) for grad in source]
    grads = [grad.clone() for grad in source]

    def restore():
        # A step may unscale the gradients in place; the next one must not get them smaller.
        with torch.no_grad():
            for grad, kept in zip(grads, source, strict=True):
                grad.copy_(kept)

    return weights, grads, restore


def torch_steps(weights, grads, accumulate: int = 1):
    """Returns `{variant: step}` and no temporary memory."""
    import torch

    def make_step(variant):
        optimizer, variables = make_optimizer(variant, weights, accumulate)
        for variable, grad in zip(variables, grads, strict=True):
            variable.value.grad = grad

        def step():
            with torch.no_grad():
                optimizer.apply([variable.value.grad for variable in variables], variables)

        return step

    return {variant: make_step(variant) for variant in VARIANTS}, {}


def make_steps(backend: str, params: int, accumulate: int = 1, tensors: int = TENSORS):
    """Yields `(mode, steps, temporary_bytes, before)` for each way `backend` runs a step."""
    if backend == "tensorflow":
        yield ("tensorflow graph", *tensorflow_steps(params, False, accumulate, tensors), lambda: None)
        yield ("tensorflow XLA", *tensorflow_steps(params, True, accumulate, tensors), lambda: None)
    elif backend == "jax":
        yield ("jax jit", *jax_steps(params, accumulate, tensors), lambda: None)
    else:
        weights, grads, restore = torch_gradients(params, tensors)
        yield ("torch eager", *torch_steps(weights, grads, accumulate), restore)


def whole_window(step, before, accumulate: int):
    """Returns a function that calls `step` once for every call of a window.

    `before` runs in between and is timed there; on torch it copies the gradients, for every variant alike.
    """

    def window():
        for _ in range(accumulate - 1):
            step()
            before()
        return step()

    return window


def measure(backend: str, params: list[int], rounds: int, accumulate: int = 1, tensors: int = TENSORS) -> dict:
    """Returns `{"environment", "results"}` of this process, whose Keras backend must be `backend`."""
    # The step alone is timed: nothing here calls `scale_loss`, and mpkeras says so.
    warnings.filterwarnings("ignore", message=".*scale_loss.*")
    results = []
    for count in params:
        for mode, steps, temporary_bytes, before in make_steps(backend, count, accumulate, tensors):
            windows = {variant: whole_window(step, before, accumulate) for variant, step in steps.items()}
            times_ms = harness.time_interleaved(windows, rounds, wait=harness.wait_for_device, before=before)
            times_ms = {variant: [ms / accumulate for ms in values] for variant, values in times_ms.items()}
            for variant, summary in harness.compare(times_ms, baseline="bare").items():
                result = {"mode": mode, "params": count, "tensors": tensors, "variant": variant, **summary}
                if variant in temporary_bytes:
                    result["temporary_bytes"] = temporary_bytes[variant]
                if accumulate > 1:
                    result["accumulate"] = accumulate
                elif variant == "mpkeras" and tensors == TENSORS and goal(mode, count):
                    result["goal_ratio"] = goal(mode, count)
                results.append(result)
    return {"environment": harness.environment(), "results": results}


def table_rows(results: list[dict]) -> list[dict[str, str]]:
    """Returns the rows to print, all as text."""
    rows = []
    for result in results:
        temporary = result.get("temporary_bytes")
        rows.append(
            {
                "step": result["mode"],
                "parameters": f"{result['params']:,}",
                "variant": result["variant"],
                **harness.summary_cells(result),
                "goal": f"{result['goal_ratio']:.2f}" if "goal_ratio" in result else "",
                "temporary MB": "" if temporary is None else f"{temporary / 1e6:.1f}",
            }
        )
    return rows


def write_plot(path: str, results: list[dict]) -> None:
    """Writes the ratios of the loss-scaling variants as bars."""
    groups, goals = {}, {}
    for result in results:
        name = f"{result['mode']}\n{result['params'] / 1e6:g} M"
        if result["variant"] != "bare":
            groups.setdefault(name, {})[result["variant"]] = result["ratio"]
        if "goal_ratio" in result:
            goals[name] = result["goal_ratio"]
    harness.write_bar_plot(
        path,
        groups,
        title="What loss scaling costs an Adam step",
        ylabel="time / time of plain Adam",
        goals=goals,
    )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--params",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers of parameters (default: 3000000 30000000; with --quick: 3000000)",
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="timed steps of each variant (default: 40; with --quick: 12)"
    )
    parser.add_argument(
        "--tensors",
        type=int,
        default=TENSORS,
        metavar="N",
        help=f"equal matrices that the parameters are in; the goals are for the default of {TENSORS}",
    )
    parser.add_argument(
        "--accumulate",
        type=int,
        default=1,
        metavar="N",
        help="calls to an update of `keras` and `mpkeras` (default: 1)",
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds and the smaller size only")
    harness.add_options(parser)
    options = parser.parse_args(arguments)
    options.params = options.params or ([3_000_000] if options.quick else [3_000_000, 30_000_000])
    options.rounds = (12 if options.quick else 40) if options.rounds is None else options.rounds
    if min(options.rounds, options.accumulate, options.tensors) < 1 or min(options.params) < options.tensors:
        parser.error(
            "--rounds, --accumulate and --tensors must be 1 or more, and --params as many as --tensors or more"
        )
    return options


def main() -> int:
    options = parse_arguments()
    return harness.run_benchmark(
        __file__,
        __doc__.splitlines()[0],
        options,
        measure=lambda backend: measure(backend, options.params, options.rounds, options.accumulate, options.tensors),
        arguments=[
            *("--rounds", str(options.rounds), "--accumulate", str(options.accumulate)),
            *("--tensors", str(options.tensors)),
            *("--params", *map(str, options.params)),
        ],
        settings={
            "optimizer": "Adam",
            "variables": f"{options.tensors} float32 matrices",
            "loss_scale": LOSS_SCALE,
            "rounds": options.rounds,
            "calls to an update": options.accumulate,
        },
        table_rows=table_rows,
        write_plot=write_plot,
    )


if __name__ == "__main__":
    sys.exit(main())
