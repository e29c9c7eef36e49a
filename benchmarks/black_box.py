"""Does the file of a failed step give the same bits again, and the right operation, and what does it cost?

Trains models drawn by a seed, with one fault each, until a step is skipped; loads the capsule, runs the step again and
asks for the first operation. Each fault knows which operation it is: a fault counts as right where its side, its
operation and, where there is one, the line of code are named. Then the callback's cost in a `fit` without a failure,
as a ratio within a round, and the bytes and seconds of one capsule. Whoever trains a model again to compare bits should
do so on the machine where the file was written: other processors add in another order.

    python benchmarks/black_box.py --backend torch --faults 300
    python benchmarks/black_box.py --faults 300 --rounds 0 --log faults.jsonl --minutes 20  # until all are in it
"""

import argparse
import collections
import itertools
import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

import harness
from models import MODES

# The most that the callback may cost without a failure, and the shares that should be reached.
GOAL, GOAL_BITS, GOAL_OPERATION = 1.01, 1.0, 0.99
# Of these doors every eighth fault, as a compiler takes seconds for each; all others run op by op.
COMPILED_EVERY = 8
NAMES = {
    "cast": {"Cast", "convert_element_type", "_to_copy"},
    # Keras' product on torch's CPU is of float32 numbers, and cast afterwards.
    "matmul": {"MatMul", "BatchMatMulV2", "dot_general", "mm", "addmm", "_to_copy"},
    "log": {"Log", "log"},
    "exp": {"Exp", "exp"},
    "multiply": {"Mul", "mul", "mul_"},
    "divide": {"RealDiv", "div", "div_"},
    "root": {"SqrtGrad", "div"},
    "nothing": {None},
}
# By name: the side, the operation, and the line of code that must be named, where there is one.
FAULTS = {
    "nan in the inputs": ("batch", "nothing", None),
    "inf in the labels": ("batch", "nothing", None),
    "inputs beyond float16": ("forward", "cast", None),
    "product beyond float16": ("forward", "matmul", None),
    "logarithm of zero": ("forward", "log", "ops.log("),
    "exponential": ("forward", "exp", "ops.exp("),
    "division in the loss": ("forward", "divide", "by_zero"),
    "gradient of a product": ("backward", "multiply", "* factor"),
    "slope of a root": ("backward", "root", "ops.sqrt("),
}


def fault_layers():
    """Returns the layers and the loss that faults need, by name; after `KERAS_BACKEND` is chosen."""
    import keras
    from keras import ops

    class Log(keras.layers.Layer):
        def call(self, inputs):
            zeros = ops.abs(inputs) * 0.0
            return inputs + ops.log(zeros)

    class Exp(keras.layers.Layer):
        def call(self, inputs):
            large = ops.abs(inputs) + 100.0
            return ops.exp(large)

    class Steep(keras.layers.Layer):
        def call(self, inputs):
            factor = ops.cast(3000.0, inputs.dtype)
            return inputs + (inputs - ops.stop_gradient(inputs)) * factor

    class Root(keras.layers.Layer):
        def call(self, inputs):
            zeros = inputs * 0.0
            return inputs + ops.sqrt(zeros)

    def by_zero(y, y_pred):
        return ops.mean(ops.square(y - y_pred), axis=-1) / (ops.abs(ops.mean(y, axis=-1)) * 0.0)

    return {"Log": Log, "Exp": Exp, "Steep": Steep, "Root": Root, "by_zero": by_zero}


def draw(seed: int, own: dict):
    """Returns `(name, model, x, y, loss, loss_scale)` of the fault number `seed`."""
    import keras
    import numpy as np
    from keras import layers

    rng = np.random.default_rng(seed)
    keras.utils.set_random_seed(seed)
    name = list(FAULTS)[seed % len(FAULTS)]
    needs_float16 = name in ("inputs beyond float16", "product beyond float16", "gradient of a product")
    policy = "mixed_float16" if needs_float16 else str(rng.choice(["mixed_float16", "mixed_bfloat16", "float32"]))
    width, examples = 8, 4
    with_own = {
        "logarithm of zero": lambda: own["Log"](dtype="float32"),
        "exponential": lambda: own["Exp"](dtype="float32"),
        "gradient of a product": lambda: own["Steep"](),
        "slope of a root": lambda: own["Root"](dtype="float32"),
    }
    keras.config.set_dtype_policy(policy)
    try:
        first = layers.Dense(width, kernel_initializer="ones" if name == "product beyond float16" else "glorot_uniform")
        kinds = [
            lambda: layers.Dense(width, str(rng.choice(["relu", "tanh", "gelu"]))),
            lambda: layers.Dropout(0.2),
            lambda: layers.LayerNormalization(),
            lambda: layers.BatchNormalization(),
        ]
        middle = [kinds[i]() for i in rng.integers(len(kinds), size=rng.integers(1, 4))]
        if name in with_own:
            middle.insert(int(rng.integers(len(middle) + 1)), with_own[name]())
        model = keras.Sequential([keras.Input((6,)), first, *middle, layers.Dense(3)], name="drawn")
    finally:
        keras.config.set_dtype_policy("float32")
    x = rng.normal(size=(examples, 6)).astype("float32")
    y = rng.normal(size=(examples, 3)).astype("float32")
    scale = 1.0
    if name == "nan in the inputs":
        x[rng.integers(examples), rng.integers(6)] = np.nan
    elif name == "inf in the labels":
        y[rng.integers(examples), rng.integers(3)] = np.inf
    elif name == "inputs beyond float16":
        x[rng.integers(examples)] *= 1e6
    elif name == "product beyond float16":
        x = np.abs(x) * 15000 + 10000
    elif name == "gradient of a product":
        # The gradients behind the layer are some hundreds, and those before it a thousand times as large.
        scale = 2.0**10
    return name, model, x, y, own["by_zero"] if name == "division in the loss" else "mse", scale


def fail(seed: int, own: dict, path: str, is_compiled: bool) -> str | None:
    """Trains until fault number `seed` has its capsule at `path`; returns its name, `None` if it was not skipped."""
    import keras

    import mpkeras

    name, model, x, y, loss, scale = draw(seed, own)
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.Adam(1e-3), loss_scale=scale)
    if seed % 2:
        step = mpkeras.make_train_step(model, optimizer, loss, jit_compile=is_compiled)
        if not bool(step(x, y)["skipped"]):
            return None
        step.capsule(path)
        return name
    model.compile(optimizer, loss, run_eagerly=not is_compiled, jit_compile=is_compiled)
    box = mpkeras.callbacks.BlackBox(os.path.dirname(path), keep=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(x, y, batch_size=len(x), verbose=0, callbacks=[mpkeras.callbacks.MixedPrecision(), box])
    if not box.capsules:
        return None
    os.replace(box.capsules[0], path)
    return name


def try_fault(seed: int, own: dict, folder: str) -> dict:
    """Returns whether fault number `seed` gave the same bits again and the right operation; `None` if not skipped."""
    import keras

    import mpkeras

    path = os.path.join(folder, "capsule.mpk")
    name = fail(seed, own, path, keras.backend.backend() != "torch" and seed % COMPILED_EVERY == 0)
    tried = {"backend": keras.backend.backend(), "seed": seed, "fault": name}
    if name is not None:
        capsule = mpkeras.load_capsule(path, custom_objects=own)
        run, found = capsule.run(), capsule.first_operation()
        side, operation, line = FAULTS[name]
        is_right = found is not None and found.side == side and found.name in NAMES[operation]
        is_right = is_right and (line is None or line in (found.line or ""))
        tried |= {"same_bits": run["same_bits"], "right": is_right, "found": repr(found)}
    keras.utils.clear_session()
    return tried


def measure_faults(number: int, first: int = 0, log: str | None = None, minutes: float | None = None) -> list[dict]:
    """Returns the shares over so many faults, by kind and in all, and what was wrong with the others.

    Args:
        number: How many.
        first: The seed of the first one.
        log: A file with a line for each fault that was tried, which need not exist. Those in it are not tried again.
        minutes: Where given, no fault is begun after so many.
    """
    import keras

    lines = Path(log).read_text().splitlines() if log is not None and os.path.exists(log) else []
    seeds = range(first, first + number)
    all_tried = [tried for tried in map(json.loads, lines) if tried["backend"] == keras.backend.backend()]
    all_tried = [tried for tried in all_tried if tried["seed"] in seeds]
    known = {tried["seed"] for tried in all_tried}
    own = fault_layers()
    end = None if minutes is None else time.monotonic() + 60 * minutes
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            if seed in known:
                continue
            if end is not None and time.monotonic() > end:
                break
            all_tried.append(try_fault(seed, own, folder))
            if log is not None:
                with open(log, "a") as file:
                    file.write(json.dumps(all_tried[-1]) + "\n")
    return shares_of(all_tried)


def shares_of(all_tried: list[dict]) -> list[dict]:
    """Returns an entry for each kind of fault and one for all that were skipped, from what `try_fault` returned."""
    counts = collections.defaultdict(collections.Counter)
    misses = []
    for tried in all_tried:
        if tried["fault"] is None:
            counts["not skipped"]["faults"] += 1
            continue
        for key in (tried["fault"], "all"):
            counts[key].update(faults=1, same_bits=tried["same_bits"], right=tried["right"])
        if not (tried["same_bits"] and tried["right"]):
            misses.append({key: tried[key] for key in ("seed", "fault", "same_bits", "found")})
    results = []
    for name, counted in sorted(counts.items(), key=lambda item: item[0] == "all"):
        result = {"part": name, "faults": counted["faults"], "variant": "replay"}
        if name != "not skipped":
            shares = {key: counted[key] / counted["faults"] for key in ("same_bits", "right")}
            result |= {"same_bits_share": shares["same_bits"], "right_share": shares["right"]}
        if name == "all":
            result |= {"goal_same_bits_share": GOAL_BITS, "goal_right_share": GOAL_OPERATION, "misses": misses}
        results.append(result)
    return results


def measure_cost(backend: str, model: str, batch_sizes: list[int], rounds: int, steps: int) -> list[dict]:
    """Returns what the callback costs a step of `fit` in which nothing is skipped."""
    from monitor_overhead import DISPLAYS, EPOCHS, make_fit

    folder = tempfile.mkdtemp()
    made_by = {"BlackBox": lambda mpkeras: mpkeras.callbacks.BlackBox(folder)}
    results = []
    for (mode, jit_compile), (display, verbose), batch_size in itertools.product(MODES[backend], DISPLAYS, batch_sizes):
        variants = ("bare", "bare again", "BlackBox")
        fits = {v: make_fit(model, v, jit_compile, steps, verbose, made_by, batch_size)[0] for v in variants}
        times_ms = harness.time_interleaved(fits, rounds, wait=harness.wait_for_device, warm_up=1)
        times_ms = {variant: [ms / (EPOCHS * steps) for ms in values] for variant, values in times_ms.items()}
        for variant, summary in harness.compare(times_ms, baseline="bare").items():
            result = {"part": "cost", "mode": mode, "model": model, "batch_size": batch_size, "display": display}
            result |= {"variant": variant, **summary}
            results.append({**result, "goal_ratio": GOAL} if variant == "BlackBox" else result)
    return results


def measure_file(parameters: int) -> dict:
    """Returns the bytes of one capsule of a model with Adam, and the seconds to write, load and run it."""
    import keras
    import numpy as np

    import mpkeras

    width = int((parameters / 2) ** 0.5)
    model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(width), keras.layers.Dense(width)])
    step = mpkeras.make_train_step(model, "adam", "mse", jit_compile=False)
    step(np.full((32, width), np.nan), np.zeros((32, width)))
    with tempfile.TemporaryDirectory() as folder:
        path, seconds = os.path.join(folder, "capsule.mpk"), []
        for _ in range(2):
            # In the first one Keras imports all backends that are installed, to know what it writes a model of.
            start = time.perf_counter()
            size = step.capsule(path)
            seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        capsule = mpkeras.load_capsule(path)
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
        capsule.run()
        seconds.append(time.perf_counter() - start)
    names = ("first_write_seconds", "write_seconds", "load_seconds", "run_seconds")
    return {"part": "file", "params": model.count_params(), "variant": "capsule", "bytes": size} | dict(
        zip(names, seconds, strict=True)
    )


def measure(backend: str, options: argparse.Namespace) -> dict:
    """Returns `{"environment", "results"}` of this process, whose Keras backend must be `backend`."""
    results = []
    if options.faults:
        results += measure_faults(options.faults, log=options.log, minutes=options.minutes)
        results.append(measure_file(options.params))
    if options.rounds:
        results += measure_cost(backend, options.model, options.batch, options.rounds, options.steps)
    return {"environment": harness.environment(), "results": [{"backend": backend, **result} for result in results]}


def table_rows(results: list[dict]) -> list[dict[str, str]]:
    """Returns the rows to print, all as text."""
    rows = []
    for result in results:
        row = {"backend": result["backend"], "what": result["part"], "measured": "", "goal": ""}
        if "same_bits_share" in result:
            shares = f"same bits {result['same_bits_share']:.1%}, right operation {result['right_share']:.1%}"
            row["measured"] = f"{result['faults']} faults: {shares}"
            row["goal"] = "100 %, 99 %" if "goal_right_share" in result else ""
        elif result["part"] == "file":
            times = ", ".join(
                f"{key.removesuffix('_seconds').replace('_', ' ')} {result[key]:.2f} s"
                for key in result
                if key.endswith("_seconds")
            )
            row["measured"] = f"{result['params']:,} parameters: {result['bytes']:,} bytes; {times}"
        elif result["part"] == "cost":
            row["what"] = f"cost, {result['mode']}, {result['display']}, {result['variant']}"
            ratio, step = result["ratio"], f"{result['time_ms']['median']:.1f} ms"
            row["measured"] = f"{ratio['median']:.3f} ({ratio['q1']:.3f} - {ratio['q3']:.3f}), {step}"
            row["measured"] += f", {result['model']}, batch {result['batch_size']}"
            row["goal"] = f"{result['goal_ratio']:.2f}" if "goal_ratio" in result else ""
        else:
            row["measured"] = f"{result['faults']} faults"
        rows.append(row)
    return rows


def write_plot(path: str, results: list[dict]) -> None:
    """Writes the shares as bars."""
    groups = {}
    for result in results:
        if "same_bits_share" in result:
            shares = {"same bits": result["same_bits_share"], "right operation": result["right_share"]}
            bars = {name: {"median": share, "q1": share, "q3": share} for name, share in shares.items()}
            groups[f"{result['backend']}\n{result['part']}"] = bars
    harness.write_bar_plot(path, groups, title="A failed step, run again from its file", ylabel="share of the faults")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Returns the options, checked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--faults", type=int, metavar="N", help="faults to draw; 0 leaves them out (default: 300; with --quick: 18)")
    option("--log", metavar="FILE", help="add a line for each fault that was tried, and go on behind those in it")
    option("--minutes", type=float, metavar="M", help="begin no fault after so many, on each backend (default: no end)")
    option(
        "--rounds", type=int, metavar="N", help="timed calls of `fit` of each variant; 0 leaves them out (default: 12)"
    )
    option("--steps", type=int, metavar="N", help="steps an epoch of them (default: 50; with --quick: 15)")
    option(
        "--params", type=int, metavar="N", help="of the model of one capsule (default: 10,000,000; --quick: 100,000)"
    )
    option("--model", choices=("cnn", "transformer", "mlp"), default="cnn", help="of the timed `fit` (default: cnn)")
    option(
        "--batch", type=int, action="append", metavar="N", help="of it; may be given more than once (default: 32, 256)"
    )
    option("--quick", action="store_true", help="fewer faults and rounds, a smaller file")
    harness.add_options(parser)
    options = parser.parse_args(arguments)
    defaults = {"faults": (300, 18), "rounds": (12, 3), "steps": (50, 15), "params": (10_000_000, 100_000)}
    for name, values in defaults.items():
        if getattr(options, name) is None:
            setattr(options, name, values[options.quick])
        least = 0 if name in ("faults", "rounds") else 1
        if getattr(options, name) < least:
            parser.error(f"--{name} must be {least} or more")
    options.batch = options.batch or ([32] if options.quick else [32, 256])
    if min(options.batch) < 1 or (options.minutes or 1) <= 0:
        parser.error("--batch must be 1 or more, --minutes above 0")
    return options


def main() -> int:
    options = parse_arguments()
    names = ("faults", "rounds", "steps", "params", "model")
    more = [text for size in options.batch for text in ("--batch", str(size))]
    more += [
        text
        for name in ("log", "minutes")
        if getattr(options, name)
        for text in (f"--{name}", str(getattr(options, name)))
    ]
    return harness.run_benchmark(
        __file__,
        __doc__.splitlines()[0],
        options,
        measure=lambda backend: measure(backend, options),
        arguments=[text for name in names for text in (f"--{name}", str(getattr(options, name)))] + more,
        settings={name: getattr(options, name) for name in (*names, "batch")},
        table_rows=table_rows,
        write_plot=write_plot,
    )


if __name__ == "__main__":
    sys.exit(main())
