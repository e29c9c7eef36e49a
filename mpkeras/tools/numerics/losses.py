"""What 16 bits lose of a tensor's values."""

import dataclasses

import ml_dtypes
import numpy as np

from mpkeras.seams import dtypes
from mpkeras.tools.shared.ranges import largest

# Powers of two that a histogram counts; what is beyond goes to its ends.
EXPONENTS = range(-45, 41)


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
        numbers = [np.asarray(array, "float64").ravel() for array in arrays if array is not None]
        values = np.concatenate([np.zeros(0), *numbers])
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


def underflow_limit(dtype: str) -> float:
    """Returns the magnitude up to which `dtype` rounds to zero: half its smallest subnormal number."""
    return float(ml_dtypes.finfo(dtype).smallest_subnormal) / 2


def overflow_share(values, references) -> float:
    """Returns the share of values that are inf or NaN where the reference is finite."""
    return _share([~np.isfinite(v) & np.isfinite(r) for v, r in _pairs(values, references)])


def underflow_share(values, references) -> float:
    """Returns the share of values that are zero where the reference is not."""
    return _share([(v == 0) & (r != 0) for v, r in _pairs(values, references)])


def _pairs(values, references):
    for value, reference in zip(values, references, strict=True):
        if value is not None and reference is not None and value.shape == reference.shape:
            yield np.asarray(value, "float64"), np.asarray(reference, "float64")


def _share(masks) -> float:
    size = sum(mask.size for mask in masks)
    return float(sum(mask.sum() for mask in masks) / size) if size else 0.0


def rounded(grad, dtype: str, loss_scale: float):
    """Returns a gradient with the rounding that `dtype` gives what is below its smallest normal number while scaled.

    Larger numbers stay as they are: they are rounded to as many bits at every scale.
    """
    scaled = np.asarray(grad, "float64") * loss_scale
    is_small = np.abs(scaled) < float(ml_dtypes.finfo(dtype).smallest_normal)
    return np.where(is_small, np.where(is_small, scaled, 0).astype(dtype).astype("float64"), scaled) / loss_scale


def lost_share(grads, dtype: str, loss_scale: float) -> float:
    """Returns the share, by the norm, that rounding takes of a gradient, which all `grads` are together.

    Exact zeros lose nothing, and many tiny numbers beside a large one next to nothing.
    """
    return min(dtypes.relative_error([rounded(grad, dtype, loss_scale) for grad in grads], grads), 1.0)


def zeroed_share(arrays, dtype: str, factor: float | None = None) -> float:
    """Returns the share of values, zeros left out, that `dtype` rounds to zero.

    Args:
        arrays: Float arrays; what is not finite is left out, and so are `None`s.
        dtype: A 16-bit dtype, or `"float8_e4m3fn"` or `"float8_e5m2"`.
        factor: The factor of the values before they are rounded. `None`: each array is scaled by its largest
            value, as products in float8 scale.
    """
    nonzero = zeroed = 0
    for array in arrays:
        values = np.zeros(0) if array is None else np.abs(np.asarray(array, "float64"))
        values = values[np.isfinite(values) & (values > 0)]
        if values.size:
            scaled = values * (2.0 ** np.floor(np.log2(largest(dtype) / values.max())) if factor is None else factor)
            nonzero += values.size
            zeroed += int(np.sum(scaled <= underflow_limit(dtype)))
    return zeroed / nonzero if nonzero else 0.0
