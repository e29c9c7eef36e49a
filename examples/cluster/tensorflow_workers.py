"""`MultiWorkerMirroredStrategy`, two loops of one's own: around the model's train step, or `mpkeras.make_train_step`.

`fit` of Keras 3.15 fails under this strategy, with and without mpkeras (keras#20585). `TF_CONFIG` tells each worker the
addresses of all, and which of them it is:

    export TF_CONFIG='{"cluster": {"worker": ["10.0.0.1:1234", "10.0.0.2:1234"]},
                       "task": {"type": "worker", "index": 0}}'
    python tensorflow_workers.py --loop step
"""

import argparse
import json
import os

os.environ["KERAS_BACKEND"] = "tensorflow"

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import mpkeras

BATCH = 64


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop", choices=["step", "own"], default="step")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--plant-overflow", type=int, metavar="WORKER", help="one batch of this worker overflows")
    options = parser.parse_args()
    # Reads TF_CONFIG. Before TensorFlow does anything else.
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    config = json.loads(os.environ["TF_CONFIG"])
    worker, workers = config["task"]["index"], len(config["cluster"]["worker"])

    keras.utils.set_random_seed(0)
    mpkeras.set_global_policy("mixed_float16")
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with strategy.scope():
        layers = [keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)]
        model = keras.Sequential(layers)
        train_step = (step_of if options.loop == "step" else train_step_of)(model, loss_fn)

    x, y = load_digits(return_X_y=True)
    x = x[: len(x) // BATCH * BATCH].astype("float32") / 16
    weights = np.ones(len(x), "float32")
    if options.plant_overflow is not None:
        # In the sixth batch of each epoch: the loss stays finite, its gradients are beyond float16.
        weights[5 * BATCH + options.plant_overflow] = 1e9
    # Each worker brings rows of its own.
    rows = slice(worker, None, workers)
    local_data = tf.data.Dataset.from_tensor_slices((x[rows], y[: len(x)][rows], weights[rows])).batch(BATCH // workers)
    data = strategy.distribute_datasets_from_function(lambda context: local_data)
    for _ in range(options.epochs):
        for batch in data:
            train_step(*batch)
    loss = float(loss_fn(y[: len(x)], model(x)))
    optimizer = model.optimizer
    print(
        f"rank {worker}: loss {loss:.4f}, loss scale {float(optimizer.loss_scale)}, "
        f"skipped {int(optimizer.skipped_steps.numpy())}"
    )


def step_of(model, loss_fn):
    """Returns our step, which runs on all replicas by itself."""
    step = mpkeras.make_train_step(model, keras.optimizers.Adam(0.01), loss_fn)
    model.optimizer = step.optimizer
    return step


def train_step_of(model, loss_fn):
    """Returns a function that runs the compiled model's own train step on all replicas."""
    model.compile(keras.optimizers.Adam(0.01), loss_fn)
    model.optimizer.build(model.trainable_variables)
    strategy = model.distribute_strategy
    return tf.function(lambda *batch: strategy.run(model.train_step, args=(batch,)))


if __name__ == "__main__":
    main()
