"""What a result was measured on: versions, backend, device, processor."""

import importlib.metadata
import os
import pathlib
import platform

import keras

from mpkeras._version import __version__


def environment() -> dict:
    """Returns the versions and the machine that a result belongs to."""
    backend = keras.backend.backend()
    return {
        "python": platform.python_version(),
        "mpkeras": __version__,
        **{name: version(name) for name in ("keras", backend, "numpy", "scikit-learn")},
        "backend": backend,
        "device": _device(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
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


def _device() -> str:
    """Returns where Keras puts a new tensor, in the backend's words."""
    device = str(keras.ops.zeros(()).device)
    return device.rsplit("device:", 1)[-1]  # TensorFlow: "/job:localhost/replica:0/task:0/device:CPU:0"


def _cpu_name() -> str:
    # `platform.processor()` is "x86_64" or empty on Linux.
    cpu_info = pathlib.Path("/proc/cpuinfo")
    if cpu_info.exists():
        for line in cpu_info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Returns the memory of this machine in bytes; 0 where the system does not tell (Windows)."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):
        return 0
