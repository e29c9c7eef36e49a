"""Keras Tuner: the learning rate is looked for, in mixed precision. Needs `pip install keras-tuner`."""

import tempfile

import keras
import keras_tuner
import numpy as np
from keras import layers

import mpkeras


def train(policy="mixed_float16", seed=0):
    """Returns the best model and its validation loss."""
    keras.utils.set_random_seed(seed)
    x = np.random.normal(size=(512, 8)).astype("float32")
    y = x[:, :1] * x[:, 1:2]

    def make_model(hp):
        model = keras.Sequential([keras.Input((8,)), layers.Dense(32, "tanh"), layers.Dense(1)])
        rate = hp.Choice("learning_rate", [1e-1, 1e-2, 1e-4])
        model.compile(keras.optimizers.Adam(rate), "mse")
        mpkeras.prepare(model, policy)
        model.optimizer.build(model.trainable_variables)  # or its state is not read from the file, with Keras' warning
        return model

    with tempfile.TemporaryDirectory() as folder:
        tuner = keras_tuner.GridSearch(make_model, objective="val_loss", directory=folder, seed=seed)
        tuner.search(x[:384], y[:384], epochs=8, validation_data=(x[384:], y[384:]), verbose=0)
        model = tuner.get_best_models(1)[0]
    # The tuner made it with `make_model`, so it is prepared, and took the weights from a file.
    return model, model.evaluate(x[384:], y[384:], verbose=0)


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
