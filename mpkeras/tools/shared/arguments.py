"""Arguments that tools alone take: a budget of time, and arrays whose dtypes are read."""

import math
import numbers

import keras

_LEAVE_OUT = "Leave it out for the default."


def check_seconds(name: str, value, remedy: str = _LEAVE_OUT):
    """Raises `ValueError` unless `value` is a positive and finite number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
        raise ValueError(f"Expected `{name}` to be a positive number of seconds. Received: {name}={value!r}. {remedy}")


def dtype_of(value) -> str:
    """Returns the dtype of an array or a tensor as Keras calls it, `"string"` of text."""
    # NumPy has text as characters or as objects, for which Keras has no name.
    return "string" if getattr(value.dtype, "kind", "f") in "OSU" else keras.backend.standardize_dtype(value.dtype)
