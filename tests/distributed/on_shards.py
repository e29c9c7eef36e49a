"""Trains under each layout on devices of the host, with all that a policy or a step may be given, and on one device.

All in one process, as its start and the compiler take the time; prints what happened as JSON.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import keras
import numpy as np

import mpkeras

ROWS, WIDTH, STEPS = 16, 64, 20
# How a step is made, under which policy.
VARIANTS = {
    "float32": ("float32", {}),
    "mixed_bfloat16": ("mixed_bfloat16", {}),
    "mixed_float16": ("mixed_float16", {}),
    "small state": ("bfloat16", {}),
    "float8": ("mixed_float8", {}),
    "accumulated": ("mixed_float16", {"accumulate_steps": 2}),
    "remat": ("mixed_bfloat16", {"remat": "blocks"}),
}


def data(count):
    return keras.distribution.DataParallel(devices=keras.distribution.list_devices()[:count])


def weights(count):
    return mpkeras.sharded(devices=count)


def state(count):
    return mpkeras.sharded(devices=count, shard="state")


def model(count):
    """Batches over two, kernels and biases over the others."""
    devices = keras.distribution.list_devices()[:count]
    mesh = keras.distribution.DeviceMesh((2, count // 2), ["batch", "model"], devices)
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*kernel"] = (None, "model")
    layouts[".*bias"] = ("model",)
    return keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch")


LAYOUTS = {layout.__name__: layout for layout in (data, weights, state, model)}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS))
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS))
    parser.add_argument("--replay", nargs="*", default=[], help="layouts under which capsules are kept and run again")
    options = parser.parse_args()
    result = {}
    for variant in options.variants:
        alone = run(variant, options.devices)
        for layout in options.layouts:
            with LAYOUTS[layout](options.devices).scope():
                found = run(variant, options.devices)
                found |= {"replayed": replayed()} if layout in options.replay else {}
            for name in ("losses", "after"):
                found[name] = float(np.abs(np.subtract(found[name], alone[name]) / alone[name]).max())
            result[f"{variant}, {layout}"] = found | {"skipped_alone": alone["skipped"]}
    print("RESULT " + json.dumps(result))


def batches(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        x = rng.normal(size=(ROWS, WIDTH)).astype("float32")
        yield x, np.tanh(x[:, :16]).astype("float32")


def new_model(policy):
    keras.utils.set_random_seed(3)
    with mpkeras.policy_scope(policy):
        inputs = keras.Input((WIDTH,))
        hidden = keras.layers.BatchNormalization(name="norm")(keras.layers.Dense(WIDTH, "relu", name="first")(inputs))
        for name in ("second", "third"):
            hidden = hidden + keras.layers.Dropout(0.1)(keras.layers.Dense(WIDTH, "tanh", name=name)(hidden))
        return keras.Model(inputs, keras.layers.Dense(16, name="head")(hidden))


def new_step(variant):
    policy, options = VARIANTS[variant]
    # Low enough that no gradient overflows by chance.
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.Adam(1e-3), initial_scale=64.0)
    return mpkeras.make_train_step(new_model(policy), optimizer, "mse", **options)


def run(variant, count) -> dict:
    """Steps without faults, then one for each of the devices with infinity in a row of its own, then two without."""
    step = new_step(variant)
    losses = [float(step(x, y)["loss"]) for x, y in batches(STEPS)]
    (x, y), kept = next(batches(1)), step.model.variables + step.optimizer.inner_optimizer.variables
    is_accumulated, skipped, traces = "accumulate_steps" in VARIANTS[variant][1], [], []
    for device in range(count):
        spoiled = x.copy()
        spoiled[device * ROWS // count, 0] = np.inf
        before = [np.array(variable.value) for variable in kept]
        skipped.append(bool(step(spoiled, y)["skipped"]))
        changed = [v.path for a, v in zip(before, kept, strict=True) if (a != np.array(v.value)).any()]
        # In a window the other half may be good, and move weights.
        traces += [] if is_accumulated else changed
    after = [float(step(x, y)["loss"]) for _ in range(2)]
    return {"losses": losses, "after": after, "skipped": skipped, "traces": traces}


def replayed() -> list:
    """A step that is skipped as the last device's gradients overflow, kept by the step and in `fit`, and run again."""
    (x, y), step = next(batches(1)), new_step("mixed_float16")
    step(x, y)
    y[-1] = 1e9
    with tempfile.TemporaryDirectory() as folder:
        assert bool(step(x, y)["skipped"])
        step.capsule(Path(folder) / "step.mpk")
        again = mpkeras.load_capsule(Path(folder) / "step.mpk").run()
        net = new_model("mixed_float16")
        net.compile(keras.optimizers.Adam(1e-2), "mse")
        mpkeras.prepare(net, "mixed_float16", loss_scale=64.0)
        box = mpkeras.callbacks.BlackBox(Path(folder) / "fit")
        net.fit(x, y, batch_size=ROWS, verbose=0, callbacks=[box])
        in_fit = mpkeras.load_capsule(box.capsules[0]).run()
    return [[bool(run["skipped"]), run["same_bits"]] for run in (again, in_fit)]


if __name__ == "__main__":
    main()
