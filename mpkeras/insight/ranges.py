"""How the magnitudes of a tensor lie in the range of a dtype."""

import dataclasses

import ml_dtypes
import numpy as np

# Powers of two that are counted apart; what is beyond goes to the ends.
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
