"""Trains a model in parts on eight devices of the host, and on one; prints what happened as JSON.

The devices have to be there before JAX does anything, so the tests run this as a program.
"""

import argparse
import json
import os

os.environ["KERAS_BACKEND"] = "jax"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import keras
import numpy as np

import mpkeras

DEVICES = keras.distribution.list_devices()
ROWS, WIDTH, WORDS = 16, 6, 40


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policies", nargs="+", default=[], help="train under these on eight devices and on one")
    parser.add_argument("--parts", nargs="+", default=[], choices=["resumed", "convolutions"], help="and do these")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    parts = {"resumed": resumed, "convolutions": convolutions}
    result = {name: parts[name]() for name in options.parts}
    for policy in options.policies:
        alone = losses_of(made(policy, None), options.steps)
        for shard in ("weights", "state"):
            with on_devices(8, shard):
                step = made(policy, shard)
                losses = losses_of(step, options.steps)
                result[f"{policy} {shard}"] = {
                    "difference": largest(losses, alone),
                    "share": share(step),
                    **faults(step),
                }
        with on_devices(8, "weights"):
            fitted = in_fit(policy, options.steps)
        keras.distribution.set_distribution(None)
        result[f"{policy} fit"] = {"difference": largest(fitted, in_fit(policy, options.steps))}
    print("RESULT " + json.dumps(result))


def largest(found, expected) -> float:
    """Returns the largest difference."""
    return float(np.abs(np.subtract(found, expected)).max())


def on_devices(count, shard):
    return mpkeras.sharded(devices=count, shard=shard).scope()


def new_model(policy):
    keras.utils.set_random_seed(3)
    with mpkeras.policy_scope(policy):
        ids = keras.Input((WIDTH,))
        hidden = keras.layers.Embedding(WORDS, 32)(ids)
        hidden = keras.layers.Conv1D(64, 3, padding="same", activation="gelu")(hidden)
        hidden = keras.layers.BatchNormalization()(hidden)
        # JAX makes no orthogonal matrix in bfloat16.
        initializer = "glorot_uniform" if policy == "bfloat16" else "orthogonal"
        hidden = keras.layers.LSTM(32, return_sequences=True, recurrent_initializer=initializer)(hidden)
        return keras.Model(ids, keras.layers.Dense(WORDS)(keras.layers.Dropout(0.1)(hidden)))


def loss():
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def made(policy, shard, optimizer=None):
    model = new_model(policy)
    # Low enough that no gradient overflows by chance.
    optimizer = mpkeras.LossScaleOptimizer(optimizer or keras.optimizers.Adam(1e-2), initial_scale=64.0)
    return mpkeras.make_train_step(model, optimizer, loss())


def batches(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield rng.integers(0, WORDS, (ROWS, WIDTH)).astype("float32"), rng.integers(0, WORDS, (ROWS, WIDTH))


def losses_of(step, count) -> list:
    return [float(step(x, y)["loss"]) for x, y in batches(count)]


def in_fit(policy, count) -> list:
    model = new_model(policy)
    model.compile(keras.optimizers.Adam(1e-2), loss())
    mpkeras.prepare(model, policy, loss_scale=64.0)
    x, y = map(np.concatenate, zip(*batches(count), strict=True))
    found = []
    note = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: found.append(float(logs["loss"])))
    model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=[note])
    return found


def variables_of(step):
    return step.model.variables + step.optimizer.variables


def share(step) -> float:
    """Bytes on the first device, of those of one that has all."""
    first = sum(variable.value.addressable_shards[0].data.nbytes for variable in variables_of(step))
    return first / sum(variable.value.nbytes for variable in variables_of(step))


def faults(step) -> dict:
    """Spoils a row of each device in turn: a row of infinities in the weights of its examples."""
    (x, y), found = next(batches(1)), []
    kept = step.model.variables + step.optimizer.inner_optimizer.variables
    for device in range(8):
        weights = np.ones((ROWS, WIDTH), "float32")
        weights[device * ROWS // 8, 0] = np.inf
        before = [np.array(variable.value) for variable in kept]
        skipped = bool(step(x, y, weights)["skipped"])
        same = all((a == np.array(v.value)).all() for a, v in zip(before, kept, strict=True))
        found.append(skipped and same)
    return {"skipped_without_trace": found}


def resumed() -> dict:
    """Ten steps on four devices; ten more on four, two and one from what the first ten left."""
    (x, y), result = zip(*batches(20), strict=True), {}
    for policy in ("float32", "mixed_float16"):
        with on_devices(4, "weights"):
            step = made(policy, "weights")
            for i in range(10):
                step(x[i], y[i])
            state = step.state_dict()
        for count in (4, 2, 1):
            with on_devices(count, "weights"):
                again = made(policy, "weights", keras.optimizers.Adam(1e-2))
                again.model.build((ROWS, WIDTH))
                again.load_state_dict(state)
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
    distributions = keras.distribution.DataParallel(devices=DEVICES[:4]), mpkeras.sharded(devices=4)
    pairs = [(distribution, remat) for distribution in distributions for remat in (None, [keras.layers.Conv2D])]
    return max(largest(train(*pair), alone) for pair in pairs)


if __name__ == "__main__":
    assert jax.device_count() == 8
    main()
