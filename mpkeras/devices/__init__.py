"""The machine: its devices, what they compute natively, and how much memory is in use."""

import importlib

import keras


def backend_module():
    """Returns the module for the active backend: accelerators, waiting for the device, and its memory."""
    return importlib.import_module(f"mpkeras.devices._{keras.backend.backend()}")
