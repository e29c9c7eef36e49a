"""How long does a first `fit` take, and the next one, beside stock Keras?

Every fit is in a fresh interpreter, four batches long: tracing and compiling take the time. `keras` is stock Keras
under `mixed_bfloat16`, `mpkeras` the same program behind `mpkeras.set_global_policy`. A second `fit` of the same model
has nothing to compile. The ratios are those of one round.

    python benchmarks/first_fit.py --backend tensorflow --rounds 5
"""

import argparse
import json
import sys

import harness

VARIANTS = ("keras", "mpkeras")
MODELS = ("transformer", "mobilenet")

# Runs in the fresh interpreter; prints one line, after whatever the imports print.
FIT = """
import json, sys, time
import keras
import numpy as np
from keras import layers

variant, name = sys.argv[1:]
if variant == "mpkeras":
    import mpkeras
    mpkeras.set_global_policy("mixed_bfloat16")
else:
    keras.config.set_dtype_policy("mixed_bfloat16")

class Block(layers.Layer):
    def __init__(self):
        super().__init__()
        self.first, self.second = layers.LayerNormalization(), layers.LayerNormalization()
        self.attention = layers.MultiHeadAttention(4, 16)
        self.wide, self.narrow = layers.Dense(256, activation="gelu"), layers.Dense(64)

    def build(self, shape):
        for layer in (self.first, self.second, self.wide):
            layer.build(shape)
        self.attention.build(shape, shape)
        self.narrow.build((*shape[:-1], 256))

    def call(self, x):
        y = self.first(x)
        x = x + self.attention(y, y, use_causal_mask=True)
        return x + self.narrow(self.wide(self.second(x)))

if name == "transformer":
    tokens = keras.Input((32,), dtype="int32")
    x = layers.Embedding(500, 64)(tokens)
    for _ in range(6):
        x = Block()(x)
    model = keras.Model(tokens, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))
    x = np.random.default_rng(0).integers(0, 500, (64, 32))
else:
    model = keras.applications.MobileNetV2((64, 64, 3), weights=None, classes=10, classifier_activation=None)
    x = np.random.default_rng(0).normal(size=(64, 64, 64, 3)).astype("float32")
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
times_ms = []
for _ in range(2):
    start = time.perf_counter()
    model.fit(x, np.arange(64) % 10, batch_size=16, verbose=0)
    times_ms.append((time.perf_counter() - start) * 1e3)
print(json.dumps(times_ms))
"""


def fits_in_process(variant: str, model: str, backend: str) -> list[float]:
    """Returns the milliseconds of the first and of the second `fit` of a model in a fresh interpreter."""
    done = harness.run_fresh(FIT, [variant, model], backend)
    if done.returncode:
        raise RuntimeError(f"Expected '{model}' to train with {variant} on {backend}. Received:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(backend: str, models, rounds: int) -> dict:
    """Returns `{"environment", "results"}`: the times of both variants, round by round in another order."""
    results = []
    for model in models:
        orders = harness.round_orders(list(VARIANTS), rounds)
        fits = [{variant: fits_in_process(variant, model, backend) for variant in order} for order in orders]
        for number, part in enumerate(("first fit", "second fit")):
            times_ms = {variant: [times[variant][number] for times in fits] for variant in VARIANTS}
            for variant, compared in harness.compare(times_ms, "keras").items():
                results.append({"backend": backend, "model": model, "part": part, "variant": variant, **compared})
    return {"environment": harness.environment(), "results": results}


def table_rows(results: list[dict]) -> list[dict[str, str]]:
    """Returns the rows to print, all as text."""
    labels = ("backend", "model", "part", "variant")
    return [{label: result[label] for label in labels} | harness.summary_cells(result) for result in results]


def write_plot(path: str, results: list[dict]) -> None:
    """Writes the ratios of the first `fit` as bars."""
    groups: dict = {}
    for result in results:
        if result["part"] == "first fit":
            groups.setdefault(f"{result['backend']}\n{result['model']}", {})[result["variant"]] = result["ratio"]
    harness.write_bar_plot(path, groups, title="A first `fit` beside stock Keras", ylabel="ratio of times")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, metavar="N", help="interpreters of each (default: 5; with --quick: 1)")
    parser.add_argument("--model", action="append", choices=MODELS, help="repeatable (default: both)")
    parser.add_argument("--quick", action="store_true", help="one round of the transformer")
    harness.add_options(parser)
    options = parser.parse_args(arguments)
    options.rounds = (1 if options.quick else 5) if options.rounds is None else options.rounds
    options.model = options.model or (["transformer"] if options.quick else list(MODELS))
    if options.rounds < 1:
        parser.error("--rounds must be 1 or more")
    return options


def main() -> int:
    options = parse_arguments()
    chosen = [word for model in options.model for word in ("--model", model)]
    return harness.run_benchmark(
        __file__,
        __doc__.splitlines()[0],
        options,
        measure=lambda backend: measure(backend, options.model, options.rounds),
        arguments=["--rounds", str(options.rounds), *chosen],
        settings={"rounds": options.rounds},
        table_rows=table_rows,
        write_plot=write_plot,
    )


if __name__ == "__main__":
    sys.exit(main())
