"""Sums gradients over two replicas in 16 bits; prints what happened as JSON."""

from devices import ALONE, many_devices, parser, print_result


def main():
    devices = many_devices(parser(__doc__).parse_args())
    # 1 + 2^-12 is 1 in float16, whose numbers beside 1 are 2^-10 apart.
    result = {
        "rounded": one_step(devices, [[1.0], [2.0**-12]], "float16"),
        "as_they_are": one_step(devices, [[1.0], [2.0**-12]], None, is_eager=True),
        # Both are finite in float16; their sum is beyond its 65504.
        "overflow": one_step(devices, [[40000.0], [40000.0]], "float16"),
        "no_overflow": one_step(devices, [[40000.0], [40000.0]], "bfloat16", is_eager=True),
        "inf_on_one": one_step(devices, [[1.0], [float("inf")]], "float16", is_eager=True),
        "eager": one_step(devices, [[1.0], [2.0]], "float16", is_eager=True),
        "clipped_sum": one_step(devices, [[24.0], [40.0]], "float16", is_eager=True, clipnorm=4.0),
        "accumulated": one_step(devices, [[8.0], [16.0]], "float16", gradient_accumulation_steps=2),
        "one_device": one_step(ALONE, [[4.0]], "float16"),
        "sparse": sparse_step(devices),
        # A bfloat16 weight of 1 takes a step of 1 + 2^-9: the sum of the gradients, which bfloat16 does not hold.
        "small": {
            str(dtype): one_step(devices, [[8.0], [2.0**-6]], dtype, start=1.0, weight_dtype="bfloat16")["value"]
            for dtype in (None, "float32", "bfloat16")
        },
        "weights": {str(dtype): train(devices, dtype) for dtype in (None, "float16")},
        "unscaled": unscaled(devices),
    }
    print_result(result)


def made(devices, dtype, value, weight_dtype="float32", **options):
    import keras

    import mpkeras

    with devices.scope():
        variable = keras.Variable(value, dtype=weight_dtype)
        inner_optimizer = keras.optimizers.SGD(1.0, **options)
        optimizer = mpkeras.LossScaleOptimizer(inner_optimizer, initial_scale=8.0, all_reduce_dtype=dtype)
        optimizer.build([variable])
    return variable, optimizer


def run(devices, step, is_eager=False, times=1):
    import tensorflow as tf

    in_replicas = devices.strategy.run if devices.strategy else lambda step: step()
    update = in_replicas if is_eager else tf.function(in_replicas)
    for _ in range(times):
        update(step)


def one_step(devices, scaled_grads, dtype, *, start=0.0, weight_dtype="float32", is_eager=False, **options) -> dict:
    """Replica k has `scaled_grads[k]`, at a scale of 8 and a rate of 1."""
    import tensorflow as tf

    variable, optimizer = made(devices, dtype, [start], weight_dtype, **options)

    def step():
        index = tf.distribute.get_replica_context().replica_id_in_sync_group
        optimizer.scale_loss(tf.ones(()))
        optimizer.apply([tf.gather(tf.constant(scaled_grads, weight_dtype), index)], [variable])

    run(devices, step, is_eager, options.get("gradient_accumulation_steps", 1))
    return {"value": [float(copy[0]) for copy in copies(variable)], "scale": float(optimizer.loss_scale)}


def copies(variable) -> list:
    return [copy.numpy() for copy in getattr(variable.value, "values", (variable.value,))]


def sparse_step(devices) -> list:
    """Each replica has a gradient of 8 for row 1, at a scale of 8."""
    import tensorflow as tf

    variable, optimizer = made(devices, "float16", [[0.0], [0.0], [0.0]])

    def step():
        optimizer.scale_loss(tf.ones(()))
        grad = tf.IndexedSlices(tf.constant([[8.0]]), tf.constant([1]), tf.constant([3, 1]))
        optimizer.apply([grad], [variable])

    run(devices, step)
    return copies(variable)[1].tolist()


def train(devices, dtype) -> list:
    import keras
    import numpy as np

    import mpkeras

    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(24, 4)).astype("float32"), rng.normal(size=(24, 8)).astype("float32")
    with devices.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(8)])
        inner = keras.optimizers.SGD(0.05, momentum=0.9)
        model.compile(mpkeras.LossScaleOptimizer(inner, all_reduce_dtype=dtype), "mse", jit_compile=False)
        mpkeras.prepare(model, "mixed_float16", loss_scale=2.0**9)
    model.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    return [variable.numpy().tolist() for variable in model.trainable_variables]


def unscaled(devices) -> str:
    import tensorflow as tf

    variable, optimizer = made(devices, "float16", [0.0])
    try:
        run(devices, lambda: optimizer.apply(optimizer.get_unscaled_gradients([tf.ones(1)]), [variable]), is_eager=True)
    except ValueError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    main()
