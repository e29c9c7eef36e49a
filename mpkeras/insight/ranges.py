"""The range of a tensor's values, and how much of them a dtype loses: overflow, underflow, rounded gradients."""

import dataclasses

import ml_dtypes
import numpy as np
from keras import ops

# Powers of two that are counted apart; what is beyond goes to the ends.
EXPONENTS = range(-45, 41)
# Of the gradient of a layer's weights, by its norm: what may be lost without a word. It is 1 % of the sum of squares,
# far less than what changes from batch to batch.
WORTH = 0.1
# Of the gradient at a single place. The losses of a hundred places, whose signs differ, add up to about `WORTH`.
SAFE = 0.01


@dataclasses.dataclass(frozen=True)
class Range:
    """The values of one tensor, or of several of one kind.

    Attributes:
        min, max: The smallest and largest finite value; `nan` if there is none.
        max_abs: The largest finite magnitude, 0.0 if there is none.
        nonfinite: Number of values that are inf or NaN.
        zeros: Number of values that are exactly zero.
        size: Number of values.
        exponents: int64 array, the count of values for each power of two in `EXPONENTS`: the finite ones except zeros.
    """

    min: float
    max: float
    max_abs: float
    nonfinite: int
    zeros: int
    size: int
    exponents: np.ndarray

    @classmethod
    def of(cls, arrays) -> "Range":
        """Returns the range of all values of `arrays`, of any float dtype; `None`s are left out."""
        values = [np.asarray(array, "float64").ravel() for array in arrays if array is not None]
        values = np.concatenate(values) if values else np.zeros(0)
        finite = values[np.isfinite(values)]
        nonzero = np.abs(finite[finite != 0])
        # 2**(e-1) <= value < 2**e in numpy's words.
        exponents = np.clip(np.frexp(nonzero)[1] - 1, EXPONENTS[0], EXPONENTS[-1]) - EXPONENTS[0]
        return cls(
            min=float(finite.min()) if finite.size else float("nan"),
            max=float(finite.max()) if finite.size else float("nan"),
            max_abs=float(nonzero.max()) if nonzero.size else 0.0,
            nonfinite=int(values.size - finite.size),
            zeros=int(finite.size - nonzero.size),
            size=int(values.size),
            exponents=np.bincount(exponents, minlength=len(EXPONENTS)),
        )

    def to_dict(self) -> dict:
        """Returns what JSON can hold, without the histogram."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[:-1]}
        return {name: None if value != value else value for name, value in values.items()}


def largest(dtype: str) -> float:
    """Returns the largest finite number of `dtype`: 65504 for float16."""
    return float(ml_dtypes.finfo(dtype).max)


def overflow_limit(dtype: str) -> float:
    """Returns the magnitude from which on `dtype` rounds to inf, half a unit above its largest number: 65520."""
    info = ml_dtypes.finfo(dtype)
    return 2.0**info.maxexp * (1 - float(info.eps) / 4)


def underflow_limit(dtype: str) -> float:
    """Returns the magnitude up to which `dtype` rounds to zero: half its smallest subnormal number."""
    return float(ml_dtypes.finfo(dtype).smallest_subnormal) / 2


def overflow_share(values, references) -> float:
    """Returns the share of values that are inf or NaN where the reference is finite."""
    lost = [~np.isfinite(np.asarray(v, "float64")) & np.isfinite(r) for v, r in _pairs(values, references)]
    return _share(lost)


def underflow_share(values, references) -> float:
    """Returns the share of values that are zero where the reference is not."""
    return _share([(np.asarray(v, "float64") == 0) & (r != 0) for v, r in _pairs(values, references)])


def _pairs(values, references):
    for value, reference in zip(values, references, strict=True):
        if value is not None and reference is not None and value.shape == reference.shape:
            yield value, np.asarray(reference, "float64")


def _share(masks) -> float:
    size = sum(mask.size for mask in masks)
    return float(sum(mask.sum() for mask in masks) / size) if size else 0.0


def rounded(grad, dtype: str, loss_scale: float):
    """Returns the gradient with the rounding that numbers below the smallest normal one of `dtype` get while scaled.

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


def float8_losses(arrays, dtype: str, factor: float | None = None) -> tuple[float, float]:
    """Returns the shares of values, zeros left out, that round to zero in float8, and that saturate.

    Args:
        arrays: Float arrays; what is not finite is left out, and so are `None`s.
        dtype: `"float8_e4m3fn"` or `"float8_e5m2"`.
        factor: What the values are multiplied by before they are rounded. `None`: each array is scaled by its largest
            value, as products in float8 scale by the present step; nothing saturates.
    """
    nonzero = zeroed = saturated = 0
    for array in arrays:
        values = np.zeros(0) if array is None else np.abs(np.asarray(array, "float64"))
        values = values[np.isfinite(values) & (values > 0)]
        if values.size:
            scaled = values * (2.0 ** np.floor(np.log2(largest(dtype) / values.max())) if factor is None else factor)
            nonzero += values.size
            zeroed += int(np.sum(scaled <= underflow_limit(dtype)))
            saturated += int(np.sum(scaled > largest(dtype)))
    return (zeroed / nonzero, saturated / nonzero) if nonzero else (0.0, 0.0)


def relative_error(values, references) -> float:
    """Returns the norm of the difference over the norm of the references; where one is not finite, it is left out."""
    difference = total = 0.0
    for value, reference in _pairs(values, references):
        value = np.asarray(value, "float64")
        both = np.isfinite(value) & np.isfinite(reference)
        difference += float(np.sum(np.square(value[both] - reference[both])))
        total += float(np.sum(np.square(reference[both])))
    return float(np.sqrt(difference / total)) if total else 0.0


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
