"""JAX's devices: their kinds, waiting for them, their memory, and a trial that needs JAX's tracing."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import topologies

from mpkeras.devices.native import Device, parse_capability


def accelerators() -> list[Device]:
    """Returns TPUs and GPUs. Initializes JAX: call `jax.distributed.initialize` before."""
    devices = map(_described, jax.local_devices())
    return [device for device in devices if device.kind in ("tpu", "gpu")]


def _described(device) -> Device:
    kind = "gpu" if device.platform in ("cuda", "rocm") else device.platform
    # "8.0" on NVIDIA, "gfx90a" on AMD.
    capability = str(getattr(device, "compute_capability", ""))
    architecture = capability if capability.startswith("gfx") else None
    return Device(kind, device.device_kind, parse_capability(capability), architecture)


# The device that operations are tried for; `None` for those that JAX runs on.
_trial_device = None


def try_for(device):
    """Lets `run_compiled` try operations for `device`, which need not be there: in a process that only compiles."""
    global _trial_device
    _trial_device = device


def run_compiled(function, tensor):
    """Runs `function(tensor)` under `jit`, or compiles it for the device of `try_for`."""
    if _trial_device is None:
        jax.jit(function)(tensor)
        return
    sharding = jax.sharding.SingleDeviceSharding(_trial_device)
    jax.jit(function).lower(jax.ShapeDtypeStruct(tensor.shape, tensor.dtype, sharding=sharding)).compile()


def has_float8_units() -> bool:
    """Whether what is traced now is for a GPU that multiplies float8 (e4m3fn, e5m2) itself."""
    chosen = jax.config.jax_default_device if _trial_device is None else _trial_device
    devices = jax.local_devices() if chosen is None or isinstance(chosen, str) else [chosen]
    return all(_described(device).has_float8_units for device in devices)


def wait(model, result=None):
    """Returns when the device has finished the steps so far, the one that `result` is of among them."""
    # Within an epoch the variables hold nothing, as `fit` passes the state from step to step.
    model.jax_state_sync()
    jax.block_until_ready((result, [variable.value for variable in model.variables]))


def peak_bytes() -> int | None:
    """Returns the most bytes that were in use on the fullest device; `None` where devices do not tell (CPU)."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return max((of_device.get("peak_bytes_in_use", 0) for of_device in stats), default=0) or None


def peak_bytes_of(run) -> int | None:
    """Returns the bytes that `run()` takes at its peak beside what is held before; `None` where nobody tells.

    JAX has no way to begin a new peak.
    """
    del run
    return None


# The dtype of 32 bits that integer arithmetic is done in here.
WORD = "uint32"


def words(values):
    """Returns the bits of float32 `values`, as `WORD`s."""
    return jax.lax.bitcast_convert_type(values, jnp.uint32)


def upper_halves(bits):
    """Returns the bfloat16 values whose bits are the upper halves of `bits`."""
    # As a cast, exact for such values and one that XLA sees through: of a bitcast it works out the whole update again
    # for each that reads the new value, and copies the old one to do so (JAX 0.10.2 on a CPU, 195 MB at 30 M values).
    return jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32).astype(jnp.bfloat16)


def widened(values):
    """Returns bfloat16 `values` in float32, by their bits: a cast may flush subnormal numbers to zero."""
    bits = jax.lax.bitcast_convert_type(values, jnp.uint16).astype(jnp.uint32) << 16
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def compile_devices(target, count: int) -> list:
    """Returns so many devices of a `Target` to compile for, whether they are there or not."""
    if target.platform == "cpu":
        return jax.devices("cpu")[:count]
    name, options = target.topology(count), {}
    if target.platform == "cuda":
        name, options = target.name, {"topology": name, "target_config": target.description()}
    return topologies.get_topology_desc(name, platform=target.platform, **options).devices[:count]


class MeshOfDevices(keras.distribution.DeviceMesh):
    """A `DeviceMesh` of devices that need not be there. Keras' own finds its devices among those of the process."""

    def __init__(self, shape, axis_names, devices):
        super().__init__(shape, axis_names, [f"{device.platform}:{device.id}" for device in devices])
        self._jax_mesh = jax.sharding.Mesh(np.array(devices).reshape(shape), axis_names)

    @property
    def backend_mesh(self):
        return self._jax_mesh
