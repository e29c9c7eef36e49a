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


def rounded(values, dtype: str, history=(), over_devices=None, cast=ops.cast, by_row: bool = False):
    """Returns bfloat16 values rounded to float8, and by what to multiply them to have the values back.

    A value that is not finite becomes NaN, and no other one: the scale is that of the finite values.

    Args:
        values: bfloat16 tensor.
        dtype: `"float8_e4m3fn"` or `"float8_e5m2"`.
        history: `()`: the values are scaled by the largest of them. `(scale, amax_history)` as Keras keeps them,
            float32 tensors of the shapes `()` and `(length,)`: by the largest of past steps; larger values saturate.
        over_devices: Function from the largest magnitude here, a float32 scalar, to that on all devices. `None`: the
            values are those of all.
        cast: Function of values in range and `dtype` that rounds them to the nearest.
        by_row: Whether each row of a matrix is scaled by its own largest value. With a `history` it means nothing.

    Returns:
        `(values * scale` in `dtype, 1 / scale, next history)`. The second is in float32, a scalar or of the shape
        `(rows, 1)`: a power of two, such that the largest finite value is at most the largest one of `dtype` and more
        than half of it. The third is `history` after this step, as `keras.layers.Dense` under `"float8"` computes it.
    """
    is_finite = ops.isfinite(values)
    magnitudes = ops.where(is_finite, ops.abs(values), ops.zeros_like(values))
    over_rows = {"axis": -1, "keepdims": True} if by_row and not history else {}
    present = ops.cast(ops.max(magnitudes, **over_rows), "float32")
    if over_devices is not None:
        present = over_devices(present)
    if history:
        factor, scale = factor_by_history(history, dtype)
        scaled = ops.clip(values * factor, -LARGEST[dtype], LARGEST[dtype])
        history = (scale, keras.quantizers.compute_float8_amax_history(present, history[1]))
    else:
        # As if a tensor of zeros were very small.
        factor = _power_of_two(LARGEST[dtype] / ops.maximum(present, LARGEST[dtype] / _LARGEST_SCALE))
        scaled = values * factor
    # NaN for inf as well: e4m3 has no inf, and the casts of some devices saturate.
    scaled = ops.where(is_finite, scaled, ops.full_like(scaled, float("nan")))
    return cast(scaled, dtype), 1.0 / ops.cast(factor, "float32"), history


def factor_by_history(history, dtype: str):
    """Returns what values are multiplied by after this history, a bfloat16 scalar, and the scale that Keras keeps."""
    scale, past = history
    # Keras divides by its scale.
    scale = keras.quantizers.compute_float8_scale(ops.max(past), scale, LARGEST[dtype])
    return _power_of_two(ops.minimum(1.0 / scale, _LARGEST_SCALE)), scale


def _power_of_two(ratio):
    """Returns the largest power of two up to `ratio`: its exponent alone, a bfloat16, whose bits are the upper half."""
    return _devices.upper_halves(_devices.words(ratio) & _EXPONENT)


def passing_on(outputs, state):
    """Returns `outputs`; `state`, which takes its gradients as its new values, stays as it is."""
    if not state:
        return outputs

    @ops.custom_gradient
    def pass_on(outputs, *state):
        def backward(*args, upstream=None):
            return ((args[0] if upstream is None else upstream), *state)

        return outputs, backward

    return pass_on(outputs, *state)
