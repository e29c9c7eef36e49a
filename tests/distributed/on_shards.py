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
    parser.add_argument("--variants", nargs="+", default=[])
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS))
    parser.add_argument("--replay", nargs="*", default=[], help="layouts under which capsules are kept and run again")
    parser.add_argument("--parts", nargs="+", default=[], choices=list(PARTS), help="and do these")
    options = parser.parse_args()
    result = {part: PARTS[part]() for part in options.parts}
    for variant in options.variants:
        alone = run(step_of(variant), options.devices)
        for layout in options.layouts:
            with LAYOUTS[layout](options.devices).scope():
                found = run(step_of(variant), options.devices)
                found |= {"replayed": replayed()} if layout in options.replay else {}
            result[f"{variant}, {layout}"] = compared(found, alone)
    print("RESULT " + json.dumps(result))


def compared(found, alone) -> dict:
    """Returns what was found with the largest difference from one device in place of the losses."""
    differences = {name: difference(found[name], alone[name]) for name in ("losses", "after")}
    return {**found, **differences, "skipped_alone": alone["skipped"]}


def difference(found, expected) -> float:
    return float(np.abs(np.subtract(found, expected) / expected).max())


def batches(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        x = rng.normal(size=(ROWS, WIDTH)).astype("float32")
        yield x, np.tanh(x[:, :16]).astype("float32")


def with_bad_row(x, y, row):
    x = x.copy()
    x[row, 0] = np.inf
    return x, y


def new_model(policy):
    keras.utils.set_random_seed(3)
    with mpkeras.policy_scope(policy):
        inputs = keras.Input((WIDTH,))
        hidden = keras.layers.BatchNormalization(name="norm")(keras.layers.Dense(WIDTH, "relu", name="first")(inputs))
        for name in ("second", "third"):
            hidden = hidden + keras.layers.Dropout(0.1)(keras.layers.Dense(WIDTH, "tanh", name=name)(hidden))
        return keras.Model(inputs, keras.layers.Dense(16, name="head")(hidden))


def new_step(model, rate, loss="mse", **options):
    # Low enough that no gradient overflows by chance.
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.Adam(rate), initial_scale=64.0)
    return mpkeras.make_train_step(model, optimizer, loss, **options)


def step_of(variant):
    policy, options = VARIANTS[variant]
    return new_step(new_model(policy), 1e-3, **options)


def run(step, count, batches=batches, with_bad_row=with_bad_row) -> dict:
    """Steps without faults, then one for each of the devices with infinity in a row of its own, then two without."""
    losses = [float(step(*batch)["loss"]) for batch in batches(STEPS)]
    (x, y), kept = next(batches(1)), step.model.variables + step.optimizer.inner_optimizer.variables
    is_accumulated, skipped, traces = step.optimizer.window is not None, [], []
    for device in range(count):
        before = [np.array(variable.value) for variable in kept]
        skipped.append(bool(step(*with_bad_row(x, y, device * ROWS // count))["skipped"]))
        changed = [v.path for a, v in zip(before, kept, strict=True) if (a != np.array(v.value)).any()]
        # In a window the other half may be good, and move weights.
        traces += [] if is_accumulated else changed
    after = [float(step(x, y)["loss"]) for _ in range(2)]
    return {"losses": losses, "after": after, "skipped": skipped, "traces": traces}


def replayed() -> list:
    """A step that is skipped as the last device's gradients overflow, kept by the step and in `fit`, and run again."""
    (x, y), step = next(batches(1)), step_of("mixed_float16")
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


# ------------------------------------------------------------------- words: an embedding, a convolution and a loop


LENGTH, WORDS = 6, 40


def model_of_words(policy):
    keras.utils.set_random_seed(3)
    with mpkeras.policy_scope(policy):
        ids = keras.Input((LENGTH,))
        hidden = keras.layers.Embedding(WORDS, 32)(ids)
        hidden = keras.layers.Conv1D(64, 3, padding="same", activation="gelu")(hidden)
        hidden = keras.layers.LSTM(32, return_sequences=True)(keras.layers.BatchNormalization()(hidden))
        return keras.Model(ids, keras.layers.Dense(WORDS)(keras.layers.Dropout(0.1)(hidden)))


def loss_of_words():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def step_of_words(policy="float32"):
    return new_step(model_of_words(policy), 1e-2, loss_of_words())


def batches_of_words(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield rng.integers(0, WORDS, (ROWS, LENGTH)).astype("float32"), rng.integers(0, WORDS, (ROWS, LENGTH))


def with_bad_weights(x, y, row):
    weights_of_words = np.ones((ROWS, LENGTH), "float32")
    weights_of_words[row, 0] = np.inf
    return x, y, weights_of_words


def words() -> dict:
    """The steps of `run` and a `fit` on eight devices, which hold parts of weights and slots, and on one."""
    how = {"count": 8, "batches": batches_of_words, "with_bad_row": with_bad_weights}
    alone, result = run(step_of_words(), **how), {}
    for layout in (weights, state):
        with layout(8).scope():
            step = step_of_words()
            result[layout.__name__] = compared(run(step, **how), alone) | {"share": share(step)}
    with weights(8).scope():
        fitted = words_in_fit()
    return {**result, "fit": difference(fitted, words_in_fit())}


def words_in_fit() -> list:
    model = model_of_words("float32")
    model.compile(keras.optimizers.Adam(1e-2), loss_of_words())
    mpkeras.prepare(model, "float32", loss_scale=64.0)
    x, y = map(np.concatenate, zip(*batches_of_words(STEPS), strict=True))
    found = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: found.append(float(logs["loss"])))
    model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=[note])
    return found


def share(step) -> float:
    """Bytes on the first device, of those of one that has all."""
    variables = step.model.variables + step.optimizer.variables
    first = sum(variable.value.addressable_shards[0].data.nbytes for variable in variables)
    return first / sum(variable.value.nbytes for variable in variables)


def resumed() -> dict:
    """Ten steps on four devices; ten more on four, two and one from what the first ten left."""
    (x, y), result = zip(*batches_of_words(20), strict=True), {}
    for policy in ("float32", "mixed_float16"):
        with weights(4).scope():
            step = step_of_words(policy)
            for i in range(10):
                step(x[i], y[i])
            state_of_four = step.state_dict()
        for count in (4, 2, 1):
            with weights(count).scope():
                again = step_of_words(policy)
                again.model.build((ROWS, LENGTH))
                again.load_state_dict(state_of_four)
                scale = [float(again.optimizer.loss_scale), int(again.optimizer.step_counter.value)]
                losses = [float(again(x[i], y[i])["loss"]) for i in range(10, 20)]
            result[f"{policy} {count}"] = {"losses": losses, "scale": scale}
    return result


class AddsConvolvedTable(keras.layers.Layer):
    """Adds a convolution of a table of its own, which has no batch."""

    def build(self, shape):
        self.table = self.add_weight(shape=(1, *shape[1:]), name="table")
        self.convolution = keras.layers.Conv2D(shape[-1], 3, padding="same")
        self.convolution.build((1, *shape[1:]))

    def call(self, inputs):
        return inputs + self.convolution(self.table)


def convolutions() -> float:
    """Every kind of convolution, on four devices and on one, computed again and not: the largest difference."""

    def train(distribution, remat):
        keras.distribution.set_distribution(distribution)
        keras.utils.set_random_seed(5)
        images = keras.Input((8, 8, 4))
        hidden = AddsConvolvedTable()(images)
        hidden = keras.layers.SeparableConv2D(4, 3, padding="same")(hidden)
        hidden = keras.layers.DepthwiseConv2D(3, padding="same", dilation_rate=2)(hidden)
        hidden = keras.layers.Conv2D(8, 3, strides=2, groups=4)(hidden)
        hidden = keras.layers.Flatten()(keras.layers.Conv2DTranspose(4, 3)(hidden))
        model = mpkeras.apply_policy(keras.Model(images, keras.layers.Dense(2)(hidden)), "mixed_float16")
        optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=64.0)
        step = mpkeras.make_train_step(model, optimizer, "mse", remat=remat)
        rng = np.random.default_rng(1)
        batches = [(rng.normal(size=(8, 8, 8, 4)).astype("float32"), rng.normal(size=(8, 2))) for _ in range(8)]
        losses = [float(step(x, y)["loss"]) for x, y in batches]
        keras.distribution.set_distribution(None)
        return losses

    alone = train(None, None)
    pairs = [(layout(4), remat) for layout in (data, weights) for remat in (None, [keras.layers.Conv2D])]
    return max(float(np.abs(np.subtract(train(*pair), alone)).max()) for pair in pairs)


PARTS = {"words": words, "resumed": resumed, "convolutions": convolutions}


if __name__ == "__main__":
    main()
