"""`fit` on every device of every process: `jax.distributed` connects them, `DataParallel` shards the batch.

One process on each machine:

    python jax_distributed.py --coordinator 10.0.0.1:1234 --processes 2 --process 0    (on the other machine: 1)

On Cloud TPU and under Slurm `jax.distributed.initialize()` needs no arguments.
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from sklearn.datasets import load_digits

import mpkeras

BATCH = 64


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--coordinator", required=True, help="host:port of process 0")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--process", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--plant-overflow", type=int, metavar="PROCESS", help="one batch of this process overflows")
    options = parser.parse_args()
    jax.distributed.initialize(options.coordinator, options.processes, options.process)
    # Each process reads rows of its own.
    keras.distribution.set_distribution(keras.distribution.DataParallel(auto_shard_dataset=False))

    keras.utils.set_random_seed(0)
    mpkeras.set_global_policy("mixed_float16")
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss_fn, weighted_metrics=["accuracy"])

    x, y = load_digits(return_X_y=True)
    x = x[: len(x) // BATCH * BATCH].astype("float32") / 16
    rows = slice(options.process, len(x), options.processes)
    weights = np.ones(len(x), "float32")
    if options.plant_overflow is not None:
        # In the sixth batch of each epoch: the loss stays finite, its gradients are beyond float16.
        weights[5 * BATCH + options.plant_overflow] = 1e9
    history = model.fit(
        x[rows],
        y[: len(x)][rows],
        sample_weight=weights[rows],
        batch_size=BATCH // options.processes,
        epochs=options.epochs,
        shuffle=False,
        verbose=0,
    ).history
    print(
        f"rank {options.process}: loss {history['loss'][-1]:.4f}, accuracy {history['accuracy'][-1]:.4f}, "
        f"loss scale {float(model.optimizer.loss_scale)}, skipped {int(model.optimizer.skipped_steps.value)}"
    )


if __name__ == "__main__":
    main()
