"""What torch tells a callback: that the device is done, and how much memory it took."""

import torch


def wait(model):
    """As in `_jax.py`."""
    del model
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_bytes() -> int | None:
    """As in `_jax.py`."""
    if not torch.cuda.is_available():
        return None
    return max(torch.cuda.max_memory_allocated(index) for index in range(torch.cuda.device_count())) or None
