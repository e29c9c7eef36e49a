"""The meaning of `mixed_auto`: the 16-bit dtype that the devices compute natively, or float32."""

import dataclasses
import importlib
import logging
import re

import keras

from mpkeras.devices import cpu_info

logger = logging.getLogger("mpkeras")

_CPU_BFLOAT16 = ("amx_bf16", "avx512_bf16")
# Instruction sets that multiply in 16 bits: x86, and ARM's as Linux names them.
CPU_INSTRUCTIONS = {
    "bfloat16": ("amx_bf16", "avx512_bf16", "bf16", "svebf16"),
    "float16": ("amx_fp16", "avx512_fp16", "asimdhp"),
}
# The first NVIDIA GPUs that multiply float8: Ada and Hopper.
FLOAT8_CAPABILITY = (8, 9)


@dataclasses.dataclass(frozen=True)
class Device:
    """One device.

    Args:
        kind: `"tpu"`, `"gpu"` or `"cpu"`.
        name: What the vendor calls it, for people to read.
        compute_capability: Of an NVIDIA GPU, such as `(8, 0)`.
        architecture: Of an AMD GPU, such as `"gfx90a"`.
        instruction_sets: Of a CPU, the flags of `/proc/cpuinfo`.
    """

    kind: str
    name: str = ""
    compute_capability: tuple[int, int] | None = None
    architecture: str | None = None
    instruction_sets: frozenset[str] = frozenset()

    @property
    def has_float8_units(self) -> bool:
        """Whether it multiplies float8 (e4m3fn, e5m2) itself."""
        return self.compute_capability is not None and self.compute_capability >= FLOAT8_CAPABILITY


def choose(devices, backend: str) -> tuple[str, str]:
    """Returns the name of the policy that suits `devices`, and why.

    bfloat16 where it is native: it has float32's range and needs no loss scaling. Otherwise float16 where
    that is native, with loss scaling; otherwise float32. Of several devices the least able one decides, as
    all compute the same model. Accelerators hide the CPU, as Keras computes on them.
    """
    choices = [_choose_accelerator(device) for device in devices if device.kind != "cpu"]
    if choices:
        order = ("float32", "mixed_float16", "mixed_bfloat16")
        return min(choices, key=lambda choice: order.index(choice[0]))
    return _choose_cpu(devices, backend)


def native_dtypes(device: Device) -> tuple[str, ...]:
    """Returns the dtypes that `device` multiplies matrices in natively; `float32` is always one of them.

    References:
        NVIDIA: https://docs.nvidia.com/cuda/cuda-c-programming-guide/#compute-capabilities
        AMD: https://rocm.docs.amd.com/en/latest/reference/precision-support.html
    """
    if device.kind == "tpu":
        return ("float32", "bfloat16")
    if device.kind == "cpu":
        known = [dtype for dtype in ("bfloat16", "float16") if device.instruction_sets & set(CPU_INSTRUCTIONS[dtype])]
        return ("float32", *known)
    if device.compute_capability is not None:
        if device.compute_capability >= (8, 0):
            return ("float32", "bfloat16", "float16")
        return ("float32", "float16") if device.compute_capability >= (7, 0) else ("float32",)
    # ROCm may append features: "gfx90a:sramecc+:xnack-".
    architecture = (device.architecture or "").split(":")[0]
    # Matrix cores since MI100 (gfx908, gfx90a, gfx94x, gfx95x), WMMA since RDNA3 (gfx11xx).
    if re.fullmatch(r"gfx(908|90a|9[45]\w|1[12]\w\w)", architecture):
        return ("float32", "bfloat16", "float16")
    # Packed float16 arithmetic: Vega and RDNA.
    if re.fullmatch(r"gfx(90\w|10\w\w)", architecture):
        return ("float32", "float16")
    return ("float32",)


def resolve() -> tuple[str, str]:
    """Returns `choose(...)` for the devices of this process, and logs it. Initializes JAX's devices."""
    backend = keras.backend.backend()
    name, reason = choose(probe(backend), backend)
    logger.info("mixed_auto is %s on the %s backend: %s.", name, backend, reason)
    return name, reason


def probe(backend: str) -> list[Device]:
    """Returns the devices that `backend` computes on."""
    if backend in ("tensorflow", "jax", "torch"):
        # Imported here: only the active backend may be, and only once its devices are asked for.
        accelerators = importlib.import_module(f"mpkeras.devices._{backend}").accelerators()
        if accelerators:
            return accelerators
    return [Device("cpu", "CPU", instruction_sets=cpu_instruction_sets())]


def cpu_instruction_sets(cpuinfo: str = "/proc/cpuinfo") -> frozenset[str]:
    """Returns the CPU's flags as Linux names them; an empty set where it does not tell."""
    return frozenset(cpu_info("flags|Features", cpuinfo).split())  # "Features" on ARM.


def float8_units(devices, backend: str) -> tuple[bool, str]:
    """Returns whether products of `mixed_float8` are computed in float8 on all of `devices`, and why (not)."""
    if backend == "tensorflow":
        return False, "TensorFlow has no product in float8, and rounds operands that it multiplies in bfloat16"
    accelerators = [device for device in devices if device.kind != "cpu"]
    for device in accelerators or devices:
        if not device.has_float8_units:
            name = device.name if device.kind != "cpu" and device.name else f"a {device.kind.upper()}"
            return False, f"{name} has no units for float8 (e4m3 and e5m2), and operands are rounded on the way"
    return True, f"{accelerators[0].name} multiplies float8"


def parse_capability(text) -> tuple[int, int] | None:
    """Returns `(major, minor)` of a compute capability such as `"8.0"`, or `None` for anything else."""
    match = re.fullmatch(r"(\d+)\.(\d+)", str(text))
    return (int(match[1]), int(match[2])) if match else None


def _choose_accelerator(device: Device) -> tuple[str, str]:
    about = device.name or ("TPU" if device.kind == "tpu" else "this GPU")
    otherwise = f"nothing is known of what {about} does natively in 16 bits"
    if device.compute_capability is not None:
        major, minor = device.compute_capability
        about = f"{device.name or 'NVIDIA GPU'} (compute capability {major}.{minor})"
        otherwise = f"{about} is older than 7.0, where fast float16 begins"
    elif device.architecture is not None:
        about = f"{device.name or 'AMD GPU'} ({device.architecture.split(':')[0]})"
        otherwise = f"nothing is known of what {about} does natively in 16 bits"
    native = native_dtypes(device)
    if "bfloat16" in native:
        return "mixed_bfloat16", f"{about} multiplies matrices in bfloat16"
    if "float16" in native:
        return "mixed_float16", f"{about} is fast in float16 and has no native bfloat16; the loss is scaled"
    return "float32", otherwise


def _choose_cpu(devices, backend: str) -> tuple[str, str]:
    if backend != "tensorflow":
        return "float32", f"on a CPU, {backend} gains nothing dependable from 16 bits"
    for name in _CPU_BFLOAT16:
        if devices and all(name in device.instruction_sets for device in devices):
            return "mixed_bfloat16", f"the CPU has {name}, which TensorFlow uses"
    return "float32", f"the CPU has neither {' nor '.join(_CPU_BFLOAT16)}"
