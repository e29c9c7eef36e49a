"""TensorBoard: loss, loss scale and skipped steps in one place. Needs `pip install tensorboard`."""

import tempfile

import keras
import numpy as np
from keras import layers

import mpkeras


def train(policy="mixed_float16", seed=0, folder=None):
    """Returns the model and its loss; then `tensorboard --logdir FOLDER`."""
    keras.utils.set_random_seed(seed)
    x = np.random.normal(size=(512, 8)).astype("float32")
    y = x[:, :1] * x[:, 1:2]
    model = keras.Sequential([keras.Input((8,)), layers.Dense(32, "tanh"), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    precision = mpkeras.callbacks.MixedPrecision(policy)
    board = keras.callbacks.TensorBoard(folder or tempfile.mkdtemp())
    model.fit(x, y, epochs=10, verbose=0, callbacks=[precision, board])
    return model, model.evaluate(x, y, verbose=0)


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
