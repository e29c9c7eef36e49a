"""How TensorFlow is waited for, and what it says about the memory of a step."""

import tensorflow as tf

PEAK = "the device memory that a step takes at its peak, beside what is held between steps"


def wait(result, model):
    """As in `_jax.py`."""
    del result, model
    tf.test.experimental.sync_devices()


def runs_op_by_op(jit_compile: bool) -> bool:
    """As in `_jax.py`: here a step is a graph at least."""
    del jit_compile
    return False


def step_memory(step, batch, run_once):
    """As in `_jax.py`."""
    del step, batch
    devices = [device.name for device in tf.config.list_logical_devices("GPU")]
    if not devices:
        return None
    # "/device:GPU:0" -> "GPU:0"
    names = [name.partition("/device:")[2] for name in devices]
    for name in names:
        tf.config.experimental.reset_memory_stats(name)
    before = [tf.config.experimental.get_memory_info(name)["current"] for name in names]
    run_once()
    peaks = [tf.config.experimental.get_memory_info(name)["peak"] for name in names]
    return max(peak - held for peak, held in zip(peaks, before, strict=True)), PEAK
