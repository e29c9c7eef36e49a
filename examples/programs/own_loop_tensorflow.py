"""A loop of your own on TensorFlow: `GradientTape`, around the optimizer."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import mpkeras


def train(policy="mixed_float16", seed=0):
    """Returns the model and its loss."""
    keras.utils.set_random_seed(seed)
    x = np.random.normal(size=(512, 8)).astype("float32")
    y = ((x[:, 0] * x[:, 1] > 0) + (x[:, 2] > 0)).astype("int32")
    with mpkeras.policy_scope(policy):
        model = keras.Sequential([keras.Input((8,)), layers.Dense(32, "relu"), layers.Dense(3, "softmax")])
    # Nobody compiles this model: its softmax stays in float32 by this line.
    mpkeras.apply_policy(model, policy)
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.Adam(1e-2))
    optimizer.build(model.trainable_variables)
    loss_fn = keras.losses.SparseCategoricalCrossentropy()

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, model(x, training=True))
            scaled_loss = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled_loss, model.trainable_variables), model.trainable_variables)
        return loss

    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(512, seed=seed).batch(32)
    for _ in range(10):
        for batch in data:
            step(*batch)
    return model, float(loss_fn(y, model(x)))


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
