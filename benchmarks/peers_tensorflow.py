"""tf_keras, the Keras 2 of TensorFlow, with its LossScaleOptimizer.

What was chosen for fairness: the same compilation for the whole step as for mpkeras, graph or XLA, and for Adam as
well, which tf_keras would compile on its own wherever it can.
"""

import tensorflow as tf

import loss_scale_overhead
from peers_keras import EPSILON, LEARNING_RATE, LOSS_SCALE, make_data, make_model

REQUIRES = {"tf_keras": ("tf_keras",)}


def is_xla(mode: str) -> bool:
    return mode.endswith("XLA")


def make_adam(mode: str, learning_rate: float):
    import tf_keras

    return tf_keras.optimizers.Adam(learning_rate, epsilon=EPSILON, jit_compile=is_xla(mode))


def make_scaled_adam(mode: str, learning_rate: float):
    import tf_keras

    optimizer = make_adam(mode, learning_rate)
    return tf_keras.mixed_precision.LossScaleOptimizer(optimizer, initial_scale=LOSS_SCALE)


def optimizer_steps(mode: str, params: int, peers: list[str]):
    """Returns `{name: step}` of the optimizer alone, without loss scaling among them."""
    if "tf_keras" not in peers:
        return {}
    values, grads = loss_scale_overhead.make_values(params)
    grads = [tf.constant(grad) for grad in grads]

    def make_step(optimizer, unscaled):
        variables = [tf.Variable(value) for value in values]
        optimizer.build(variables)

        @tf.function(jit_compile=is_xla(mode))
        def step(scaled_grads):
            optimizer.apply_gradients(zip(unscaled(scaled_grads), variables, strict=True))

        return lambda: step(grads)

    scaled = make_scaled_adam(mode, 1e-3)
    return {
        "tf_keras Adam": make_step(make_adam(mode, 1e-3), lambda grads: grads),
        "tf_keras LossScaleOptimizer": make_step(scaled, scaled.get_unscaled_gradients),
    }


def training_steps(mode: str, sizes, peers: list[str]):
    """Returns `{name: step}` of whole training steps, each giving its loss."""
    if "tf_keras" not in peers:
        return {}
    import tf_keras

    weights, x, y = make_data(sizes)
    loss_fn = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def on_batch():
        model = make_model(tf_keras, "mixed_bfloat16", sizes, weights)
        model.compile(make_scaled_adam(mode, LEARNING_RATE), loss_fn, jit_compile=is_xla(mode))
        return lambda: float(model.train_on_batch(x, y))

    def loop():
        model = make_model(tf_keras, "mixed_bfloat16", sizes, weights)
        optimizer = make_scaled_adam(mode, LEARNING_RATE)
        optimizer.build(model.trainable_variables)
        batch = tf.constant(x), tf.constant(y)

        @tf.function(jit_compile=is_xla(mode))
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_fn(y, model(x, training=True))
                scaled_loss = optimizer.get_scaled_loss(loss)
            grads = tape.gradient(scaled_loss, model.trainable_variables)
            grads = optimizer.get_unscaled_gradients(grads)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            return loss

        return lambda: float(step(*batch))

    return {"tf_keras train_on_batch": on_batch(), "tf_keras loop": loop()}
