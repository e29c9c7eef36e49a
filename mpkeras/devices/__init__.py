"""The machine: what it is called, which versions run on it, and the module that knows the devices of the backend."""

import importlib
import importlib.metadata
import os
import platform
import re
from pathlib import Path

import keras

from mpkeras._version import __version__


def backend_module():
    """Returns the module for the active backend: accelerators, waiting for the device, and its memory."""
    return importlib.import_module(f"mpkeras.devices._{keras.backend.backend()}")


def environment() -> dict:
    """Returns the versions and the machine that a result belongs to."""
    backend = keras.backend.backend()
    return {
        "python": platform.python_version(),
        "mpkeras": __version__,
        **{name: version(name) for name in ("keras", backend, "numpy", "scikit-learn")},
        "backend": backend,
        # Where Keras puts a new tensor; TensorFlow: "/job:localhost/replica:0/task:0/device:CPU:0".
        "device": str(keras.ops.zeros(()).device).rsplit("device:", 1)[-1],
        "platform": platform.platform(),
        # `platform.processor()` is "x86_64" or empty on Linux.
        "cpu": cpu_info("model name") or platform.processor() or platform.machine(),
        "cpu_cores": os.cpu_count(),
    }


def version(distribution: str) -> str | None:
    """Returns the version of what pip installed; `None` where there is no such package."""
    if distribution == "keras":
        # Its nightly is another distribution, `keras-nightly`, of the same package.
        return keras.__version__
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu_info(field: str, path: str = "/proc/cpuinfo") -> str:
    """Returns what Linux says of the first CPU in a field, a regular expression; `""` where it says nothing."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""
    match = re.search(rf"^(?:{field})\s*:(.*)$", text, re.MULTILINE)
    return match[1].strip() if match else ""
