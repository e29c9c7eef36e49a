"""What does an Adam step cost when weights and optimizer state are stored in bfloat16?

Adam's update alone, no model, in four variants:

    bare             plain Keras: float32 weights, slots and gradients
    mpkeras float32  the same under `mpkeras.LossScaleOptimizer`
    mpkeras slots    float32 weights and gradients, `slot_dtype="bfloat16"`
    mpkeras bfloat16 weights, slots and gradients in bfloat16

Those of mpkeras check that the gradients are finite and unscale them; the last two compute in float32 and round what
they store stochastically. Each backend runs in a process of its own, compiled by XLA with donated state, and each
number is a ratio to `bare` within the same round. The bytes are the compiler's own: of the weights and slots, a
parameter, and of temporary memory. By bytes alone the last one could reach 16/28 = 0.57: Adam reads the gradients,
both slots and the weights, and writes all but the gradients; the check reads the gradients once more.

    python benchmarks/small_state.py --backend jax --params 30000000
"""

import argparse
import os
import re
import sys
import tempfile
import warnings
from pathlib import Path

import harness
from loss_scale_overhead import LOSS_SCALE, TENSORS, make_values

BACKENDS = ("tensorflow", "jax")  # XLA compiles the update there
MODES = {"tensorflow": "tensorflow XLA", "jax": "jax jit"}
# By variant: the dtypes of the weights and gradients, and of the slots; `None` is plain Keras.
VARIANTS = {
    "bare": ("float32", None),
    "mpkeras float32": ("float32", "float32"),
    "mpkeras slots": ("float32", "bfloat16"),
    "mpkeras bfloat16": ("bfloat16", "bfloat16"),
}
# The most that a variant may cost, as a ratio to `bare`, from this number of parameters upwards: below it the time is
# that of starting the step. And its bytes a parameter.
GOAL_PARAMS = 10_000_000
GOALS = {"mpkeras slots": 0.90, "mpkeras bfloat16": 0.70}
STATE_BYTES = {"bare": 12, "mpkeras float32": 12, "mpkeras slots": 8, "mpkeras bfloat16": 6}


def make_optimizer(variant: str, weights):
    """Returns `(optimizer, variables)`: fresh variables of `weights`, the optimizer built for them."""
    import keras

    from mpkeras.scaling.optimizer import LossScaleOptimizer

    weight_dtype, slot_dtype = VARIANTS[variant]
    optimizer = keras.optimizers.Adam(1e-3)
    if slot_dtype is not None:
        optimizer = LossScaleOptimizer(optimizer, initial_scale=LOSS_SCALE, slot_dtype=slot_dtype)
    variables = [
        keras.Variable(value, dtype=weight_dtype, name=f"weight_{index}") for index, value in enumerate(weights)
    ]
    optimizer.build(variables)
    return optimizer, variables


def tensorflow_steps(params: int, folder: Path):
    """Returns `{variant: step}` and `{variant: bytes}`; gradients are arguments of a `tf.function`.

    Args:
        params: Number of parameters.
        folder: Where XLA writes what it allocates.
    """
    import tensorflow as tf

    weights, grads = make_values(params)
    steps, found = {}, {}

    def add(variant, dtype):
        optimizer, variables = make_optimizer(variant, weights)
        taken = [tf.cast(tf.constant(grad), dtype) for grad in grads]

        def update(grads):
            optimizer.apply(grads, variables)

        # XLA's files are named after the function.
        update.__name__ = f"update_{variant.replace(' ', '_')}_{params}"
        compiled = tf.function(update, jit_compile=True)
        steps[variant] = lambda: compiled(taken)
        steps[variant]()
        found[variant] = allocated_bytes(folder, update.__name__)

    for variant, (dtype, _) in VARIANTS.items():
        add(variant, dtype)
    return steps, found


def allocated_bytes(folder: Path, name: str) -> dict[str, int]:
    """Returns what XLA wrote down of its buffers for the function `name`, in bytes; `{}` if it did not."""
    paths = sorted(folder.glob(f"*inference_{name}_*buffer-assignment.txt"))
    return read_allocations(paths[0].read_text()) if paths else {}


def read_allocations(text: str) -> dict[str, int]:
    """Returns what `allocated_bytes` does from XLA's list of buffers.

    State is what comes in and goes out in the same buffer. Temporary is all that is no argument: large constants, and
    results that have a buffer of their own, count as well.
    """
    found = dict.fromkeys(("state_bytes", "argument_bytes", "temporary_bytes"), 0)
    for size, rest in re.findall(r"^allocation \d+: size (\d+), (.*)$", text, flags=re.MULTILINE):
        is_argument = rest.startswith("parameter")
        found["argument_bytes" if is_argument else "temporary_bytes"] += int(size)
        if is_argument and "maybe-live-out" in rest:
            found["state_bytes"] += int(size)
    return found


def jax_steps(params: int):
    """Returns `{variant: step}` and `{variant: bytes}` of `jax.jit` with donated state."""
    import jax

    weights, grads = make_values(params)
    steps, found = {}, {}

    def add(variant, dtype):
        optimizer, variables = make_optimizer(variant, weights)
        taken = [jax.numpy.asarray(grad, dtype) for grad in grads]

        # Donated inputs come back in the same order: XLA then writes every result over its old value.
        def update(trainable_variables, optimizer_variables, grads):
            return optimizer.stateless_apply(optimizer_variables, grads, trainable_variables)

        # Copies: the arrays are donated, and Keras' own variables must keep theirs.
        state = [[variable.value.copy() for variable in held] for held in (variables, optimizer.variables)]
        compiled = jax.jit(update, donate_argnums=(0, 1)).lower(*state, taken).compile()

        def step():
            state[:] = compiled(*state, taken)
            return state

        steps[variant] = step
        memory = compiled.memory_analysis()
        if memory is not None:
            found[variant] = {
                "state_bytes": int(memory.alias_size_in_bytes),
                "argument_bytes": int(memory.argument_size_in_bytes),
                "temporary_bytes": int(
                    memory.temp_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
                ),
            }

    for variant, (dtype, _) in VARIANTS.items():
        add(variant, dtype)
    return steps, found


def measure(backend: str, params: list[int], rounds: int) -> dict:
    """Returns `{"environment", "results"}` of this process, whose Keras backend must be `backend`."""
    results = []
    with tempfile.TemporaryDirectory() as folder:
        if backend == "tensorflow":
            # Before TensorFlow is imported; JAX says the same itself.
            flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=.*update_.*"
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        # The step alone is timed: nothing here calls `scale_loss`, and mpkeras says so.
        warnings.filterwarnings("ignore", message=".*scale_loss.*")
        for count in params:
            steps, found = jax_steps(count) if backend == "jax" else tensorflow_steps(count, Path(folder))
            times_ms = harness.time_interleaved(steps, rounds, wait=harness.wait_for_device)
            for variant, summary in harness.compare(times_ms, baseline="bare").items():
                result = {"mode": MODES[backend], "params": count, "variant": variant, **summary}
                results.append(result | with_goals(variant, count, found.get(variant, {})))
    return {"environment": harness.environment(), "results": results}


def with_goals(variant: str, params: int, found: dict[str, int]) -> dict:
    """Returns what the compiler says of a variant, a parameter, and the goals that hold for it."""
    entry: dict = {name: size / params for name, size in found.items()}
    if found and VARIANTS[variant][1] is not None and params >= GOAL_PARAMS:
        # The scalars of the optimizer are some bytes.
        entry["goal_state_bytes"] = STATE_BYTES[variant] + 0.01
        entry["goal_temporary_bytes"] = 0.01
    if variant in GOALS and params >= GOAL_PARAMS:
        entry["goal_ratio"] = GOALS[variant]
    return entry


def table_rows(results: list[dict]) -> list[dict[str, str]]:
    """Returns the rows to print, all as text."""

    def number(result, key):
        return f"{result[key]:.2f}" if key in result else ""

    return [
        {
            "step": result["mode"],
            "parameters": f"{result['params']:,}",
            "variant": result["variant"],
            **harness.summary_cells(result),
            "goal": number(result, "goal_ratio"),
            "state bytes": number(result, "state_bytes"),
            "arguments": number(result, "argument_bytes"),
            "temporary": number(result, "temporary_bytes"),
        }
        for result in results
    ]


def write_plot(path: str, results: list[dict]) -> None:
    """Writes the ratios as bars, one group a step."""
    groups: dict = {}
    for result in results:
        if result["variant"] != "bare":
            name = f"{result['mode']}\n{result['params'] / 1e6:g} M"
            groups.setdefault(name, {})[result["variant"]] = result["ratio"]
    harness.write_bar_plot(
        path, groups, title="An Adam step with state in bfloat16", ylabel="time / time of plain float32 Adam"
    )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--params",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers of parameters (default: 30000000; with --quick: 3000000)",
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="timed steps of each variant (default: 40; with --quick: 12)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds and fewer parameters")
    harness.add_options(parser)
    options = parser.parse_args(arguments)
    options.params = options.params or ([3_000_000] if options.quick else [30_000_000])
    options.rounds = (12 if options.quick else 40) if options.rounds is None else options.rounds
    if options.rounds < 1 or min(options.params) < TENSORS:
        parser.error(f"--rounds must be 1 or more, and --params {TENSORS} or more")
    if options.backend is None:
        options.backend = [name for name in harness.installed_backends() if name in BACKENDS]
    elif "torch" in options.backend:
        parser.error(f"argument --backend: expected one that XLA compiles for, {' or '.join(BACKENDS)}, received torch")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    return harness.run_benchmark(
        __file__,
        __doc__.splitlines()[0],
        options,
        measure=lambda backend: measure(backend, options.params, options.rounds),
        arguments=["--rounds", str(options.rounds), "--params", *map(str, options.params)],
        settings={
            "optimizer": "Adam",
            "variables": f"{TENSORS} matrices",
            "loss_scale": LOSS_SCALE,
            "rounds": options.rounds,
            "bytes": "a parameter",
        },
        table_rows=table_rows,
        write_plot=write_plot,
    )


if __name__ == "__main__":
    sys.exit(main())
