"""`hardware`: the devices of this process and what each computes natively."""

import functools
import platform
import time

import keras
from keras import ops

from mpkeras.seams import devices, native
from mpkeras.tools.shared.report import Figure, Report, make_figure

_DTYPES = ("float32", "bfloat16", "float16")
# Rows and columns of the matrices of the probe: the smallest at which the product takes longer than calling for it.
_PROBE_SIZE = 256
_PROBE_ROUNDS = 5


def hardware() -> "HardwareReport":
    """Returns what devices the active backend computes on, what each does natively, and the policy that suits.

    A CPU may have instructions for 16 bits that the backend's kernels do not gain from. So on a CPU a product of
    256 x 256 matrices, of about a millisecond, is timed in each dtype once in a process; a dtype that is slower than
    float32 there is not called native.

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
    devices = native.probe(backend)
    on_cpu = {dtype for device in devices if device.kind == "cpu" for dtype in native.native_dtypes(device)}
    probed = tuple(dtype for dtype in _DTYPES if dtype in on_cpu and dtype != "float32")
    return HardwareReport(backend, devices, speeds=probed_speeds(probed) if probed else {})


@functools.cache
def probed_speeds(dtypes: tuple) -> dict:
    """Returns how many times as fast as in float32 a product of matrices is, by dtype; measured once in a process."""
    matrices = {dtype: ops.ones((_PROBE_SIZE, _PROBE_SIZE), dtype) for dtype in ("float32", *dtypes)}
    times: dict = {dtype: [] for dtype in matrices}
    for number in range(1 + _PROBE_ROUNDS):
        for dtype, matrix in matrices.items():
            started = time.perf_counter()
            # Copied to NumPy, so that it is done.
            ops.convert_to_numpy(ops.matmul(matrix, matrix))
            if number:  # the first one compiles
                times[dtype].append(time.perf_counter() - started)
    return {dtype: min(times["float32"]) / min(times[dtype]) for dtype in dtypes}


class HardwareReport(Report):
    """What `hardware` returns.

    Attributes:
        backend: The active Keras backend.
        devices: List of `mpkeras.devices.native.Device`.
        policy: Name of the policy that `mixed_auto` stands for here.
        reason: Why, in a few words.
        speeds: `{dtype: times as fast as float32}` of a product of matrices on the CPU, where that was timed.

    Example:

    >>> report = mpkeras.hardware()
    >>> report.to_dict()["backend"] == report.backend == keras.backend.backend()
    True
    """

    title = "Devices and what they multiply matrices in"

    def __init__(self, backend: str, devices: list, speeds: dict | None = None):
        self.backend = backend
        self.devices = list(devices)
        self.speeds = dict(speeds or {})
        self.policy, self.reason = native.choose(self.devices, backend)

    def table(self) -> tuple[list, list]:
        rows = [
            [device.kind, device.name or "-", _capability(device), ", ".join(self.native_dtypes(device))]
            for device in self.devices
        ]
        return ["Device", "Name", "Capability", "Natively"], rows

    def native_dtypes(self, device: native.Device) -> list:
        """Returns the dtypes that `device` has instructions for, without those that the probe found slower.

        Args:
            device: One of `devices`.

        Example:

        >>> report = mpkeras.hardware()
        >>> "float32" in report.native_dtypes(report.devices[0])
        True
        """
        return [
            dtype
            for dtype in native.native_dtypes(device)
            if device.kind != "cpu" or self.speeds.get(dtype, 1.0) >= 1.0
        ]

    def notes(self) -> list:
        versions = ", ".join(f"{name} {version}" for name, version in self._versions().items())
        chosen = f"mixed_auto is {self.policy} on the {self.backend} backend: {self.reason}."
        if self.speeds.get(self.policy.removeprefix("mixed_"), 1.0) < 1.0:
            # It goes by the device alone, and so means the same in every run.
            chosen += " The probe did not find that faster: `mpkeras.advise` measures a model of yours."
        return [chosen, *self._about_probe(), versions]

    def _about_probe(self) -> list:
        if not self.speeds:
            return []
        speeds = ", ".join(f"{speed:.2f} times as fast in {dtype}" for dtype, speed in self.speeds.items())
        slower = " and ".join(dtype for dtype, speed in self.speeds.items() if speed < 1.0)
        size = f"{_PROBE_SIZE} x {_PROBE_SIZE}"
        lines = [f"Probed on the CPU: a product of {size} matrices, compared with float32, is {speeds}."]
        if slower:
            lines.append(
                f"It has instructions for {slower}, which {self.backend} gains nothing from: not called native."
            )
        return lines

    def to_dict(self) -> dict:
        return {
            "backend": self.backend,
            "versions": self._versions(),
            "devices": [
                {
                    "kind": device.kind,
                    "name": device.name,
                    "capability": _capability(device),
                    "native_dtypes": self.native_dtypes(device),
                }
                for device in self.devices
            ],
            "probed_speeds": self.speeds,
            "policy": self.policy,
            "reason": self.reason,
        }

    def plot(self) -> Figure:
        """Returns a figure: a row for each device, a column for each dtype, filled where it is native."""
        figure = make_figure(figsize=(6, 1.2 + 0.5 * len(self.devices)))
        axes = figure.subplots()
        grid = [[float(dtype in self.native_dtypes(device)) for dtype in _DTYPES] for device in self.devices]
        axes.imshow(grid, cmap="Greens", vmin=0.0, vmax=1.5, aspect="auto")
        axes.set_xticks(range(len(_DTYPES)), _DTYPES)
        axes.set_yticks(range(len(grid)), [device.name or device.kind for device in self.devices])
        for i, row in enumerate(grid):
            for j, is_native in enumerate(row):
                axes.text(j, i, "native" if is_native else "-", ha="center", va="center")
        axes.set_title(f"mixed_auto: {self.policy}")
        return figure

    def _versions(self) -> dict:
        versions = {name: devices.version(name) for name in ("mpkeras", "keras", self.backend, "numpy")}
        return {
            "python": platform.python_version(),
            **{name: text for name, text in versions.items() if text is not None},
        }


def _capability(device: native.Device) -> str:
    if device.compute_capability is not None:
        return "compute capability {}.{}".format(*device.compute_capability)
    if device.architecture is not None:
        return device.architecture
    known = {name for names in native.CPU_INSTRUCTIONS.values() for name in names}
    return ", ".join(sorted(device.instruction_sets & known)) or "-"
