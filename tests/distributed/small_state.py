"""Trains on several devices with small weights and slots, and prints whether all devices round alike.

Gradients are whole numbers, whose sums are exact in any order: one step is then bit for bit that of one device.
"""

import json
import os
import sys

DEVICES = 4
if os.environ["KERAS_BACKEND"] == "jax":
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={DEVICES}"

import keras  # noqa: E402
import numpy as np  # noqa: E402

import mpkeras  # noqa: E402

X = np.random.default_rng(0).integers(-3, 4, size=(16, 8)).astype("float32")
BAD = np.where(np.arange(16)[:, None] == 13, np.inf, X).astype("float32")


class Sum(keras.losses.Loss):
    """A loss whose gradient to the outputs is 1."""

    def __init__(self):
        super().__init__(reduction="sum")

    def call(self, y_true, y_pred):
        return keras.ops.sum(keras.ops.cast(y_pred, "float32"), axis=-1)


def model_of():
    keras.utils.set_random_seed(1)
    kernel = keras.initializers.RandomUniform(-2.0, 2.0, seed=3)
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, kernel_initializer=kernel, name="dense")])


def trained(inputs):
    model = model_of()
    # A rate at which nearly every weight has to be rounded.
    model.compile(keras.optimizers.SGD(0.001, momentum=0.9, weight_decay=0.001), Sum(), jit_compile=JIT)
    # No rule: the one layer makes the outputs, and has small weights all the same.
    mpkeras.prepare(model, mpkeras.Policy("bfloat16", keep_float32=()))
    for x in inputs:
        model.fit(x, np.zeros((16, 16)), batch_size=16, verbose=0)
    if keras.backend.backend() == "jax":
        model.jax_state_sync()
    return model


def variables(model):
    return [v for v in [*model.weights, *model.optimizer.inner_optimizer.variables] if "float" in v.dtype]


def bits(value):
    return np.asarray(value).tobytes().hex()


def copies(variable):
    """Returns the values of a variable on each device; of one that is split, the one value."""
    if keras.backend.backend() == "jax":
        shards = variable.value.addressable_shards
        return [bits(s.data) for s in shards] if all(s.data.shape == variable.shape for s in shards) else []
    return [bits(copy) for copy in STRATEGY.experimental_local_results(variable.value)]


def main():
    one = [bits(v.numpy()) for v in variables(trained([X]))]
    with SCOPE():
        first, clean, skipped = trained([X]), trained([X, X]), trained([X, BAD, X])
    of_step = [v.dtype for v in variables(first)]
    result = {
        "dtypes": sorted(set(of_step)),
        "copies": [len(set(copies(v))) for v in variables(clean)],
        "like_one_device": [bits(v.numpy()) for v in variables(first)] == one,
        "moved": bool(
            np.any(first.weights[0].numpy() != model_of().weights[0].numpy().astype(first.weights[0].numpy().dtype))
        ),
        "no_trace": [bits(v.numpy()) for v in variables(clean)] == [bits(v.numpy()) for v in variables(skipped)],
        "skipped": int(skipped.optimizer.skipped_steps.numpy()),
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    import contextlib
    import warnings

    warnings.simplefilter("ignore")
    JIT = keras.backend.backend() == "jax"
    if sys.argv[1] == "mirrored":
        import tensorflow as tf

        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES)
        STRATEGY = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(DEVICES)])
        SCOPE = STRATEGY.scope
    else:
        devices = keras.distribution.list_devices()
        if sys.argv[1] == "data_parallel":
            distribution = keras.distribution.DataParallel(devices=devices)
        else:
            mesh = keras.distribution.DeviceMesh((2, 2), ["batch", "model"], devices)
            layout_map = keras.distribution.LayoutMap(mesh)
            layout_map["dense/kernel"] = (None, "model")
            distribution = keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")

        @contextlib.contextmanager
        def SCOPE():
            with distribution.scope():
                yield

    main()
