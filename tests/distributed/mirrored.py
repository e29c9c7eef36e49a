"""One MirroredStrategy run on logical CPUs, in a process of its own: prints what happened as JSON.

Logical devices must be made before TensorFlow does anything else, so the tests run this as a program.
"""

import argparse
import json
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--bad-replica", type=int, default=-1)
    parser.add_argument("--bad", choices=["input", "gradient"], default="input")
    parser.add_argument("--against", choices=["keras", "mpkeras"], default="mpkeras")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--jit", action="store_true")
    parser.add_argument("--no-batchnorm", action="store_true")
    parser.add_argument("--callback", action="store_true")
    options = parser.parse_args()

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * options.replicas)
    import keras
    import numpy as np

    keras.utils.set_random_seed(0)
    rows = 4 if options.replicas < 4 else 8
    per_replica = rows // options.replicas
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2 * rows, 4)).astype("float32")
    y = rng.normal(size=(2 * rows, 1)).astype("float32")
    if options.bad_replica >= 0:
        # the second batch is spoiled, on one replica
        row = rows + options.bad_replica * per_replica
        if options.bad == "input":
            x[row, 0] = np.inf
        else:
            # the loss stays finite; times the scale its gradient is beyond float16
            y[row] = 1e5

    if options.replicas > 1:
        strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(options.replicas)])
    else:
        strategy = tf.distribute.get_strategy()
    if options.against == "keras":
        keras.config.set_dtype_policy("mixed_float16")
    with strategy.scope():
        inputs = keras.Input((4,))
        hidden = inputs if options.no_batchnorm else keras.layers.BatchNormalization(dtype="float32")(inputs)
        hidden = keras.layers.Dense(8, kernel_initializer=keras.initializers.GlorotUniform(3))(hidden)
        outputs = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(4))(hidden)
        model = keras.Model(inputs, outputs)
        optimizer = keras.optimizers.SGD(0.1)
        if options.against == "keras":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0**10)
        model.compile(optimizer, "mse", run_eagerly=options.eager, jit_compile=False)
        if options.against == "mpkeras":
            from mpkeras.policies.loss_scaling import DynamicLossScale
            from mpkeras.training.prepare import prepare

            # Low enough that no gradient overflows by chance.
            rule = DynamicLossScale(2.0**10)
        if options.against == "mpkeras" and not options.callback:
            prepare(model, "mixed_float16", loss_scale=rule, jit_compile=True if options.jit else None)
    callbacks = []
    if options.callback:
        # Outside the strategy's scope, as a user would.
        from mpkeras.callbacks import MixedPrecision

        callbacks = [MixedPrecision("mixed_float16", loss_scale=rule)]
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(rows)
    first = data.take(1)
    model.fit(first, verbose=0, callbacks=callbacks)
    before = [np.array(v) for v in model.trainable_variables]
    model.fit(data.skip(1), verbose=0, callbacks=callbacks)
    optimizer = model.optimizer
    local = strategy.experimental_local_results(optimizer.dynamic_scale.value)
    result = {
        "weights_unchanged": all(
            (np.array(v) == b).all() for v, b in zip(model.trainable_variables, before, strict=True)
        ),
        "weights_finite": all(np.isfinite(np.array(v)).all() for v in model.trainable_variables),
        "state_finite": all(np.isfinite(np.array(v)).all() for v in model.non_trainable_variables),
        "scales": [float(v) for v in local],
        "weights": [np.array(v).tolist() for v in model.trainable_variables],
    }
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
