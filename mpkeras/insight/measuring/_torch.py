"""How torch is waited for, and what it says about the memory of a step."""

import torch

PEAK = "the device memory that a step takes at its peak, beside what is held between steps"


def wait(result, model):
    """As in `_jax.py`."""
    del result, model
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def runs_op_by_op(jit_compile: bool) -> bool:
    """As in `_jax.py`; what `torch.compile` made is chosen by the state of the layers, too."""
    del jit_compile
    return True


def step_memory(step, batch, run_once):
    """As in `_jax.py`."""
    del step, batch
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run_once()
    return torch.cuda.max_memory_allocated() - before, PEAK
