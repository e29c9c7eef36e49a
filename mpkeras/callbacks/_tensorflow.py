"""What TensorFlow tells a callback: that the device is done, and how much memory it took."""

import tensorflow as tf


def wait(model):
    """As in `_jax.py`."""
    del model
    tf.test.experimental.sync_devices()


def peak_bytes() -> int | None:
    """As in `_jax.py`."""
    names = [device.name.partition("/device:")[2] for device in tf.config.list_logical_devices("GPU")]
    return max((tf.config.experimental.get_memory_info(name)["peak"] for name in names), default=0) or None
