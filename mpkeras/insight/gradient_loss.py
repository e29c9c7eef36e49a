"""What 16 bits lose of a gradient, where they round small numbers to zero or to a few bits."""

import ml_dtypes
import numpy as np
from keras import ops

# Of the gradient of a layer's weights, by its norm: what may be lost without a word. It is 1 % of the sum of squares,
# far less than what changes from batch to batch.
WORTH = 0.1
# Of the gradient at a single place. The losses of a hundred places, whose signs differ, add up to about `WORTH`.
SAFE = 0.01


def rounded(grad, dtype: str, loss_scale: float):
    """Returns the gradient after it was below the smallest normal number of `dtype` while it was scaled.

    Larger numbers stay as they are: they are rounded to as many bits at every scale.

    Args:
        grad: float array, not scaled.
        dtype: Of the gradient while it is scaled.
        loss_scale: The factor on it.
    """
    scaled = np.asarray(grad, "float64") * loss_scale
    is_small = np.abs(scaled) < float(ml_dtypes.finfo(dtype).smallest_normal)
    return np.where(is_small, np.where(is_small, scaled, 0).astype(dtype).astype("float64"), scaled) / loss_scale


def lost_share(grads, dtype: str, loss_scale: float) -> float:
    """Returns the share of a gradient that is lost, from 0 to 1: the norm of what is lost over the norm of all of it.

    Exact zeros lose nothing, and many tiny numbers beside a large one next to nothing.

    Args:
        grads: List of float arrays, not scaled; together they are the gradient. What is not finite counts as zero.
        dtype: Of the gradient while it is scaled.
        loss_scale: The factor on it.
    """
    total = lost = 0.0
    for grad in grads:
        finite = np.where(np.isfinite(grad), grad, 0).astype("float64")
        total += float(np.sum(np.square(finite)))
        lost += float(np.sum(np.square(finite - rounded(finite, dtype, loss_scale))))
    return min(float(np.sqrt(lost / total)), 1.0) if total else 0.0


def smallest_safe_exponent(grads, dtype: str) -> int | None:
    """Returns the smallest power of two that, as loss scale, loses no more than `SAFE` of a gradient; `None` of zeros.

    From the count of numbers between two powers of two, and so right to about one power.

    Args:
        grads: List of float arrays; together they are the gradient.
        dtype: Of the gradient while it is scaled.
    """
    values = [np.abs(grad[np.isfinite(grad) & (grad != 0)], dtype="float64") for grad in grads]
    values = np.concatenate(values) if values else np.zeros(0)
    if not values.size:
        return None
    exponents = np.frexp(values)[1] - 1  # 2**e <= value < 2**(e + 1)
    first, last = int(exponents.min()), int(exponents.max())
    places = np.arange(first, last + 1, dtype="float64")
    squares = np.bincount(exponents - first, weights=np.square(values / values.max()))
    unit = int(np.log2(float(ml_dtypes.finfo(dtype).smallest_subnormal)))
    for scale in range(unit - last - 2, unit - first + 20):
        # The error is evenly spread over half a unit beside numbers of about 1.5 * 2**e; below that all is lost.
        share = np.minimum(1.0, 4.0 ** (unit - scale - places) / (12 * 1.5**2))
        if np.sum(share * squares) <= SAFE**2 * np.sum(squares):
            return scale
    return unit - first + 20


def with_rounded_gradient(tensor, dtype: str, loss_scale: float | None):
    """Returns `tensor` as it is, with a gradient that is rounded on its way back.

    Args:
        tensor: float32, of any shape.
        dtype: One whose smallest numbers float32 holds, too: float16.
        loss_scale: As for `rounded`; `None` rounds to the bits that `dtype` has at any scale.
    """
    info = ml_dtypes.finfo(dtype)
    # Not by casts, which a compiler may leave out.
    if loss_scale is None:
        split = 2.0 ** (23 - info.nmant) + 1.0

        def round_off(x):
            # Dekker's splitting: its first part has as many bits as `dtype`.
            return x * split - (x * split - x)
    else:
        normal, unit = float(info.smallest_normal) / loss_scale, float(info.smallest_subnormal) / loss_scale

        def round_off(x):
            # Below the smallest normal number all that `dtype` has are multiples of one unit.
            return ops.where(ops.abs(x) < normal, ops.round(x / unit) * unit, x)

    @ops.custom_gradient
    def through(x):
        def grad(*args, upstream=None):
            # TensorFlow and JAX pass it alone, torch behind the arguments by its name.
            return round_off(args[0] if upstream is None else upstream)

        return x + 0.0, grad

    return through(tensor)
