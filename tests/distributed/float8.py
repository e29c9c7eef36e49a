"""Trains a model with products in float8 on one device, or on two with half of each batch, and prints its weights.

What the second half holds is larger by far, and weighs nothing in the loss: it counts for the scales alone.
"""

import argparse
import json
import os

if os.environ["KERAS_BACKEND"] == "jax":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import keras
import numpy as np

import mpkeras
from mpkeras.conversion.float8 import multiplies_in_float8

ROWS, STEPS = 32, 4
rng = np.random.default_rng(0)
X = (rng.normal(size=(ROWS, 16)) * np.repeat([1.0, 2e4], ROWS // 2)[:, None]).astype("float32")
Y = rng.normal(size=(ROWS, 16)).astype("float32")
WEIGHTS = np.repeat([1.0, 0.0], ROWS // 2).astype("float32")


def built():
    keras.utils.set_random_seed(0)
    parts = [keras.layers.Dense(32, "relu", name=f"part{i}") for i in range(3)]
    model = keras.Sequential([keras.Input((16,)), *parts, keras.layers.Dense(16, name="last")])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    mpkeras.prepare(model, "mixed_float8")
    assert sum(map(multiplies_in_float8, model.layers)) == 2
    return model


def fit(model):
    model.fit(X, Y, sample_weight=WEIGHTS, batch_size=ROWS, epochs=STEPS, shuffle=False, verbose=0)
    return model


def on_tensorflow(is_shared):
    import tensorflow as tf

    if not is_shared:
        return fit(built())
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = built()
    return fit(model)


def on_jax(is_shared):
    if is_shared:
        keras.distribution.set_distribution(keras.distribution.DataParallel())
    return fit(built())


def on_torch(rank, port):
    import torch

    model = built()
    if rank is None:
        return fit(model)
    torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    module = torch.nn.parallel.DistributedDataParallel(model)
    half = slice(rank * ROWS // 2, (rank + 1) * ROWS // 2)
    for _ in range(STEPS):
        errors = (module(torch.tensor(X[half]), training=True).float() - torch.tensor(Y[half])) ** 2
        loss = (errors * torch.tensor(WEIGHTS[half])[:, None]).mean()
        model.zero_grad()
        model.optimizer.scale_loss(loss).backward()
        variables = model.trainable_variables
        model.optimizer.apply([v.value.grad for v in variables], variables)
    # What holds the group is gone before it: freed after it, it now and then waited for ever.
    del module, errors, loss
    # A rank that ends while another one still talks to it aborts.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return model


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=("alone", "shared"))
    parser.add_argument("--rank", type=int)
    parser.add_argument("--port")
    options = parser.parse_args()
    backend = keras.backend.backend()
    if backend == "torch":
        model = on_torch(options.rank, options.port)
    else:
        model = {"tensorflow": on_tensorflow, "jax": on_jax}[backend](options.way == "shared")
    print("RESULT " + json.dumps([np.asarray(weight, "float64").tolist() for weight in model.get_weights()]))


if __name__ == "__main__":
    main()
