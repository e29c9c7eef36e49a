"""Weights & Biases, offline: loss, loss scale and skipped steps of each epoch. Needs `pip install wandb`."""

import tempfile

import keras
import numpy as np
import wandb
from keras import layers

import mpkeras


def train(policy="mixed_float16", seed=0, folder=None):
    """Returns the model and its loss; `wandb sync` sends what was kept, later or never."""
    keras.utils.set_random_seed(seed)
    x = np.random.normal(size=(512, 8)).astype("float32")
    y = x[:, :1] * x[:, 1:2]
    model = keras.Sequential([keras.Input((8,)), layers.Dense(32, "tanh"), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    settings = wandb.Settings(console="off", silent=True)
    with wandb.init(mode="offline", project="mpkeras", dir=folder or tempfile.mkdtemp(), settings=settings) as run:
        precision = mpkeras.callbacks.MixedPrecision(policy)
        log = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: run.log(logs, step=epoch))
        model.fit(x, y, epochs=10, verbose=0, callbacks=[precision, log])
    return model, model.evaluate(x, y, verbose=0)


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
