"""What torch sees of its devices."""

import torch

from mpkeras.devices.native import Device


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
