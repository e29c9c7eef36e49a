"""How much memory does a compiled training step need under a 16-bit policy?

The whole step of `mpkeras.make_train_step` (forward, loss, backward, Adam) is compiled by XLA on JAX and not run: the
compiler says how many bytes it takes as arguments (weights, optimizer, batch) and for temporaries (activations,
gradients). That depends on no clock and no load. `cpu` is this machine; XLA's compiler for CPUs widens most 16-bit
operations to float32, so there is little to gain there. Where the package `libtpu` is installed (no TPU is needed)
the same step is compiled for a TPU v5p as well, which has 16-bit units, as GPUs do.

    python benchmarks/memory.py --model resnet50
"""

import argparse
import importlib.util
import os
import sys
import time

import harness

POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
NAMES = ("resnet50", "bert_base", "resnet50_small", "bert_small")
FULL, SMALL = NAMES[:2], NAMES[2:]
TARGETS = ("cpu", "tpu v5p")
# Of the temporary bytes in float32: the proportion of published tables, 10 GB instead of 15.
GOAL = 0.67


def available_targets() -> list[str]:
    """Returns what this machine has a compiler for."""
    return [target for target in TARGETS if target == "cpu" or importlib.util.find_spec("libtpu")]


def sharding_for(target: str):
    """Returns where the arguments would lie: a device of `target`, `None` for the one that is there."""
    if target == "cpu":
        return None
    import jax
    from jax.experimental import topologies

    # A description of the chip; libtpu asks its environment for what only a machine with one has.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    topology = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1")
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def compile_step(name: str, policy: str, target: str) -> dict:
    """Returns what XLA says about the step of model `name`, in bytes, and the seconds that compiling took."""
    import jax
    import keras

    import mpkeras
    from memory_models import MODELS
    from mpkeras.training.step import make_train_step

    keras.utils.set_random_seed(0)
    build, load, _ = MODELS[name]
    model = build()
    mpkeras.apply_policy(model, policy)
    optimizer = keras.optimizers.Adam(1e-4)
    optimizer = mpkeras.LossScaleOptimizer(optimizer, loss_scale="dynamic" if policy == "mixed_float16" else 1.0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = make_train_step(model, optimizer, loss, jit_compile=True)
    step.optimizer.build(model.trainable_variables)
    # The step's own function and arguments: another device than the one at hand is nothing that users ask for.
    compiled_step = step._compiled
    state, data = compiled_step._inputs(*load(), None)
    sharding = sharding_for(target)

    def described(array):
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    arguments = jax.tree_util.tree_map(described, (state, *data))
    started = time.perf_counter()
    platforms = {} if target == "cpu" else {"lowering_platforms": ("tpu",)}
    function = jax.jit(compiled_step._pure_step, donate_argnums=0)
    analysis = function.trace(*arguments).lower(**platforms).compile().memory_analysis()
    return {
        "temporary_bytes": int(analysis.temp_size_in_bytes),
        "argument_bytes": int(analysis.argument_size_in_bytes),
        "seconds": time.perf_counter() - started,
    }


def measure(models: list[str], policies: list[str], targets: list[str]) -> dict:
    """Returns `{"environment", "results"}` of this process, whose Keras backend must be JAX."""
    from memory_models import MODELS

    results = []
    for name in models:
        for target in targets:
            float32_bytes = None
            for policy in policies:
                found = compile_step(name, policy, target)
                float32_bytes = found["temporary_bytes"] if policy == "float32" else float32_bytes
                result = {"model": name, "size": MODELS[name][2], "target": target, "policy": policy, **found}
                ratio = found["temporary_bytes"] / float32_bytes
                result["ratio"] = {"median": ratio, "q1": ratio, "q3": ratio}
                if name in FULL and policy != "float32":
                    result["goal_ratio"] = GOAL
                results.append(result)
                print(result, file=sys.stderr, flush=True)
    found = harness.environment()
    if "tpu v5p" in targets:
        from importlib.metadata import version

        found["versions"]["libtpu"] = version("libtpu")
    return {"environment": found, "results": results}


def table_rows(results: list[dict]) -> list[dict[str, str]]:
    """Returns the rows to print, all as text."""
    return [
        {
            "model": result["model"],
            "size": result["size"],
            "compiled for": result["target"],
            "policy": result["policy"],
            "temporary GB": f"{result['temporary_bytes'] / 1e9:.3f}",
            "arguments GB": f"{result['argument_bytes'] / 1e9:.3f}",
            "temporary, to float32": f"{result['ratio']['median']:.2f}",
            "goal": f"{result['goal_ratio']:.2f}" if "goal_ratio" in result else "",
        }
        for result in results
    ]


def write_plot(path: str, results: list[dict]) -> None:
    """Writes the ratios to float32 as bars."""
    groups, goals = {}, {}
    for result in results:
        name = f"{result['model']}\n{result['target']}"
        if result["policy"] != "float32":
            groups.setdefault(name, {})[result["policy"]] = result["ratio"]
        if "goal_ratio" in result:
            goals[name] = result["goal_ratio"]
    harness.write_bar_plot(
        path,
        groups,
        title="Temporary memory of a compiled training step",
        ylabel="bytes / bytes in float32",
        goals=goals,
    )


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", action="append", choices=NAMES, help=f"may be given more than once (default: {', '.join(FULL)})"
    )
    parser.add_argument("--policy", action="append", choices=POLICIES[1:], help="compared with float32 (default: both)")
    parser.add_argument(
        "--target", action="append", choices=TARGETS, help="to compile for (default: what is installed)"
    )
    parser.add_argument("--quick", action="store_true", help="small models and mixed_bfloat16 only")
    harness.add_options(parser)
    options = parser.parse_args(arguments)
    if options.backend and options.backend != ["jax"]:
        parser.error("--backend must be jax: the other backends tell nothing about a step that has not run")
    options.backend = ["jax"]
    options.model = options.model or list(SMALL if options.quick else FULL)
    options.policy = options.policy or (["mixed_bfloat16"] if options.quick else list(POLICIES[1:]))
    options.target = options.target or available_targets()
    if missing := set(options.target) - set(available_targets()):
        parser.error(f"--target {min(missing)} needs the package libtpu")
    return options


def main() -> int:
    options = parse_arguments()
    chosen = [argument for name in options.model for argument in ("--model", name)]
    chosen += [argument for policy in options.policy for argument in ("--policy", policy)]
    chosen += [argument for target in options.target for argument in ("--target", target)]
    return harness.run_benchmark(
        __file__,
        __doc__.splitlines()[0],
        options,
        measure=lambda backend: measure(options.model, ["float32", *options.policy], options.target),
        arguments=chosen,
        settings={"optimizer": "Adam", "step": "compiled, not run"},
        table_rows=table_rows,
        write_plot=write_plot,
    )


if __name__ == "__main__":
    sys.exit(main())
