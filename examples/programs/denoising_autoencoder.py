"""Denoising autoencoder: convolutions take the noise out of pictures; a regularizer keeps the code sparse."""

import keras
import numpy as np
from keras import layers

import mpkeras


def train(policy="mixed_float16", seed=0):
    """Returns the model and its mean squared error and penalty."""
    keras.utils.set_random_seed(seed)
    rows, columns = np.mgrid[:16, :16]
    waves = np.random.uniform(0.2, 0.8, (2, 128, 1, 1))
    clean = np.sin(waves[0] * rows + waves[1] * columns)[..., None].astype("float32")
    noisy = clean + 0.4 * np.random.normal(size=clean.shape).astype("float32")
    model = keras.Sequential(
        [
            keras.Input((16, 16, 1)),
            layers.Conv2D(16, 3, strides=2, padding="same", activation="relu"),
            layers.Conv2D(8, 3, padding="same", activation="relu", activity_regularizer=keras.regularizers.L1(1e-5)),
            layers.Conv2DTranspose(16, 3, strides=2, padding="same", activation="relu"),
            layers.Conv2D(1, 3, padding="same"),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    precision = mpkeras.callbacks.MixedPrecision(policy)
    model.fit(noisy, clean, batch_size=16, epochs=6, verbose=0, callbacks=[precision])
    return model, model.evaluate(noisy, clean, batch_size=16, verbose=0)


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
