"""Values in float8: what they are multiplied by before they are rounded."""

import importlib

import keras
from keras import ops

OPERAND_DTYPE, GRADIENT_DTYPE = "float8_e4m3fn", "float8_e5m2"
# The largest finite values of these dtypes.
LARGEST = {OPERAND_DTYPE: 448.0, GRADIENT_DTYPE: 57344.0}
# Beyond it 1 / scale would be subnormal, which devices may take for zero.
_LARGEST_SCALE = 2.0**120
_EXPONENT = 0x7F800000

_devices = importlib.import_module(f"mpkeras.devices._{keras.backend.backend()}")


@ops.custom_gradient
def once(gradient, *tied):
    """Returns `gradient`, which cannot be differentiated again: through float8 that would be nothing, silently.

    Args:
        gradient: Tensor.
        tied: Tensors that it depends on, where the backend does not see that it does.
    """

    def refuse(*args, upstream=None):
        raise ValueError(
            "Expected a first derivative of products in float8. Received: a derivative of their gradient, as a penalty "
            "on gradients or a differential equation needs. Keep the layers in 16 bits, by `keep_16_bits` or under "
            "'mixed_bfloat16'."
        )

    return gradient, refuse


def tie(inputs, kernel):
    """Returns a scalar that depends on both matrices, for `once`."""
    return ops.sum(inputs[:1, :1]) + ops.sum(kernel[:1, :1])


def rounded(values, dtype: str, over_devices=None, cast=ops.cast, by_row: bool = False):
    """Returns bfloat16 values rounded to float8, and by what to multiply them to have the values back.

    A value that is not finite becomes NaN, and no other one: the scale is that of the finite values.

    Args:
        values: bfloat16 tensor.
        dtype: `"float8_e4m3fn"` or `"float8_e5m2"`.
        over_devices: Function from the largest magnitude here, a float32 scalar, to that on all devices. `None`: the
            values are those of all.
        cast: Function of values in range and `dtype` that rounds them to the nearest.
        by_row: Whether each row of a matrix is scaled by its own largest value.

    Returns:
        `(values * scale` in `dtype, 1 / scale)`. The second is in float32, a scalar or of the shape `(rows, 1)`: a
        power of two, such that the largest finite value is at most the largest one of `dtype` and more than half of it.
    """
    is_finite = ops.isfinite(values)
    magnitudes = ops.where(is_finite, ops.abs(values), ops.zeros_like(values))
    over_rows = {"axis": -1, "keepdims": True} if by_row else {}
    present = ops.cast(ops.max(magnitudes, **over_rows), "float32")
    if over_devices is not None:
        present = over_devices(present)
    # As if a tensor of zeros were very small.
    factor = _power_of_two(LARGEST[dtype] / ops.maximum(present, LARGEST[dtype] / _LARGEST_SCALE))
    scaled = values * factor
    # NaN for inf as well: e4m3 has no inf, and the casts of some devices saturate.
    scaled = ops.where(is_finite, scaled, ops.full_like(scaled, float("nan")))
    return cast(scaled, dtype), 1.0 / ops.cast(factor, "float32")


def _power_of_two(ratio):
    """Returns the largest power of two up to `ratio`: its exponent alone, a bfloat16, whose bits are the upper half."""
    return _devices.upper_halves(_devices.words(ratio) & _EXPONENT)
