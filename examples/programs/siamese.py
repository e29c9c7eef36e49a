"""Siamese network: pairs through one encoder, a distance, a contrastive loss."""

import keras
import numpy as np
from keras import layers, ops

import mpkeras


@keras.saving.register_keras_serializable()
class Distance(layers.Layer):
    def call(self, inputs):
        first, second = inputs
        square = ops.sum(ops.square(first - second), axis=1, keepdims=True)
        return ops.sqrt(ops.maximum(square, keras.config.epsilon()))


def contrastive_loss(y, distance):
    """Same pairs (`y` 0) come near, others go one apart."""
    return ops.mean((1 - y) * ops.square(distance) + y * ops.square(ops.maximum(1 - distance, 0)))


def train(policy="mixed_float16", seed=0):
    """Returns the model and its contrastive loss."""
    keras.utils.set_random_seed(seed)
    kind = np.random.randint(0, 4, (2, 512))
    centers = np.random.normal(size=(4, 16))
    x = [(centers[row] + 0.3 * np.random.normal(size=(512, 16))).astype("float32") for row in kind]
    y = (kind[0] != kind[1]).astype("float32")[:, None]
    encoder = keras.Sequential([layers.Dense(32, activation="tanh"), layers.Dense(8)])
    inputs = [keras.Input((16,)), keras.Input((16,))]
    model = keras.Model(inputs, Distance()([encoder(one) for one in inputs]))
    model.compile(keras.optimizers.Adam(3e-3), contrastive_loss)
    model.fit(x, y, epochs=10, verbose=0, callbacks=[mpkeras.callbacks.MixedPrecision(policy)])
    return model, model.evaluate(x, y, verbose=0)


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
