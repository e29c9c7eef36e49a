"""Do models of KerasHub train in 16 bits through mpkeras?

Each backbone or task, small and with random weights, learns one batch by heart under float32 and both 16-bit policies,
through `prepare`. What is looked at: whether all is finite, whether the loss falls as far as in float32, whether
`audit` finds more than notes, whether LoRA layers learn, and whether the file that `save` writes predicts the same
bits. A check that raises holds the error. Needs `pip install "mpkeras[hub]"`.

    python benchmarks/hub.py --backend torch --model BERT
"""

import argparse
import os
import sys
import tempfile
import time
import warnings

import harness

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
CHECKS = ("finite", "learns", "audit", "lora", "saving")
QUICK = ("BERT", "ViT")
NAMES = (
    "BERT",
    "GPT-2",
    "Llama",
    "Gemma",
    "T5",
    "Whisper",
    "ViT",
    "ResNet",
    "SAM",
    "Stable Diffusion 3 transformer",
    "Stable Diffusion 3 VAE",
)
RATE, LORA_RATE = 3e-3, 1e-2
# How far the loss has to fall, as a share of what it falls in float32.
AS_FAR = 0.9


def prepared(name: str, policy: str, lora: bool = False):
    """Returns a model under `policy`, with its batch; with `lora` only low-rank parts of its layers are trained.

    Raises:
        NotImplementedError: If it has no layer that LoRA knows.
    """
    import keras

    import hub_models
    import mpkeras
    from mpkeras.conversion.plan import layers_of

    keras.utils.set_random_seed(7)
    model, x, y = hub_models.MODELS[name]()
    if lora:
        layers = [layer for layer in layers_of(model) if takes_lora(layer)]
        if not layers:
            raise NotImplementedError
        for layer in layers_of(model):
            if layer in layers:
                layer.enable_lora(2)
            elif not any(part is not layer for part in layers_of(layer)):
                layer.trainable = False
    # XLA takes most of the time on TensorFlow; a graph shows the same.
    model.compile(
        keras.optimizers.Adam(LORA_RATE if lora else RATE),
        hub_models.loss_of(y),
        jit_compile=keras.backend.backend() == "jax",
    )
    mpkeras.prepare(model, policy)
    return model, x, y


def takes_lora(layer) -> bool:
    import keras

    return isinstance(layer, (keras.layers.Dense, keras.layers.EinsumDense)) and len(layer.kernel.shape) <= 3


def losses_of(model, x, y, steps: int) -> list[float]:
    """Returns the loss of each step on the one batch that there is."""
    return [float(model.train_on_batch(x, y, return_dict=True)["loss"]) for _ in range(steps)]


def same_bits_from_a_file(model, x):
    """Returns whether the model that `model.save` writes predicts what `model` does, or by how much it differs."""
    import keras
    import numpy as np

    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.keras")
        model.save(path)
        # The task compiles itself in a way of its own, which Keras cannot read from a file.
        loaded = keras.models.load_model(path, compile=False)
    ours, theirs = (keras.tree.flatten(one.predict_on_batch(x)) for one in (model, loaded))
    if all(np.array_equal(a, b, equal_nan=True) for a, b in zip(ours, theirs, strict=True)):
        return True
    pairs = [(a.astype("float32"), b.astype("float32")) for a, b in zip(ours, theirs, strict=True)]
    difference = max(float(np.abs(a - b).max()) for a, b in pairs)
    largest = max(float(np.abs(a).max()) for a, _ in pairs)
    return f"no: predictions of up to {largest:.3g} differ by up to {difference:.2g}"


def checked(name: str, policy: str, steps: int, float32_losses: list[float] | None) -> dict:
    """Returns what one model did under one policy: its losses, and for each of `CHECKS` "yes", "no: ..." or "–"."""
    import keras
    import numpy as np

    import mpkeras

    found: dict = {}

    def check(label, function):
        try:
            answer = function()
        except NotImplementedError:
            answer = "–"
        except Exception as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            answer = f"no: {type(error).__name__}: {' '.join(lines)[:300]}"
        found[label] = answer if isinstance(answer, str) else ("yes" if answer else "no")

    def is_finite():
        found["model"] = model, x, y = prepared(name, policy)
        found["losses"] = losses_of(model, x, y, steps)
        outputs = keras.tree.flatten(model.predict_on_batch(x))
        found["skipped_steps"] = int(model.optimizer.skipped_steps)
        values = [*outputs, *(keras.ops.convert_to_numpy(v.value) for v in model.trainable_variables)]
        return bool(np.isfinite(found["losses"]).all()) and all(np.isfinite(value).all() for value in values)

    def learns():
        losses = found["losses"]
        fallen = losses[0] - losses[-1]
        wanted = fallen if float32_losses is None else AS_FAR * (float32_losses[0] - float32_losses[-1])
        if fallen > 0 and fallen >= wanted:
            return True
        return f"no: from {losses[0]:.4g} to {losses[-1]:.4g}, {wanted:.4g} was wanted"

    def audit():
        report = mpkeras.audit(found["model"][0], found["model"][1])
        # That 16 bits do not pay on this machine is no fault of the model.
        more = [f for f in report.findings if f.severity != "note" and "pay" not in f.what and "slower" not in f.what]
        return True if not more else f"no: {more[0]}"[:400]

    def lora():
        model, x, y = prepared(name, policy, lora=True)
        losses = losses_of(model, x, y, steps)
        return bool(np.isfinite(losses).all()) and losses[-1] < losses[0]

    check("finite", is_finite)
    for label, function in (
        ("learns", learns),
        ("audit", audit),
        ("lora", lora),
        ("saving", lambda: same_bits_from_a_file(*found["model"][:2])),
    ):
        check(label, function)
    found.pop("model", None)
    return found


def measure(backend: str, options) -> dict:
    """Returns the environment and the results of one backend, in a process in which it is active."""
    import keras_hub

    results = []
    for name in options.model:
        float32_losses = None
        for policy in POLICIES:
            begin = time.perf_counter()
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                found = checked(name, policy, options.steps, float32_losses)
            if policy == "float32":
                float32_losses = found.get("losses")
            ours = sorted({str(w.message)[:300] for w in warned if "mpkeras" in w.filename})
            result = {"backend": backend, "model": name, "policy": policy, **found, "warnings": ours}
            results.append(result)
            cells = " ".join(f"{label}={found[label]}" for label in CHECKS)
            print(
                f"{backend} {name} {policy}: {cells} ({time.perf_counter() - begin:.0f} s)", file=sys.stderr, flush=True
            )
    environment = harness.environment()
    environment["versions"]["keras_hub"] = keras_hub.__version__
    return {"environment": environment, "results": results}


def table_rows(results: list[dict]) -> list[dict[str, str]]:
    """Returns the rows of the table: one a model, policy and backend."""
    rows = []
    for result in results:
        losses = result.get("losses")
        row = {"model": result["model"], "backend": result["backend"], "policy": result["policy"]}
        row["loss"] = f"{losses[0]:.3g} to {losses[-1]:.3g}" if losses else ""
        row["skipped"] = str(result.get("skipped_steps", ""))
        rows.append(row | {label: result[label].partition(":")[0] for label in CHECKS})
    return rows


def write_plot(path: str, results: list[dict]) -> None:
    """Writes how far each loss falls, as a share of where it starts."""
    groups: dict = {}
    for result in results:
        if result.get("losses"):
            share = result["losses"][-1] / result["losses"][0]
            group = groups.setdefault(f"{result['model']}\n{result['backend']}", {})
            group[result["policy"]] = {"median": share, "q1": share, "q3": share}
    harness.write_bar_plot(path, groups, title="Loss after training, as a share of the first", ylabel="share")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=NAMES, help="may be given more than once (default: all)")
    parser.add_argument("--steps", type=int, metavar="N", help="on the one batch (default: 20; with --quick: 8)")
    parser.add_argument("--quick", action="store_true", help=f"{' and '.join(QUICK)} only, and fewer steps")
    harness.add_options(parser)
    options = parser.parse_args(arguments)
    options.model = options.model or list(QUICK if options.quick else NAMES)
    options.steps = (8 if options.quick else 20) if options.steps is None else options.steps
    if options.steps < 2:
        parser.error("--steps must be 2 or more")
    return options


def main() -> int:
    options = parse_arguments()
    return harness.run_benchmark(
        __file__,
        __doc__.splitlines()[0],
        options,
        measure=lambda backend: measure(backend, options),
        arguments=["--steps", str(options.steps), *(text for name in options.model for text in ("--model", name))],
        settings={"steps": options.steps, "rate": RATE},
        table_rows=table_rows,
        write_plot=write_plot,
    )


if __name__ == "__main__":
    sys.exit(main())
