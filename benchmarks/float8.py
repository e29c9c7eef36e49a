"""How many products are in float8 in the program for an H100, and does a model learn as well with them?

Two parts. `products` compiles the training steps of three models for an H100 that need not be there, each under
`mixed_bfloat16`, under `mixed_float8`, and as plain Keras makes it by `model.quantize("float8")`, and counts the
products by dtype; needs `pip install "mpkeras[forecast]"`. `quality` trains three tasks with five seeds each: a seed
gives the same first weights and the same order of the data to all policies.

The goals, and the rule of `small_state_quality.py`, were written before any result: at least 95 % of the FLOPs that the
layers ask for in float8 are in float8; temporaries no larger than those of `mixed_bfloat16`; and a mean quality that is
no worse than float32's by more than the larger of two standard errors of the difference and the task's tolerance.

    python benchmarks/float8.py --json benchmarks/results/float8.json
"""

import argparse
import dataclasses
import json
import os
from pathlib import Path

import harness
from small_state_quality import cells

PARTS = ("products", "quality")
PRODUCT_KINDS = ("mixed_bfloat16", "stock float8", "mixed_float8")
QUALITY_KINDS = ("float32", "mixed_bfloat16", "mixed_float8")
GOAL_SHARE = 0.95
TINY = {"mlp": (64, 3, 32), "transformer": (64, 2, 32), "bert_base": None}


def build(name: str, is_tiny: bool):
    """Returns a model and the shape and dtype of its inputs: an MLP, a transformer, or BERT-base."""
    import keras
    from keras import layers

    from gpu import keras_models
    from gpu.cases import case_of

    if name == "bert_base":
        case = case_of("bert_base", is_tiny)
        model = keras_models.build(case)
        return model, keras.KerasTensor((case.batch_size, *model.inputs[0].shape[1:]), model.inputs[0].dtype)
    width, depth, batch = TINY[name] if is_tiny else {"mlp": (4096, 9, 4096), "transformer": (1024, 4, 16)}[name]
    if name == "mlp":
        hidden = [layers.Dense(width, activation="relu") for _ in range(depth)]
        model = keras.Sequential([keras.Input((width,)), *hidden, layers.Dense(1024)], name="mlp")
        return model, keras.KerasTensor((batch, width), "float32")
    length = 32 if is_tiny else 512
    codes = keras.Input((length,), dtype="int32")
    x = layers.Embedding(1024, width)(codes)
    for _ in range(depth):
        x = layers.LayerNormalization()(x + layers.MultiHeadAttention(width // 64, 64)(x, x, use_causal_mask=True))
        x = layers.LayerNormalization()(x + layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(x)))
    model = keras.Model(codes, layers.Dense(1024)(x), name="transformer")
    return model, keras.KerasTensor((batch, length), "int32")


def count_products(name: str, kind: str, is_tiny: bool) -> dict:
    """Returns what is in the program of one training step for an H100."""
    import keras

    import mpkeras

    keras.utils.clear_session()
    is_stock = kind == "stock float8"
    with mpkeras.policy_scope("mixed_bfloat16" if is_stock else "float32"):
        model, x = build(name, is_tiny)
    if is_stock:
        model.quantize("float8")
    policy = mpkeras.get_policy("mixed_bfloat16" if is_stock else kind)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    report = mpkeras.forecast(model, x, device="h100", policies=[policy], optimizer="adam", loss=loss, verbose=0)
    found = report.policies[policy.name]
    kept = ("products", "matrix_flops", "float8", "persistent_bytes", "temporary_bytes", "conditionals")
    return {"model": name, "kind": kind, **{key: found[key] for key in kept}}


def with_shares(results: list[dict]) -> list[dict]:
    """Returns the counts with the share of the float8 FLOPs asked for, the temporaries of bfloat16's, and the goals.

    What plain Keras asks for is what `mixed_float8` does: the same layers, but the first and the last one, too.
    """
    by_kind = {(result["model"], result["kind"]): result for result in results}
    found = []
    for result in results:
        ours, bfloat16 = (by_kind.get((result["model"], kind)) for kind in ("mixed_float8", "mixed_bfloat16"))
        added: dict = {}
        if result["kind"] != "mixed_bfloat16" and ours is not None:
            asked_for = ours["float8"]["flops"]
            added["float8_share"] = min(1.0, result["matrix_flops"].get("float8", 0) / asked_for)
        if bfloat16 is not None and result is not bfloat16:
            added["temporary_share"] = result["temporary_bytes"] / bfloat16["temporary_bytes"]
        if result["kind"] == "mixed_float8":
            added |= {"goal_float8_share": GOAL_SHARE, "goal_temporary_share": 1.0}
        found.append(result | added)
    return found


def product_rows(results: list[dict]) -> list[dict[str, str]]:
    def share(result, key):
        return f"{result[key]:.2f}" if key in result else ""

    return [
        {
            "model": result["model"],
            "step": result["kind"],
            "products": ", ".join(f"{n} {dtype}" for dtype, n in result["products"].items()),
            "asked for in float8": str(result["float8"]["products"]) if result["float8"] else "",
            "of their FLOPs in float8": share(result, "float8_share"),
            "temporary GiB": f"{result['temporary_bytes'] / 2**30:.2f}",
            "of bfloat16's": share(result, "temporary_share"),
        }
        for result in with_shares(results)
    ]


def quality_tasks(is_tiny: bool) -> dict:
    """Returns the tasks: the demo's two, made smaller, and ConvNeXt-Tiny, whose pointwise products are `Dense`."""
    import keras

    import small_state_tasks as tasks

    def conv_next():
        model = keras.applications.ConvNeXtTiny(
            input_shape=(tasks.SIDE, tasks.SIDE, 3), weights=None, classes=8, include_preprocessing=False
        )
        for layer in model.layers:
            # They begin with 1e-6: in so few steps nothing would come of the blocks, in float8 or not.
            if type(layer).__name__ == "LayerScale":
                layer.gamma.assign(keras.ops.full(layer.gamma.shape, 0.2))
        return model

    patches = dataclasses.replace(
        tasks.TASKS["patches"],
        title="ConvNeXt-Tiny of keras.applications on patches of two photographs",
        build=tasks.TASKS["patches"].build if is_tiny else conv_next,
        epochs=5,
    )
    found = {name: tasks.TASKS[name] for name in ("digits", "text")} | {"patches": patches}
    return {
        name: dataclasses.replace(task, epochs=2, steps_per_epoch=2) if is_tiny else task
        for name, task in found.items()
    }


# Adam's: those of `small_state_quality.py`; of ConvNeXt the first that learned in float32, with a seed of its own.
PEAKS = {"digits": 3e-3, "text": 1e-2, "patches": 3e-4}


def train(task, peak: float, kind: str, seed: int) -> float:
    """Returns the quality that a model of `task` reaches."""
    import keras

    import mpkeras
    import small_state_tasks as tasks

    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    model = task.build()
    metrics = ["accuracy"] if task.quality_name == "held-out accuracy" else []
    model.compile(keras.optimizers.Adam(), task.loss(), metrics=metrics, jit_compile=True)
    if kind != "float32":
        mpkeras.prepare(model, kind)
    rates = [tasks.learning_rate(peak, epoch, task.epochs) for epoch in range(task.epochs)]
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rates[epoch])
    x, y, x_held_out, y_held_out = task.load()
    options = {"batch_size": task.batch_size, "epochs": task.epochs, "steps_per_epoch": task.steps_per_epoch}
    keras.utils.set_random_seed(seed)
    model.fit(x, y, callbacks=[schedule], verbose=0, **options)
    return task.quality(model.evaluate(x_held_out, y_held_out, batch_size=128, verbose=0, return_dict=True))


def quality_rows(runs: list[dict], facts: dict) -> list[dict[str, str]]:
    rows: dict = {}
    for entry in cells(runs, facts):
        row = rows.setdefault(entry["task"], {"task": entry["task"], **dict.fromkeys(QUALITY_KINDS, "")})
        mark = "" if entry.get("inside", True) else " *"
        row[entry["kind"]] = f"{entry['mean']:.4f} ± {entry['sd']:.4f}{mark}"
    return list(rows.values())


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    option = parser.add_argument
    option("--part", action="append", choices=PARTS, help="may be repeated (default: both)")
    option("--model", action="append", choices=tuple(TINY), help="of the products; may be repeated (default: all)")
    option("--task", action="append", choices=tuple(PEAKS), help="of the quality; may be repeated (default: all)")
    option("--seeds", type=int, default=5, metavar="N", help="runs of each task and policy (default: 5)")
    option("--quick", action="store_true", help="tiny models and four steps a run: shows that it runs")
    option("--json", type=Path, help="write the results here, and keep those that are there")
    options = parser.parse_args(arguments)
    os.environ.setdefault("KERAS_BACKEND", "jax")
    parts = options.part or PARTS
    found: dict = {"products": [], "quality": []}
    if options.json and options.json.exists():
        found = {part: json.loads(options.json.read_text())[part] for part in PARTS}
    tasks = quality_tasks(options.quick)
    facts = {name: {k: getattr(t, k) for k in ("higher_is_better", "tolerance")} for name, t in tasks.items()}

    def write():
        if options.json:
            judged = {"products": with_shares(found["products"]), "quality": found["quality"]}
            judged["cells"] = cells(found["quality"], facts)
            harness.write_json(options.json, {"environment": harness.environment(), **judged})

    done = {(result["model"], result["kind"]) for result in found["products"]}
    for name in options.model or TINY if "products" in parts else ():
        for kind in PRODUCT_KINDS:
            if (name, kind) not in done:
                found["products"].append(count_products(name, kind, options.quick))
                write()
    done = {(run["task"], run["kind"], run["seed"]) for run in found["quality"]}
    for name in options.task or PEAKS if "quality" in parts else ():
        for seed in range(options.seeds):
            for kind in QUALITY_KINDS:
                if (name, kind, seed) not in done:
                    quality = train(tasks[name], PEAKS[name], kind, seed)
                    run = {"task": name, "optimizer": "adam", "kind": kind, "seed": seed, "quality": quality}
                    found["quality"].append(run)
                    write()
                    print(f"{name}, {kind}, seed {seed}: {quality:.4f}", flush=True)
    if found["products"]:
        harness.print_table(product_rows(found["products"]), "Products of a training step in the program for an H100")
    if found["quality"]:
        title = "Quality; * is not inside float32's spread"
        harness.print_table(quality_rows(found["quality"], facts), title)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
