"""torch modules in a Keras model that follow the policy of their layer."""

import functools

import keras
import torch

from mpkeras._replaced import is_replaced, replace
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES


def let_module_follow(layer):
    """Runs the module in a `TorchModuleWrapper` under `torch.autocast` whenever the layer computes in 16 bits.

    Keras casts the layer's inputs, but a torch module multiplies them with its float32 weights as they are, and
    raises.
    """
    if is_replaced(layer, "call", "layer"):
        return
    call = layer.call

    @functools.wraps(call)
    def call_under_autocast(*args, **kwargs):
        if layer.compute_dtype not in SIXTEEN_BIT_DTYPES:
            return call(*args, **kwargs)
        device = next((tensor.device.type for tensor in keras.tree.flatten(args) if torch.is_tensor(tensor)), "cpu")
        with torch.autocast(device, dtype=getattr(torch, layer.compute_dtype)):
            return call(*args, **kwargs)

    replace(layer, "call", call_under_autocast, kind="layer")
