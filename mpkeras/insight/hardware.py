"""`hardware`: the devices of this process and what each computes natively."""

import importlib.metadata
import platform

import keras

from mpkeras.insight.report import Report
from mpkeras.policies.auto import CPU_INSTRUCTIONS, Device, choose, native_dtypes, probe

_DTYPES = ("float32", "bfloat16", "float16")


def hardware() -> "HardwareReport":
    """Returns what devices the active backend computes on, what each does natively, and the policy that suits.

    Initializes JAX's devices: with several processes, call `jax.distributed.initialize` before.

    Returns:
        A `HardwareReport`: `str()` is a table, `.to_dict()` what JSON can hold, `.plot()` a matplotlib figure.

    Example:

    >>> report = mpkeras.hardware()
    >>> print(report)
    Devices and what they multiply matrices in
    ...
    >>> report.policy in ("float32", "mixed_bfloat16", "mixed_float16")
    True
    """
    backend = keras.backend.backend()
    return HardwareReport(backend, probe(backend))


class HardwareReport(Report):
    """What `hardware` returns.

    Attributes:
        backend: The active Keras backend.
        devices: List of `mpkeras.policies.auto.Device`.
        policy: Name of the policy that `mixed_auto` stands for here.
        reason: Why, in a few words.

    Example:

    >>> report = mpkeras.hardware()
    >>> report.to_dict()["backend"] == report.backend == keras.backend.backend()
    True
    """

    title = "Devices and what they multiply matrices in"

    def __init__(self, backend: str, devices: list):
        self.backend = backend
        self.devices = list(devices)
        self.policy, self.reason = choose(self.devices, backend)

    def table(self):
        rows = [
            [device.kind, device.name or "-", _capability(device), ", ".join(native_dtypes(device))]
            for device in self.devices
        ]
        return ["Device", "Name", "Capability", "Natively"], rows

    def notes(self) -> list:
        versions = ", ".join(f"{name} {version}" for name, version in self._versions().items())
        return [f"mixed_auto is {self.policy} on the {self.backend} backend: {self.reason}.", versions]

    def to_dict(self) -> dict:
        return {
            "backend": self.backend,
            "versions": self._versions(),
            "devices": [
                {
                    "kind": device.kind,
                    "name": device.name,
                    "capability": _capability(device),
                    "native_dtypes": list(native_dtypes(device)),
                }
                for device in self.devices
            ],
            "policy": self.policy,
            "reason": self.reason,
        }

    def plot(self):
        """Returns a figure: a row for each device, a column for each dtype, filled where it is native."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 1.2 + 0.5 * len(self.devices)), layout="constrained")
        axes = figure.subplots()
        grid = [[float(dtype in native_dtypes(device)) for dtype in _DTYPES] for device in self.devices]
        axes.imshow(grid, cmap="Greens", vmin=0.0, vmax=1.5, aspect="auto")
        axes.set_xticks(range(len(_DTYPES)), _DTYPES)
        axes.set_yticks(range(len(grid)), [device.name or device.kind for device in self.devices])
        for i, row in enumerate(grid):
            for j, is_native in enumerate(row):
                axes.text(j, i, "native" if is_native else "-", ha="center", va="center")
        axes.set_title(f"mixed_auto: {self.policy}")
        return figure

    def _versions(self) -> dict:
        names = ("mpkeras", "keras", self.backend, "numpy")
        found = {"python": platform.python_version()}
        for name in names:
            try:
                found[name] = importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return found


def _capability(device: Device) -> str:
    if device.compute_capability is not None:
        return "compute capability {}.{}".format(*device.compute_capability)
    if device.architecture is not None:
        return device.architecture
    known = {name for names in CPU_INSTRUCTIONS.values() for name in names}
    return ", ".join(sorted(device.instruction_sets & known)) or "-"
