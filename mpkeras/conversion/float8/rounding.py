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


def rounded(values, dtype: str, over_devices=None, cast=ops.cast):
    """Returns bfloat16 values rounded to float8, and by what to multiply them to have the values back.

    Args:
        values: bfloat16 tensor.
        dtype: `"float8_e4m3fn"` or `"float8_e5m2"`.
        over_devices: Function from the largest magnitude here, a float32 scalar, to that on all devices. `None`: the
            values are those of all.
        cast: Function of values in range and `dtype` that rounds them to the nearest.

    Returns:
        `(values * scale` in `dtype, 1 / scale)`, the latter a float32 scalar: a power of two, such that the largest
        value is at most the largest finite one of `dtype` and more than half of it; NaN where a value is not finite,
        so that nothing that overflowed is hidden by the rounding.
    """
    largest = ops.cast(ops.max(ops.abs(values)), "float32")
    if over_devices is not None:
        largest = over_devices(largest)
    # As if a tensor of zeros were very small.
    ratio = LARGEST[dtype] / ops.maximum(largest, LARGEST[dtype] / _LARGEST_SCALE)
    # Its exponent alone: a bfloat16, whose bits are the upper half of those of a float32.
    scale = _devices.upper_halves(_devices.words(ratio) & _EXPONENT)
    inverse = ops.where(ops.isfinite(largest), 1.0 / ops.cast(scale, "float32"), float("nan"))
    return cast(values * scale, dtype), inverse
