"""Physics-informed network on TensorFlow: the loss holds second derivatives of the network by its input."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import mpkeras


class Oscillator(keras.Model):
    """Solves u'' = -u with u(0) = 0, u'(0) = 1, without any data: the solution is the sine."""

    def __init__(self):
        super().__init__()
        self.net = keras.Sequential(
            [keras.Input((1,)), layers.Dense(24, "tanh"), layers.Dense(24, "tanh"), layers.Dense(1)]
        )

    def solution(self, t):
        return t + t**2 * self.net(t)  # fulfils both conditions

    def train_step(self, t):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as second:
                second.watch(t)
                with tf.GradientTape() as first:
                    first.watch(t)
                    u = self.solution(t)
                speed = first.gradient(u, t)  # not scaled: it is part of the equation
            loss = tf.reduce_mean((second.gradient(speed, t) + u) ** 2)
            scaled_loss = self.optimizer.scale_loss(loss)
        self.optimizer.apply(tape.gradient(scaled_loss, self.trainable_weights), self.trainable_weights)
        return {"loss": loss}


def train(policy="mixed_float16", seed=0):
    """Returns the model and its largest error about the sine."""
    keras.utils.set_random_seed(seed)
    t = np.random.uniform(0, 3, (256, 1)).astype("float32")
    model = Oscillator()
    model.compile(keras.optimizers.Adam(3e-3))
    mpkeras.prepare(model, policy)
    model.fit(t, batch_size=32, epochs=30, verbose=0)
    t = np.linspace(0, 3, 50, dtype="float32")[:, None]
    return model, float(np.abs(model.solution(t) - np.sin(t)).max())


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
