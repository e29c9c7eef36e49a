"""Sums gradients over two replicas in 16 bits; prints what happened as JSON.

Logical devices must be made before TensorFlow does anything else, so the tests run this as a program.
"""

import json
import os

os.environ["KERAS_BACKEND"] = "tensorflow"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import tensorflow as tf


def main():
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    result = {
        # 1 + 2^-12 is 1 in float16, whose numbers beside 1 are 2^-10 apart.
        "rounded": one_step(strategy, [1.0, 2.0**-12], "float16"),
        "as_they_are": one_step(strategy, [1.0, 2.0**-12], None),
        # Both are finite in float16; their sum is beyond its 65504.
        "overflow": one_step(strategy, [40000.0, 40000.0], "float16"),
        "no_overflow": one_step(strategy, [40000.0, 40000.0], "bfloat16"),
        "inf_on_one": one_step(strategy, [1.0, float("inf")], "float16"),
        "eager": one_step(strategy, [1.0, 2.0], "float16", eager=True),
        "clipped_sum": one_step(strategy, [24.0, 40.0], "float16", clipnorm=4.0),
        "sparse": sparse_step(strategy),
        "accumulated": one_step(strategy, [8.0, 16.0], "float16", steps=2),
        "one_device": one_step(tf.distribute.get_strategy(), [4.0], "float16"),
        "weights": {name: train(strategy, name) for name in ("float16", "bfloat16", "none")},
        "unscaled": unscaled(strategy),
        "small": {str(dtype): small_weight(strategy, dtype) for dtype in (None, "float32", "bfloat16")},
    }
    print("RESULT " + json.dumps(result))


def make(strategy, dtype, value, steps=None, **options):
    import keras

    import mpkeras

    with strategy.scope():
        variable = keras.Variable(value)
        inner_optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=steps, **options)
        optimizer = mpkeras.LossScaleOptimizer(inner_optimizer, initial_scale=8.0, all_reduce_dtype=dtype)
        optimizer.build([variable])
    return variable, optimizer


def one_step(strategy, scaled_grads, dtype, eager=False, steps=None, **options) -> dict:
    """Replica k has `scaled_grads[k]`, at a scale of 8; the variable starts at 0, and the learning rate is 1."""
    variable, optimizer = make(strategy, dtype, [0.0], steps, **options)

    def step():
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        optimizer.scale_loss(tf.ones(()))
        optimizer.apply([tf.gather(tf.constant(scaled_grads), [index])], [variable])

    run = strategy.run if eager else tf.function(strategy.run)
    for _ in range(steps or 1):
        run(step)
    return {"value": [float(part[0]) for part in parts(variable)], "scale": float(optimizer.loss_scale)}


def small_weight(strategy, dtype) -> list:
    """A bfloat16 weight of 1 takes a step of 1 + 2^-9: the sum of the gradients, which bfloat16 does not hold."""
    import keras

    import mpkeras

    with strategy.scope():
        variable = keras.Variable([1.0], dtype="bfloat16")
        optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(1.0), loss_scale=1.0, all_reduce_dtype=dtype)
        optimizer.build([variable])

    @tf.function
    def run():
        def step():
            index = tf.distribute.get_replica_context().replica_id_in_sync_group
            optimizer.scale_loss(tf.ones(()))
            optimizer.apply([tf.gather(tf.constant([[1.0], [2.0**-9]], tf.bfloat16), index)], [variable])

        strategy.run(step)

    run()
    return [float(part[0]) for part in parts(variable)]


def parts(variable):
    return [v.numpy() for v in getattr(variable.value, "values", (variable.value,))]


def sparse_step(strategy) -> list:
    """Each replica has a gradient of 8 for row 1, at a scale of 8."""
    variable, optimizer = make(strategy, "float16", [[0.0], [0.0], [0.0]])

    @tf.function
    def run():
        def step():
            optimizer.scale_loss(tf.ones(()))
            grad = tf.IndexedSlices(tf.constant([[8.0]]), tf.constant([1]), tf.constant([3, 1]))
            optimizer.apply([grad], [variable])

        strategy.run(step)

    run()
    return parts(variable)[1].tolist()


def train(strategy, dtype: str) -> list:
    import keras
    import numpy as np

    import mpkeras

    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 4)).astype("float32"), rng.normal(size=(24, 8)).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(8)])
        optimizer = mpkeras.LossScaleOptimizer(
            keras.optimizers.SGD(0.05, momentum=0.9),
            initial_scale=2.0**10,
            all_reduce_dtype=None if dtype == "none" else dtype,
        )
        model.compile(optimizer, "mse", jit_compile=False)
        # Under another rule: the option must outlive the new wrapper.
        mpkeras.prepare(model, "mixed_float16", loss_scale=2.0**9)
    assert (model.optimizer.all_reduce_dtype or "none") == dtype and model.optimizer is not optimizer
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return [keras.ops.convert_to_numpy(v).tolist() for v in model.trainable_variables]


def unscaled(strategy) -> str:
    variable, optimizer = make(strategy, "float16", [0.0])

    def step():
        optimizer.apply(optimizer.get_unscaled_gradients([tf.ones(1)]), [variable])

    try:
        strategy.run(step)
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
