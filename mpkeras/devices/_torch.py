"""torch's devices: their kinds, waiting for them, their memory."""

import torch
import torch.distributed

from mpkeras.devices.native import FLOAT8_CAPABILITY, Device


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


def has_float8_units(device) -> bool:
    """Whether a `torch.device` multiplies float8 (e4m3fn, e5m2) itself."""
    is_cuda = device.type == "cuda" and torch.version.hip is None
    return is_cuda and torch.cuda.get_device_capability(device) >= FLOAT8_CAPABILITY


def is_distributed() -> bool:
    """Whether this process is one of several: two attribute reads where it is not."""
    return (
        torch.distributed.is_available()
        and torch.distributed.is_initialized()
        and torch.distributed.get_world_size() > 1
    )


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
    bytes_at_begin = torch.cuda.memory_allocated()
    run()
    return torch.cuda.max_memory_allocated() - bytes_at_begin


def run_gradient(layer, x):
    """Runs `layer` on `x` forward and backward, whether or not gradients are switched off around it."""
    with torch.enable_grad():
        layer(x.detach().requires_grad_()).sum().backward()


# The dtype of 32 bits that integer arithmetic is done in here: torch's uint32 knows few operations.
WORD = "int32"


def words(values):
    """As in `_jax.py`."""
    return values.contiguous().view(torch.int32)


def upper_halves(bits):
    """As in `_jax.py`."""
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


def widened(values):
    """As in `_jax.py`."""
    return (values.contiguous().view(torch.int16).to(torch.int32) << 16).view(torch.float32)
