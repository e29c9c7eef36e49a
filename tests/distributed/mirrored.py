"""Short runs under a MirroredStrategy on logical CPUs, all in one process: prints what happened as JSON.

Logical devices must be made before TensorFlow does anything else, so the tests run this as a program.
"""

import argparse
import json
import os
import sys

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Keras imports them wherever they are installed, which takes longer than much of what is trained here.
sys.modules.update(dict.fromkeys(("matplotlib", "sklearn")))

import tensorflow as tf  # noqa: E402

REPLICAS = 2
# What is spoiled, on which replica, and how the model is trained.
RUNS = {
    **{f"{bad} {replica}": {"bad": bad, "bad_replica": replica} for bad in ("input", "gradient") for replica in (0, 1)},
    "callback": {"bad": "input", "bad_replica": 1, "with_callback": True},
    "xla": {"bad": "input", "bad_replica": 1, "jit_compile": True},
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("runs", nargs="+", choices=list(RUNS))
    parser.add_argument("--against", choices=["keras", "mpkeras"], default="mpkeras")
    options = parser.parse_args()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * REPLICAS)

    result = {}
    for name in options.runs:
        try:
            result[name] = train(options.against, **RUNS[name])
        except ValueError as error:
            result[name] = str(error)
    print("RESULT " + json.dumps(result))


def train(against, bad, bad_replica, *, with_callback=False, jit_compile=None) -> dict:
    """Trains on two batches, of which the second is spoiled on one replica."""
    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    rows = 4
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2 * rows, 4)).astype("float32")
    y = rng.normal(size=(2 * rows, 1)).astype("float32")
    row = rows + bad_replica * rows // REPLICAS
    if bad == "input":
        x[row, 0] = np.inf
    else:
        # the loss stays finite; times the scale its gradient is beyond float16
        y[row] = 1e5

    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(REPLICAS)])
    if against == "keras":
        keras.config.set_dtype_policy("mixed_float16")
    with strategy.scope():
        inputs = keras.Input((4,))
        hidden = keras.layers.BatchNormalization(dtype="float32")(inputs)
        hidden = keras.layers.Dense(8, kernel_initializer=keras.initializers.GlorotUniform(3))(hidden)
        outputs = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(4))(hidden)
        model = keras.Model(inputs, outputs)
        optimizer = keras.optimizers.SGD(0.1)
        if against == "keras":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**10)
        model.compile(optimizer, "mse", jit_compile=False)
        if against == "mpkeras":
            from mpkeras.policies.loss_scaling import DynamicLossScale
            from mpkeras.training.prepare import prepare

            # Low enough that no gradient overflows by chance.
            rule = DynamicLossScale(2.0**10)
        if against == "mpkeras" and not with_callback:
            prepare(model, "mixed_float16", loss_scale=rule, jit_compile=jit_compile)
    callbacks = []
    if with_callback:
        # Outside the strategy's scope, as a user would.
        from mpkeras.callbacks import MixedPrecision

        callbacks = [MixedPrecision("mixed_float16", loss_scale=rule)]
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(rows)
    model.fit(data.take(1), verbose=0, callbacks=callbacks)
    before = [np.array(v) for v in model.trainable_variables]
    model.fit(data.skip(1), verbose=0, callbacks=callbacks)
    local = strategy.experimental_local_results(model.optimizer.dynamic_scale.value)
    return {
        "weights_unchanged": all(
            (np.array(v) == b).all() for v, b in zip(model.trainable_variables, before, strict=True)
        ),
        "weights_finite": all(np.isfinite(np.array(v)).all() for v in model.trainable_variables),
        "state_finite": all(np.isfinite(np.array(v)).all() for v in model.non_trainable_variables),
        "scales": [float(v) for v in local],
    }


if __name__ == "__main__":
    main()
