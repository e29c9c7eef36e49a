"""`Sharded`: weights, or the state of the optimizer alone, in parts on the devices that share a batch."""

import math

import keras

from mpkeras import _keras
from mpkeras._arguments import is_one_of

SHARD = ("weights", "state")
# The axes that may be split, the usual one first.
SPLIT_AXES = ("largest", "first", "last")
# The name of the one axis of the mesh: over it batches are split, and what is kept in parts.
AXIS = "batch"
# A smaller variable is whole on each device: a part of it would take as long to gather as all of it to read.
SMALLEST = 1024


class Sharded(keras.distribution.ModelParallel):
    """A `keras.distribution.ModelParallel` in which the shape of a variable says where its parts lie.

    An axis that the number of devices divides is split: the largest, and of axes of one size the last. Variables of
    fewer than 1,024 elements, and those without such an axis, are whole on each device.

    Args:
        device_mesh: A `keras.distribution.DeviceMesh` of one axis.
        shard: `"weights"`: weights, and the state of an optimizer as its weights. `"state"`: weights are whole, and the
            state that a `mpkeras.LossScaleOptimizer` keeps beside them is split.
        axis: Which axis is split, of those that can be: the `"largest"`, the `"first"` or the `"last"`.

    References:
        Zhao et al., 2023, PyTorch FSDP, https://arxiv.org/abs/2304.11277; `"state"`: stage 1 of Rajbhandari et al.,
        2019, ZeRO, https://arxiv.org/abs/1910.02054.
    """

    def __init__(self, device_mesh, shard: str, axis: str = "largest"):
        super().__init__(layout_map=keras.distribution.LayoutMap(device_mesh), batch_dim_name=AXIS)
        self.shard, self.axis = shard, axis

    def get_variable_layout(self, variable):
        """Returns the `TensorLayout` of a variable: what it was given, or what its shape says."""
        layout = _keras.layout_of(variable)
        if layout is not None:
            return layout
        return self.split(variable.shape) if self.shard == "weights" else self._laid_out([None] * len(variable.shape))

    def split(self, shape):
        """Returns the `TensorLayout` of a tensor of this shape in parts; of a small or odd one, whole."""
        devices = math.prod(self.device_mesh.shape)
        axes: list = [None] * len(shape)
        candidates = [axis for axis, size in enumerate(shape) if size % devices == 0]
        if math.prod(shape) >= SMALLEST and candidates:
            largest = max(candidates, key=lambda axis: (shape[axis], axis))
            axes[{"first": candidates[0], "last": candidates[-1]}.get(self.axis, largest)] = AXIS
        return self._laid_out(axes)

    def _laid_out(self, axes):
        return keras.distribution.TensorLayout(axes, self.device_mesh)


def mesh_of(devices) -> keras.distribution.DeviceMesh:
    """Returns a mesh of one axis.

    Args:
        devices: How many devices, their names, or `None` for all. A mesh of more than there are is for a compiler.

    Raises:
        ValueError: If there are none, or Keras does not run on JAX.
        TypeError: If they are neither a number nor names.
    """
    if keras.backend.backend() != "jax":
        raise ValueError(
            "Expected Keras on JAX, on which `keras.distribution` lays weights out. Received: "
            f"{keras.backend.backend()}. On torch use `torch.distributed.fsdp.fully_shard`; on TensorFlow a "
            "`tf.distribute` strategy, in which each replica has whole weights."
        )
    if isinstance(devices, int) and not isinstance(devices, bool):
        there = keras.distribution.list_devices()
        kind = there[0].partition(":")[0]
        devices = there[:devices] if devices <= len(there) else [f"{kind}:{i}" for i in range(devices)]
    elif devices is None:
        devices = keras.distribution.list_devices()
    is_names = isinstance(devices, (list, tuple)) and all(isinstance(name, str) for name in devices)
    if not is_names:
        raise TypeError(
            "Expected `devices` to be a number, a list of names as in `keras.distribution.list_devices()`, or None. "
            f"Received: devices={devices!r} of type {type(devices).__name__}."
        )
    if not devices:
        raise ValueError(f"Expected at least one device. Received: devices={devices!r}. Leave it out for all.")
    return keras.distribution.DeviceMesh((len(devices),), [AXIS], list(devices))


def check_shard(shard):
    """Raises `ValueError` unless `shard` says what is split."""
    if not is_one_of(shard, SHARD):
        raise ValueError(
            f"Expected `shard` to be one of {SHARD}. Received: shard={shard!r}. Use 'weights' to split the state of "
            "the optimizer, too."
        )
