"""torch's devices: their kinds, waiting for them, their memory; and torch modules that follow a policy."""

import functools

import keras
import torch

from mpkeras.devices.native import Device
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES


def accelerators() -> list[Device]:
    """Returns GPUs."""
    if torch.cuda.is_available():
        return [_describe(torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        return [Device("gpu", "Apple GPU")]
    return []


def _describe(properties) -> Device:
    if torch.version.hip:
        return Device("gpu", properties.name, architecture=properties.gcnArchName)
    return Device("gpu", properties.name, compute_capability=(properties.major, properties.minor))


def let_module_follow(layer):
    """Runs the module in a `TorchModuleWrapper` under `torch.autocast` whenever the layer computes in 16 bits.

    Keras casts the layer's inputs, but a torch module multiplies them with its float32 weights as they are, and
    raises. Other layers are left alone, and so is one that follows already. `call` is covered on the
    instance, where no file holds it: a saved model is as it would be without.
    """
    if not isinstance(layer, keras.layers.TorchModuleWrapper) or "call" in vars(layer):
        return
    call = layer.call

    @functools.wraps(call)
    def call_under_autocast(*args, **kwargs):
        if layer.compute_dtype not in SIXTEEN_BIT_DTYPES:
            return call(*args, **kwargs)
        device = next((tensor.device.type for tensor in keras.tree.flatten(args) if torch.is_tensor(tensor)), "cpu")
        with torch.autocast(device, dtype=getattr(torch, layer.compute_dtype)):
            return call(*args, **kwargs)

    # Not by `setattr`, which Keras and torch both watch.
    vars(layer)["call"] = call_under_autocast


def wait(model, result=None):
    """As in `_jax.py`."""
    del model, result
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes() -> int | None:
    """As in `_jax.py`."""
    if not torch.cuda.is_available():
        return None
    return max(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count())) or None


def peak_bytes_of(run) -> int | None:
    """As in `_jax.py`."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - before
