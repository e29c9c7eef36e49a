"""FSDP2 and Keras models, as one rank of two: what travels in the example, and what `fully_shard(model)` does not do.

Prints what happened as JSON.
"""

import json
import os
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"
sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "cluster"))

import keras
import torch
import torch_fsdp2
from torch.distributed.fsdp import fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import mpkeras


class Travels(TorchDispatchMode):
    """Notes the dtypes of what is gathered and of what is summed."""

    def __init__(self):
        super().__init__()
        self.dtypes = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            tensors = [value for value in torch.utils._pytree.tree_leaves((args, kwargs)) if torch.is_tensor(value)]
            # Nothing but the collectives' own tensors: those of no elements are barriers.
            found = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors if tensor.numel()}
            self.dtypes.setdefault(function._opname, set()).update(found)
        return function(*args, **(kwargs or {}))


def main():
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    keras.utils.set_random_seed(0)
    with mpkeras.policy_scope("mixed_float16"):
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(128), keras.layers.Dense(10)])
        plain = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
    whole = [variable.numpy() for variable in model.trainable_variables]
    x = torch.randn(2, 4, 64)
    (model(x.reshape(8, 64)).float().sum() / 2).backward()
    gradients = [variable.value.grad for variable in model.trainable_variables]
    module = torch.nn.Sequential(*map(torch_fsdp2.Weights, model.layers))
    fully_shard(module)
    with Travels() as travels:
        module(x[rank]).float().sum().backward()
    result = {"dtypes": {name: sorted(dtypes) for name, dtypes in travels.dtypes.items()}}
    pairs = zip(module.parameters(), gradients, strict=True)
    result["gradients_differ_by"] = max(float((p.grad.full_tensor() - g).norm() / g.norm()) for p, g in pairs)
    result["held"] = sum(p.to_local().numel() for p in module.parameters())
    result["held_by_keras"] = sum(variable.value.numel() for variable in model.trainable_variables)
    result["weights"] = sum(array.size for array in whole)
    for block in module:
        block.write_back()
    result["same_after"] = all((v.numpy() == a).all() for v, a in zip(model.trainable_variables, whole, strict=True))

    fully_shard(plain)
    plain(x[rank]).float().sum().backward()
    result["plain"] = {
        "gradients_of_parameters": [parameter.grad is not None for parameter in plain.parameters()],
        "kernel_gradient": float(plain.trainable_variables[0].value.grad.sum()),
    }
    torch.distributed.destroy_process_group()
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
