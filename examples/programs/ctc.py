"""CTC: labels without positions, as in reading aloud or handwriting."""

import keras
import numpy as np
from keras import layers

import mpkeras


def train(policy="mixed_float16", seed=0):
    """Returns the model and its CTC loss."""
    keras.utils.set_random_seed(seed)
    labels = np.random.randint(1, 5, (256, 3)).astype("int32")  # 0 is CTC's blank
    places = np.array([1, 5, 9]) + np.random.randint(-1, 2, (256, 3))
    signal = 0.1 * np.random.normal(size=(256, 12, 8)).astype("float32")
    signal[np.arange(256)[:, None], places, labels] += 1.0
    model = keras.Sequential(
        [
            keras.Input((12, 8)),
            layers.Conv1D(16, 3, padding="same", activation="relu"),
            layers.Bidirectional(layers.GRU(16, return_sequences=True)),
            layers.Dense(5),  # logits
        ]
    )
    model.compile(keras.optimizers.Adam(1e-2), keras.losses.CTC())
    mpkeras.prepare(model, policy)
    model.fit(signal, labels, epochs=12, verbose=0)
    return model, model.evaluate(signal, labels, verbose=0)


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
