"""`sharded`: a `keras.distribution` in which each device keeps a part of a model, by one argument."""

import keras

from mpkeras.seams import Blueprint, ModelView, check_model
from mpkeras.tools.forecast.forecast import forecast

# Rows for each device, where only a model says what it takes.
_ROWS = 8


def sharded(
    model=None, *, devices=None, shard: str = "weights", device: str | None = None, x=None
) -> keras.distribution.ModelParallel:
    """Returns a `keras.distribution` in which devices share each batch, and each keeps a part of what is trained.

    Set it before the model is made: `keras.distribution.set_distribution(mpkeras.sharded())`. Each device then holds
    one part in n of every weight and of what the optimizer keeps beside it; a layer that needs a weight gathers it, and
    gradients are summed where their weights lie. In which dtypes, `mpkeras.Policy` says (`gather_dtype`,
    `reduce_dtype`). An axis of a weight that n divides is split, the largest of them; weights of fewer than 1,024
    elements, and those without such an axis, are whole on each device.

    Args:
        model: A model, for which layouts that split other axes are compiled for `device`: the one is returned with
            which the fewest bytes travel in a step. The model itself is left as it is. `None`: the largest axis.
        devices: How many devices, their names as in `keras.distribution.list_devices`, or `None` for all that there
            are. For `mpkeras.forecast` a number may be larger than that.
        shard: `"weights"`: weights are split, and the state of the optimizer as they are. `"state"`: each device has
            all weights, and a part of the state; weights are gathered after each update.
        device: With a model the accelerator to compile for, as in `mpkeras.forecast`.
        x: Its inputs, as in `mpkeras.forecast`; by default eight rows for each device, where the model says
            all other sizes.

    Returns:
        A `keras.distribution.ModelParallel`.

    Raises:
        ValueError: If Keras does not run on JAX, an argument is out of range, or `device` comes without a model.
        TypeError: If an argument is of a wrong type.

    Example (JAX):

    >>> distribution = mpkeras.sharded(devices=8)
    >>> distribution.split((512, 4096)).axes, distribution.split((10,)).axes
    ((None, 'batch'), (None,))

    References:
        Zhao et al., 2023, PyTorch FSDP, https://arxiv.org/abs/2304.11277. Rajbhandari et al., 2019, ZeRO,
        https://arxiv.org/abs/1910.02054.
    """
    if device is not None and model is None:
        raise ValueError(
            f"Expected a model to compile for `device`. Received: device={device!r} and no model. Pass the model, or "
            "leave `device` out."
        )
    if model is not None:
        check_model(model)
    usual, *others = Blueprint.sharded(devices, shard)
    if model is None or device is None:
        return usual
    count = usual.device_mesh.shape[0]
    x = _inputs(model, _ROWS * count) if x is None else x
    policy, bytes_moved = ModelView(model).policy_in_training, {}
    for distribution in (usual, *others):
        report = forecast(model, x, device=device, devices=distribution, policies=[policy], verbose=0)
        (facts,) = report.policies.values()
        bytes_moved[distribution] = sum(collective["bytes"] for collective in facts["collectives"])
    return min(bytes_moved, key=lambda distribution: bytes_moved[distribution])


def _inputs(model, rows: int):
    """Returns shapes for what a model takes; `ValueError` where it leaves more open than the rows."""
    inputs = ModelView(model).inputs
    if inputs is None or any(None in tensor.shape[1:] for tensor in keras.tree.flatten(inputs)):
        raise ValueError(
            f"Expected `x` for a model that does not say all sizes of its inputs. Received: model '{model.name}' and "
            "no `x`. Pass a batch or its shape, such as x=(64, 128)."
        )
    return keras.tree.map_structure(lambda tensor: keras.KerasTensor((rows, *tensor.shape[1:]), tensor.dtype), inputs)
