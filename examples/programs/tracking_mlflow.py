"""MLflow: loss, loss scale and skipped steps in a local store. Needs `pip install mlflow`."""

import tempfile
from pathlib import Path

import keras
import mlflow
import numpy as np
from keras import layers

import mpkeras


def train(policy="mixed_float16", seed=0, folder=None):
    """Returns the model and its loss; then `mlflow ui --backend-store-uri sqlite:///FOLDER/runs.db`."""
    keras.utils.set_random_seed(seed)
    x = np.random.normal(size=(512, 8)).astype("float32")
    y = x[:, :1] * x[:, 1:2]
    model = keras.Sequential([keras.Input((8,)), layers.Dense(32, "tanh"), layers.Dense(1)])
    model.compile(keras.optimizers.Adam(1e-2), "mse")
    mlflow.set_tracking_uri(f"sqlite:///{Path(folder or tempfile.mkdtemp()) / 'runs.db'}")
    with mlflow.start_run():
        mlflow.log_param("policy", policy)
        precision = mpkeras.callbacks.MixedPrecision(policy)
        log = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: mlflow.log_metrics(logs, step=epoch))
        model.fit(x, y, epochs=10, verbose=0, callbacks=[precision, log])
    return model, model.evaluate(x, y, verbose=0)


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
