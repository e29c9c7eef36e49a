"""Arrays that are finite or not, and the largest numbers of a dtype."""

import ml_dtypes
import numpy as np


def is_float(array) -> bool:
    return array.dtype.kind in "fc" or "float" in array.dtype.name


def is_finite(array) -> bool:
    """Returns whether all numbers of an array are finite."""
    if not is_float(array):
        return True
    return bool(np.isfinite(array if array.dtype.kind in "fc" else array.astype("float32")).all())


def all_finite(arrays) -> bool:
    """Returns whether all arrays are finite; `None`s are left out."""
    return all(is_finite(array) for array in arrays if array is not None)


def largest(dtype: str) -> float:
    """Returns the largest finite number of `dtype`: 65504 for float16."""
    return float(ml_dtypes.finfo(dtype).max)


def overflow_limit(dtype: str) -> float:
    """Returns the magnitude from which on `dtype` rounds to inf, half a unit above its largest number: 65520."""
    info = ml_dtypes.finfo(dtype)
    return 2.0**info.maxexp * (1 - float(info.eps) / 4)


def beyond(value: float, dtype: str) -> str:
    """Returns a number beyond the largest of `dtype` as text: short, but not so short that it is within."""
    texts = (f"{value:.{digits}g}" for digits in (3, 6, 9, 17))
    return next((text for text in texts if float(text) > largest(dtype)), f"{value:.17g}")


def max_abs(arrays) -> float:
    """Returns the largest finite magnitude, 0.0 if there is none."""
    return max((float(np.abs(a[np.isfinite(a)]).max(initial=0.0)) for a in arrays if a is not None), default=0.0)
