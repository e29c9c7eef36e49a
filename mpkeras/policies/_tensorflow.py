"""The accelerators that TensorFlow sees."""

import tensorflow as tf

from mpkeras.policies.auto import Device


def accelerators() -> list[Device]:
    """Returns TPUs and GPUs. Does not initialize them: memory growth can still be set afterwards."""
    strategy = type(tf.distribute.get_strategy()).__name__
    # A remote TPU is no physical device here; its strategy is the sign.
    if strategy.startswith("TPUStrategy") or tf.config.get_visible_devices("TPU"):
        return [Device("tpu", "TPU")]
    devices = []
    for device in tf.config.get_visible_devices("GPU"):
        details = tf.config.experimental.get_device_details(device)
        capability = details.get("compute_capability")
        devices.append(
            Device(
                "gpu",
                details.get("device_name", "GPU"),
                compute_capability=tuple(capability) if capability else None,
            )
        )
    return devices
