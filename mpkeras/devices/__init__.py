"""What a machine is, and what it computes natively."""

import importlib

import keras


def backend_module():
    """Returns the module for the active backend: accelerators, waiting for the device, and its memory."""
    return importlib.import_module(f"mpkeras.devices._{keras.backend.backend()}")
