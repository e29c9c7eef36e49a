"""Trains bfloat16 weights under `DistributedDataParallel`, one process of several, and prints the bits of the result.

Gradients are whole numbers and halves of them, whose sums are exact in any order.
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

import mpkeras
from mpkeras.training.step import TrainStep, make_train_step
from tests.distributed.small_state import BAD, X, bits, model_of

RANKS = 2
STEPS = 5


def mean_of_ranks(y_true, y_pred):
    """The sum over the rows of a rank: `DistributedDataParallel` makes the mean of the ranks' gradients."""
    return keras.ops.sum(keras.ops.cast(y_pred, "float32"))


def mean_of_one(y_true, y_pred):
    return mean_of_ranks(y_true, y_pred) / RANKS


def new(policy):
    model = model_of()
    base = mpkeras.get_policy(policy)
    # No rule: the one layer makes the outputs, and has small weights all the same.
    mpkeras.apply_policy(model, mpkeras.Policy(base.name, slot_dtype=base.slot_dtype, keep_float32=()))
    # A rate at which nearly every weight has to be rounded.
    inner = keras.optimizers.Adam(0.001, weight_decay=0.01)
    optimizer = mpkeras.LossScaleOptimizer(inner, slot_dtype=mpkeras.get_policy(policy).slot_dtype)
    return model, optimizer


def step(model, module, optimizer, x, loss_fn):
    """One step of a loop of one's own: `module` is the model, wrapped or not, or our step for it."""
    if isinstance(module, TrainStep):
        module(x, np.zeros((len(x), 16), "float32"))
        return
    model.zero_grad()
    optimizer.scale_loss(loss_fn(None, module(torch.tensor(x)))).backward()
    variables = model.trainable_variables
    optimizer.apply([v.value.grad for v in variables], variables)


def averaging_step(model, optimizer):
    """`make_train_step`, whose gradients torch averages over ranks as soon as each is there."""

    def average(parameter):
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= RANKS

    for variable in model.trainable_variables:
        variable.value.register_post_accumulate_grad_hook(average)
    return make_train_step(model, optimizer, mean_of_ranks)


def wrapped(model, optimizer):
    return torch.nn.parallel.DistributedDataParallel(model)


def trained(policy, wrap, rows, loss_fn, faults=()) -> dict:
    """Trains for `STEPS` and returns what is kept; before the steps in `faults` one with an infinite row is skipped."""
    model, optimizer = new(policy)
    first = [bits(v.numpy()) for v in model.weights]
    module = wrap(model, optimizer)
    for number in range(STEPS):
        if number in faults:
            step(model, module, optimizer, BAD[rows], loss_fn)
        step(model, module, optimizer, np.roll(X, number, axis=1)[rows], loss_fn)
    kept = [v for v in [*model.weights, *optimizer.inner_optimizer.variables] if "float" in v.dtype]
    return {
        "bits": [bits(v.numpy()) for v in kept],
        "dtypes": sorted({v.dtype for v in kept}),
        "moved": [bits(v.numpy()) for v in model.weights] != first,
        "skipped": int(optimizer.skipped_steps.value),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    policies = {"weights and slots": "bfloat16", "slots": mpkeras.Policy("mixed_bfloat16", slot_dtype="bfloat16")}
    # Without a process group: one device, with the joined batch.
    one = {name: trained(p, lambda model, optimizer: model, slice(None), mean_of_one) for name, p in policies.items()}
    torch.distributed.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{options.port}",
        rank=options.rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=60),
    )
    half = len(X) // RANKS
    rows = slice(options.rank * half, (options.rank + 1) * half)
    result = {}
    for name, policy in policies.items():
        result[name] = {"one": one[name]}
        for way, wrap in {"loop": wrapped, "step": averaging_step}.items():
            result[name][way] = trained(policy, wrap, rows, mean_of_ranks)
            result[name][f"{way}, with a fault"] = trained(policy, wrap, rows, mean_of_ranks, faults=(0, 3))
    torch.distributed.destroy_process_group()
    print("RESULT " + json.dumps(result))


if __name__ == "__main__":
    main()
