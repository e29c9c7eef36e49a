"""Trains a Keras model under `DistributedDataParallel` and spoils the batch of each rank in turn.

One process of several; prints what happened as JSON.
"""

import argparse
import datetime
import json
import os
import warnings

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

import mpkeras
from mpkeras.training.step import TrainStep, make_train_step

RANKS = 2
INITIAL_SCALE = 2.0**10


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    mpkeras.set_global_policy("mixed_float16")
    # Without a process group: one device, with the joined batch.
    result = {"one": train(*new_model(), rows=slice(None), wrap=lambda model, optimizer: model)}

    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{options.port}",
        rank=options.rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=60),
    )

    def wrap(model, optimizer):
        return torch.nn.parallel.DistributedDataParallel(model)

    half = ROWS // RANKS
    rows = slice(options.rank * half, (options.rank + 1) * half)
    result["audited"] = [line for line in mpkeras.audit(new_model()[0]).notes() if "share a batch" in line]
    result["many"] = train(*new_model(), rows, wrap)
    result["compressed"] = train(*new_model(), rows, wrapped_with_16_bit_sums)
    result.update(inflict_faults(*new_model(), rows, wrap))
    result["own_step"] = train(*new_model(), rows, averaging_step)
    result["own_step"].update(inflict_faults(*new_model(), rows, averaging_step))
    result["own_gradients"] = gradients_that_nobody_reduced(options.rank)
    torch.distributed.destroy_process_group()
    print("RESULT " + json.dumps(result))


def wrapped_with_16_bit_sums(model, optimizer):
    module = torch.nn.parallel.DistributedDataParallel(model)
    module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return module


def averaging_step(model, optimizer):
    """`make_train_step`, whose gradients torch averages over ranks as soon as each is there."""

    def average(parameter):
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= RANKS

    for variable in model.trainable_variables:
        variable.value.register_post_accumulate_grad_hook(average)
    return make_train_step(model, optimizer, "mse")


def new_model():
    keras.utils.set_random_seed(0)
    layers = [keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(8, dtype="float32")]
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    rule = mpkeras.DynamicLossScale(INITIAL_SCALE)
    return keras.Sequential(layers), mpkeras.LossScaleOptimizer(optimizer, loss_scale=rule)


ROWS = 8


def batches(count: int):
    rng = np.random.default_rng(0)
    for _ in range(count):
        yield rng.normal(size=(ROWS, 4)).astype("float32"), rng.normal(size=(ROWS, 8)).astype("float32")


def step(model, module, optimizer, x, y, rows, knows_loss: bool = True):
    """One step of a loop of one's own: `module` is the model, wrapped or not, or our step for it."""
    if isinstance(module, TrainStep):
        module(x[rows], y[rows])
        return
    model.zero_grad()
    loss = keras.losses.MeanSquaredError()(torch.tensor(y[rows]), module(torch.tensor(x[rows])))
    scaled_loss = optimizer.scale_loss(loss) if knows_loss else loss * optimizer.loss_scale
    scaled_loss.backward()
    variables = model.trainable_variables
    optimizer.apply([v.value.grad for v in variables], variables)


def train(model, optimizer, rows, wrap) -> dict:
    """Trains on three batches without faults."""
    module = wrap(model, optimizer)
    for x, y in batches(3):
        step(model, module, optimizer, x, y, rows)
    weights = [keras.ops.convert_to_numpy(v).tolist() for v in model.trainable_variables]
    return {"weights": weights, "scale": float(optimizer.loss_scale)}


def inflict_faults(model, optimizer, rows, wrap) -> dict:
    (good_x, good_y), (x, y) = batches(2)
    module = wrap(model, optimizer)
    step(model, module, optimizer, good_x, good_y, rows)
    everything = model.variables + optimizer.inner_optimizer.variables
    found = []
    for rank in range(RANKS):
        for kind in ("input", "gradient", "input, and the first rank does not know its loss"):
            bad_x, bad_y = x.copy(), y.copy()
            row = rank * (ROWS // RANKS)
            if kind == "gradient":
                # The loss stays finite in float32; the gradient of this row is beyond float16.
                bad_y[row] = 1e9
            else:
                bad_x[row, 0] = np.inf
            knows_loss = kind in ("input", "gradient") or torch.distributed.get_rank() > 0
            before = [v.numpy().copy() for v in everything]
            skipped = int(optimizer.skipped_steps.value)
            with warnings.catch_warnings():
                # Says that the loss was not scaled by `scale_loss`.
                warnings.simplefilter("ignore")
                step(model, module, optimizer, bad_x, bad_y, rows, knows_loss)
            after = [v.numpy() for v in everything]
            found.append(
                {
                    "rank": rank,
                    "kind": kind,
                    "changed": [
                        v.path for v, a, b in zip(everything, before, after, strict=True) if not np.array_equal(a, b)
                    ],
                    "new_skips": int(optimizer.skipped_steps.value) - skipped,
                    "scale": float(optimizer.loss_scale),
                }
            )
    step(model, module, optimizer, x, y, rows)
    moved = [not np.array_equal(a, v.numpy()) for a, v in zip(before, everything, strict=True)]
    return {"faults": found, "learns_on": any(moved)}


def gradients_that_nobody_reduced(rank: int) -> dict:
    """The last rank alone has a gradient that is not finite, and nothing but the decision is shared."""
    variable = keras.Variable(np.ones(3, "float32"), dtype="float32")
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.1), loss_scale=8.0)
    optimizer.build([variable])
    optimizer.scale_loss(torch.ones(()))
    optimizer.apply([torch.full((3,), torch.inf if rank == RANKS - 1 else 1.0)], [variable])
    return {"value": variable.numpy().tolist(), "skipped": int(optimizer.skipped_steps.value)}


if __name__ == "__main__":
    main()
