"""How JAX is waited for, and what XLA says about the memory of a step."""

import jax

TEMPORARY = "XLA's temporary buffers of the compiled step, beside weights, optimizer and batch"


def wait(result, model):
    """Returns when the device has finished the step that `result` is of."""
    jax.block_until_ready((result, [variable.value for variable in model.variables]))


def runs_op_by_op(jit_compile: bool) -> bool:
    """Whether such a step reads the layers' policies in every call, and not only in the first."""
    return not jit_compile


def step_memory(step, batch, run_once):
    """Returns `(bytes, what they are)` of a warm step, or `None` if nobody tells."""
    del run_once
    found = step.temporary_bytes(*batch)
    return None if found is None else (found, TEMPORARY)
