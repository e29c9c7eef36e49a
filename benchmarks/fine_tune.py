"""Do models as people fine-tune them learn in 16 bits, with every layer and every tensor in the dtype it should have?

Two models are made in float32, converted by `mpkeras.apply_policy`, and trained by `mpkeras.make_train_step` under XLA
on real data: `keras.applications.ResNet50` on crops of scikit-learn's two photographs (which of them is it?), and a
transformer in the style of KerasHub, a backbone with a task around it, on the bytes of Python's standard library
(which byte is next?). Weights are random: what is asked is how training goes, not how well it ends.

    python benchmarks/fine_tune.py --backend jax --model transformer
"""

import argparse
import logging
import sys
import time

import harness

BACKENDS = ("tensorflow", "jax")  # XLA compiles the whole step there
POLICIES = ("mixed_bfloat16", "mixed_float16")
MODELS = ("resnet50", "transformer")
BATCHES = 4  # each is seen several times, so that the loss of a few steps shows whether anything is learned


def train(name: str, policy: str, steps: int, size: int | None = None) -> dict:
    """Returns what `steps` steps of one model under one policy did.

    Args:
        name: Of a model in `fine_tune_models.MODELS`.
        policy: What it is converted to.
        steps: At least 1; a batch comes again after `BATCHES` steps.
        size: Of an example, the pixels of a crop's side or the bytes of a text; by default what the model has.
    """
    import keras

    import fine_tune_models
    import mpkeras

    keras.utils.set_random_seed(0)
    spec = fine_tune_models.MODELS[name]
    size = size or spec.size
    model = mpkeras.apply_policy(spec.build(size), policy)
    batches = spec.load(size, spec.batch_size, BATCHES)
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    step = mpkeras.make_train_step(model, keras.optimizers.Adam(spec.learning_rate), loss_fn, jit_compile=True)
    losses, skipped, seconds = [], [], []
    for i in range(steps):
        start = time.perf_counter()
        result = step(*batches[i % BATCHES])
        losses.append(float(result["loss"]))
        seconds.append(time.perf_counter() - start)
        skipped.append(bool(result["skipped"]))
    checked = fine_tune_models.dtypes(model, batches[0][0])
    return {
        "model": name,
        "policy": policy,
        "size": size,
        "batch_size": spec.batch_size,
        "params": model.count_params(),
        "loss": losses,
        "skipped": skipped,
        "loss_scale": float(result["loss_scale"]),
        "first_step_s": seconds[0],
        "step_s": harness.summarize(seconds[1:]) if steps > 1 else None,
        "layers": fine_tune_models.count(checked, "layer"),
        "tensors": fine_tune_models.count(checked, "tensor"),
        "unexpected": fine_tune_models.unexpected(checked, spec.float32_layers, policy.removeprefix("mixed_")),
    }


def measure(backend: str, models: list[str], policies: list[str], steps: int) -> dict:
    """Returns `{"environment", "results"}` of this process, whose Keras backend must be `backend`."""
    # Each model has a step of its own, which TensorFlow takes for a function traced too often.
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    results = []
    for name in models:
        for policy in policies:
            result = train(name, policy, steps)
            results.append({"backend": backend, **result})
            losses = " ".join(f"{loss:.3f}" for loss in result["loss"])
            print(f"{backend}, {name}, {policy}: loss by step {losses}", *result["unexpected"], sep="\n", flush=True)
    return {"environment": harness.environment(), "results": results}


def table_rows(results: list[dict]) -> list[dict[str, str]]:
    """Returns the rows to print, all as text."""
    return [
        {
            "backend": result["backend"],
            "model": result["model"],
            "policy": result["policy"],
            "loss, mean of the first and last passes": " -> ".join(f"{loss:.3f}" for loss in passes(result["loss"])),
            "skipped": str(sum(result["skipped"])),
            "loss scale": f"{result['loss_scale']:g}",
            "layers": _counts(result["layers"]),
            "their outputs": _counts(result["tensors"]),
            "unexpected": str(len(result["unexpected"])),
            "first step s": f"{result['first_step_s']:.1f}",
            "median ms": f"{result['step_s']['median'] * 1e3:.0f}" if result["step_s"] else "",
        }
        for result in results
    ]


def passes(losses: list[float]) -> tuple[float, float]:
    """Returns the mean loss of the first and of the last pass over the batches."""
    first, last = losses[:BATCHES], losses[-BATCHES:]
    return sum(first) / len(first), sum(last) / len(last)


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{number} {dtype}" for dtype, number in sorted(counts.items()))


def write_plot(path: str, results: list[dict]) -> None:
    """Draws the loss of every step, one line a backend, model and policy."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(result["model"] for result in results))
    figure, all_axes = plt.subplots(1, len(names), figsize=(5.5 * len(names), 4), layout="constrained", squeeze=False)
    for name, axes in zip(names, all_axes[0], strict=True):
        for result in results:
            if result["model"] == name:
                axes.plot(result["loss"], label=f"{result['backend']}, {result['policy']}")
        axes.set(title=name, xlabel="step", ylabel="loss")
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_arguments(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    harness.add_options(parser)
    parser.add_argument("--model", nargs="+", choices=MODELS, help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--policy", nargs="+", default=list(POLICIES), help=f"default: {' '.join(POLICIES)}")
    parser.add_argument("--steps", type=int, help="steps of each run (default: 20)")
    parser.add_argument("--quick", action="store_true", help="the transformer and 8 steps")
    options = parser.parse_args(arguments)
    if options.model is None:
        options.model = ["transformer"] if options.quick else list(MODELS)
    if options.steps is None:
        options.steps = 8 if options.quick else 20
    if options.steps < 1:
        parser.error(f"argument --steps: expected at least 1, received {options.steps}")
    if options.backend is None:
        options.backend = [name for name in harness.installed_backends() if name in BACKENDS]
    elif "torch" in options.backend:
        parser.error(f"argument --backend: expected one that XLA compiles for, {' or '.join(BACKENDS)}, received torch")
    return options


def main(arguments=None) -> int:
    options = parse_arguments(arguments)
    settings = {"steps": options.steps, "batches": BATCHES, "jit_compile": True}
    status = harness.run_benchmark(
        script=__file__,
        question=__doc__.splitlines()[0],
        options=options,
        measure=lambda backend: measure(backend, options.model, options.policy, options.steps),
        arguments=["--model", *options.model, "--policy", *options.policy, "--steps", str(options.steps)],
        settings=settings,
        table_rows=table_rows,
        write_plot=write_plot,
    )
    return status


if __name__ == "__main__":
    sys.exit(main())
