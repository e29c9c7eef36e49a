"""`DistributedDataParallel` around a Keras model, in a loop of one's own: `torchrun --nproc_per_node 2 torch_ddp.py`.

On several machines, on each: `torchrun --nnodes 2 --nproc_per_node 8 --rdzv_backend c10d --rdzv_endpoint HOST:PORT`.
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch
from sklearn.datasets import load_digits

import mpkeras

BATCH = 64


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--plant-overflow", type=int, metavar="RANK", help="one batch of this rank overflows")
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group()
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()

    keras.utils.set_random_seed(0)
    mpkeras.set_global_policy("mixed_float16")
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])
    mpkeras.apply_policy(model)  # the policy's float32 rules
    module = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.Adam(0.01))
    loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    x, y = load_digits(return_X_y=True)
    x = x[: len(x) // BATCH * BATCH].astype("float32") / 16
    weights = np.ones(len(x), "float32")
    if options.plant_overflow is not None:
        # In the sixth batch of each epoch: the loss stays finite, its gradients are beyond float16.
        weights[5 * BATCH + options.plant_overflow] = 1e9
    for _ in range(options.epochs):
        for start in range(0, len(x), BATCH):
            rows = slice(start + rank, start + BATCH, ranks)
            module.zero_grad()
            loss = loss_fn(y[rows], module(keras.ops.convert_to_tensor(x[rows])), weights[rows])
            optimizer.scale_loss(loss).backward()
            variables = model.trainable_variables
            optimizer.apply([v.value.grad for v in variables], variables)
    with torch.no_grad():
        loss = loss_fn(y[: len(x)], model(x))
    print(
        f"rank {rank}: loss {loss.item():.4f}, loss scale {float(optimizer.loss_scale)}, "
        f"skipped {int(optimizer.skipped_steps.value)}",
        flush=True,
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
