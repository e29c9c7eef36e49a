"""What does a step that computes again cost, and hold, on this CPU, beside torch's own memory budget?

A causal transformer trains in float32 with Adam: `mpkeras.make_train_step` with each `remat`, on TensorFlow in a graph
and under XLA, and on torch. JAX is left out: its XLA finds on a CPU what is computed twice, and computes it once. On
torch the same transformer in plain modules stands beside it under `torch.compile` with
`torch._functorch.config.activation_memory_budget` from 1 to 0: the compiler keeps decomposed operations apart
(`aot_eager_decomp_partition`), so that its partitioner is compared and not its kernels. Times are processor time on one
thread, in interleaved rounds, which other work on the machine hardly changes. `peak` is what torch's allocator held at
the most in one step beyond weights and optimizer, by its profiler, while Python collects no garbage (what lies in
cycles of references is free at some later time only); `collected` is the same while Python collects whenever it likes.
TensorFlow's allocator on a CPU does not tell.

    python benchmarks/remat_time.py --rounds 10 --json benchmarks/results/remat_time.json
"""

import argparse
import gc
import logging
import os
import sys
import time

import harness
from gpu.cases import Case, TransformerSizes, make_batches

CASES = {
    # Most of what its step holds are activations.
    "transformer": Case("decoder", 16, 1e-4, TransformerSizes(256, 128, 4, 6, 500, None)),
    "tiny": Case("decoder", 2, 1e-4, TransformerSizes(8, 16, 2, 2, 50, None)),
}
REMATS = (None, "products", "blocks")
BUDGETS = (1.0, 0.8, 0.5, 0.2, 0.0)
MODES = {"tensorflow": (("tensorflow graph", False), ("tensorflow XLA", True)), "torch": (("torch eager", False),)}
COMPILER = "aot_eager_decomp_partition"


def our_step(case: Case, remat, jit_compile: bool):
    """Returns one training step of mpkeras on a fixed batch; it returns the loss as a float."""
    import keras

    import mpkeras
    from gpu import keras_models

    keras.utils.set_random_seed(0)
    step = mpkeras.make_train_step(
        keras_models.build(case),
        keras.optimizers.Adam(case.learning_rate),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=jit_compile,
        remat=remat,
    )
    ((x, y),) = make_batches(case, 1)
    x, y = keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y)
    return lambda: float(step(x, y)["loss"])


def torch_step(case: Case, budget: float | None):
    """Returns one training step of plain torch on a fixed batch: op by op, or compiled with a memory budget."""
    import torch
    import torch._functorch.config as settings
    from torch.nn import functional

    from gpu import torch_models

    torch.manual_seed(0)
    model = torch_models.build(case)
    optimizer = torch.optim.Adam(model.parameters(), lr=case.learning_rate)
    ((x, y),) = make_batches(case, 1)
    x, y = torch.from_numpy(x), torch.from_numpy(y).long()

    def loss_of(x, y):
        return functional.cross_entropy(model(x).flatten(0, -2), y.flatten())

    def compiler(graph, inputs):
        # One for each budget: with the same one torch takes the program of another budget for this one.
        with settings.patch(activation_memory_budget=budget):
            return torch._dynamo.lookup_backend(COMPILER)(graph, inputs)

    run = loss_of if budget is None else torch.compile(loss_of, backend=compiler)

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss = run(x, y)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def peak_bytes_of(step, *, collects: bool = False) -> int:
    """Returns what torch's allocator held at the most during a step, beyond what it held before.

    Args:
        step: Runs it.
        collects: Whether Python may collect garbage meanwhile, which it does after so many new objects.
    """
    import torch

    gc.collect()
    if not collects:
        gc.disable()
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            step()
    finally:
        gc.enable()
    held = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


def measure(backend: str, name: str, rounds: int) -> dict:
    """Returns `{"environment", "results"}` of this process, whose Keras backend must be `backend`."""
    # Each variant is a function of its own, which TensorFlow takes for a function traced too often.
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    _on_one_thread(backend)
    case, results = CASES[name], []
    for mode, jit_compile in MODES[backend]:
        groups = [(mode, {f"remat {remat}": our_step(case, remat, jit_compile) for remat in REMATS})]
        if backend == "torch":
            budgets = {f"budget {budget:g}": torch_step(case, budget) for budget in BUDGETS}
            groups.append(("plain torch", {"op by op": torch_step(case, None), **budgets}))
        for title, steps in groups:
            losses = {variant: step() for variant, step in steps.items()}
            times_ms = harness.time_interleaved(steps, rounds, wait=lambda result: None, clock=time.process_time)
            everything = next(iter(steps))
            for variant, summary in harness.compare(times_ms, baseline=everything).items():
                result = {"mode": title, "model": name, "variant": variant, "batch_size": case.batch_size, **summary}
                result["first_loss"] = losses[variant]
                if backend == "torch":
                    result["peak_bytes"] = peak_bytes_of(steps[variant])
                    result["collected_peak_bytes"] = peak_bytes_of(steps[variant], collects=True)
                results.append(result)
                print(result, file=sys.stderr, flush=True)
    return {"environment": harness.environment(), "results": results}


def _on_one_thread(backend):
    if backend == "torch":
        import torch

        torch.set_num_threads(1)
    else:
        import tensorflow as tf

        tf.config.threading.set_intra_op_parallelism_threads(1)
        tf.config.threading.set_inter_op_parallelism_threads(1)


def table_rows(results: list[dict]) -> list[dict[str, str]]:
    """Returns the rows to print, all as text."""
    first = {}
    for result in results:
        first.setdefault(result["mode"], result)
    rows = []
    for result in results:

        def peak(key, result=result):
            if key not in result:
                return ""
            return f"{result[key] / 1e6:.1f} ({result[key] / first[result['mode']][key]:.2f})"

        rows.append(
            {
                "step": result["mode"],
                "variant": result["variant"],
                **harness.summary_cells(result),
                "peak MB": peak("peak_bytes"),
                "collected": peak("collected_peak_bytes"),
            }
        )
    return rows


def write_plot(path: str, results: list[dict]) -> None:
    """Writes the ratios of the times as bars."""
    groups: dict = {}
    for result in results:
        groups.setdefault(result["mode"], {})[result["variant"]] = result["ratio"]
    harness.write_bar_plot(path, groups, title="What it costs to compute again", ylabel="time / first variant")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each variant (default: 5)")
    parser.add_argument("--model", choices=tuple(CASES), default="transformer")
    parser.add_argument("--quick", action="store_true", help="the tiny model, one round")
    harness.add_options(parser)
    options = parser.parse_args(arguments)
    if options.backend and "jax" in options.backend:
        parser.error("--backend must be tensorflow or torch: on a CPU JAX' XLA computes once what is computed again")
    options.backend = options.backend or [name for name in MODES if name in harness.installed_backends()]
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    if options.quick:
        options.rounds, options.model = 1, "tiny"
    return options


def main() -> int:
    options = parse_arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    return harness.run_benchmark(
        __file__,
        __doc__.splitlines()[0],
        options,
        measure=lambda backend: measure(backend, options.model, options.rounds),
        arguments=["--rounds", str(options.rounds), "--model", options.model],
        settings={"optimizer": "Adam", "policy": "float32", "clock": "processor time, one thread"},
        table_rows=table_rows,
        write_plot=write_plot,
    )


if __name__ == "__main__":
    sys.exit(main())
