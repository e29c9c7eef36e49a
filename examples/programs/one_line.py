"""Stock Keras and one line: a classifier with callbacks and validation, saved, loaded and trained on."""

import tempfile
from pathlib import Path

import keras
import numpy as np
from keras import layers

import mpkeras


def train(policy="mixed_float16", seed=0):
    """Returns the model and its loss on data that it has not seen."""
    mpkeras.set_global_policy(policy)  # the one line: all that follows is stock Keras

    keras.utils.set_random_seed(seed)
    x = np.random.normal(size=(1024, 8)).astype("float32")
    y = ((x[:, 0] * x[:, 1] > 0) + (x[:, 2] > 0)).astype("int32")
    model = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(64, "relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.1),
            layers.Dense(32, "relu"),
            layers.Dense(3, "softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy", metrics=["accuracy"])
    best = keras.callbacks.EarlyStopping(patience=8, restore_best_weights=True)
    data = {"x": x[:768], "y": y[:768], "validation_data": (x[768:], y[768:]), "batch_size": 32, "verbose": 0}
    model.fit(**data, epochs=15, callbacks=[best])
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder) / "model.keras")
        model = keras.models.load_model(Path(folder) / "model.keras")
    model.fit(**data, epochs=10, callbacks=[best])
    return model, model.evaluate(x[768:], y[768:], verbose=0)[0]


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
