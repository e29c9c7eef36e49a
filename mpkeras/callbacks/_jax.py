"""What JAX tells a callback: that the device is done, and how much memory it took."""

import jax


def wait(model):
    """Returns when the device has finished the steps so far; within an epoch, too."""
    # The variables hold nothing while `fit` passes the state from step to step.
    model.jax_state_sync()
    jax.block_until_ready([variable.value for variable in model.trainable_variables])


def peak_bytes() -> int | None:
    """Returns the most bytes that were in use on the fullest device; `None` where devices do not tell (CPU)."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return max((found.get("peak_bytes_in_use", 0) for found in stats), default=0) or None
