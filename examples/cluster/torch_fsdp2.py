"""FSDP2 splits weights, gradients and optimizer state over the ranks: `torchrun --nproc_per_node 2 torch_fsdp2.py`.

`fully_shard` replaces the parameters of torch modules, and Keras' layers read their `keras.Variable`s: after
`fully_shard(model)` each rank would train by itself, without an error. So a small torch module holds the weights of
each layer and hands them to it. The model must be a chain of layers without statistics or losses of their own. Clip by
value or not at all: the optimizer knows the norms of the rank's own parts alone.
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import mpkeras

BATCH = 64


class Weights(torch.nn.Module):
    """A Keras layer whose weights are parameters of a torch module, for `fully_shard` to split."""

    def __init__(self, layer):
        super().__init__()
        # In a list: as a submodule it would give FSDP2 the weights a second time.
        self.layers = [layer]
        self.weights = torch.nn.ParameterList(variable.value for variable in layer.trainable_variables)
        policy = layer.dtype_policy
        # What travels: weights in the dtype that the layer computes in, the sums of gradients in float32.
        dtypes = MixedPrecisionPolicy(getattr(torch, policy.compute_dtype), reduce_dtype=torch.float32)
        fully_shard(self, mp_policy=dtypes)
        for variable in layer.trainable_variables:
            # The whole weight, of which FSDP2 has taken the rank's part.
            variable.value.data = variable.value.new_empty(0)

    def forward(self, inputs):
        (layer,) = self.layers
        outputs, _ = layer.stateless_call(list(self.weights), layer.non_trainable_variables, inputs, training=True)
        return outputs

    def write_back(self):
        """Gives the Keras layer the trained weights, whole on every rank."""
        for variable, weight in zip(self.layers[0].trainable_variables, self.weights, strict=True):
            variable.value.data = weight.full_tensor()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
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
    module = torch.nn.Sequential(*map(Weights, model.layers))
    fully_shard(module)
    # The rank's own part of each weight as a Keras variable: the optimizer's state is split as well.
    parts = [keras.Variable(torch.nn.Parameter(p.to_local())) for p in module.parameters()]
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.Adam(0.01))
    optimizer.build(parts)
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
            # Of each weight the gradient of the rank's own part; the decision to skip is taken by all ranks.
            optimizer.apply([p.grad.to_local() for p in module.parameters()], parts)
    for block in module:
        block.write_back()
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
