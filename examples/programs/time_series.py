"""Time series: raw measurements of very different sizes, normalized, convolved, and remembered by an LSTM."""

import keras
import numpy as np
from keras import layers

import mpkeras


def train(policy="mixed_float16", seed=0):
    """Returns the model and its mean squared error about the next value, in units of the series' variance."""
    keras.utils.set_random_seed(seed)
    time = np.arange(800)
    temperature = np.sin(time / 6) + 0.5 * np.sin(time / 17) + 0.1 * np.random.normal(size=800)
    pressure = 101_325 + 2_000 * np.cos(time / 6)  # pascals: beyond float16
    series = np.stack([temperature, pressure], axis=1).astype("float32")
    x = np.stack([series[start : start + 24] for start in range(776)])
    y = temperature[24:].astype("float32")
    normalization = layers.Normalization()
    normalization.adapt(series)
    model = keras.Sequential(
        [
            keras.Input((24, 2)),
            normalization,
            layers.Conv1D(16, 3, activation="relu"),
            layers.LSTM(16),
            layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    model.fit(x, y, epochs=6, verbose=0, callbacks=[mpkeras.callbacks.MixedPrecision(policy)])
    return model, model.evaluate(x, y, verbose=0) / float(np.var(y))


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
