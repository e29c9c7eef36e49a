"""Variational autoencoder: a layer that draws, and gives its own loss to `add_loss`."""

import keras
import numpy as np
from keras import layers, ops

import mpkeras


class Sampling(layers.Layer):
    """Draws from a normal distribution, whose distance to the standard one is a loss."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seed_generator = keras.random.SeedGenerator(7)

    def call(self, inputs):
        mean, log_variance = inputs
        noise = keras.random.normal(ops.shape(mean), dtype=self.compute_dtype, seed=self.seed_generator)
        self.add_loss(-0.05 * ops.mean(1 + log_variance - ops.square(mean) - ops.exp(log_variance)))
        return mean + ops.exp(0.5 * log_variance) * noise


def train(policy="mixed_float16", seed=0):
    """Returns the model and its loss: mean squared error and divergence."""
    keras.utils.set_random_seed(seed)
    x = np.tanh(np.random.normal(size=(512, 2)) @ np.random.normal(size=(2, 16))).astype("float32")
    inputs = keras.Input((16,))
    hidden = layers.Dense(32, activation="relu")(inputs)
    code = Sampling()([layers.Dense(2)(hidden), layers.Dense(2)(hidden)])
    outputs = layers.Dense(16)(layers.Dense(32, activation="relu")(code))
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.Adam(5e-3), "mse")
    model.fit(x, x, epochs=15, verbose=0, callbacks=[mpkeras.callbacks.MixedPrecision(policy)])
    return model, model.evaluate(x, x, verbose=0)


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
