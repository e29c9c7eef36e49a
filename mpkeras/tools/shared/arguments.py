"""Arguments that tools alone take: a budget of time, a model that runs, a batch, and arrays whose dtypes are read."""

import math
import numbers

import keras

from mpkeras.seams import ConvertedLayer

_LEAVE_OUT = "Leave it out for the default."


def checked_seconds(name: str, value, remedy: str = _LEAVE_OUT) -> float:
    """Returns `value` as a `float`. Raises `ValueError` unless it is a positive and finite number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
        raise ValueError(f"Expected `{name}` to be a positive number of seconds. Received: {name}={value!r}. {remedy}")
    return float(value)


def check_verbose(value):
    """Raises `ValueError` unless `value` is 0 or 1, or `False` or `True`: any text would count as 1."""
    if not isinstance(value, numbers.Integral) or value not in (0, 1):
        raise ValueError(f"Expected `verbose` to be 0 or 1. Received: verbose={value!r}. Leave it out for 1.")


def check_call(model, remedy: str):
    """Raises `ValueError` unless `model` can be run on a batch. `remedy` is a sentence."""
    if ConvertedLayer(model).lacks_call:
        raise ValueError(
            f"Expected a model with a `call`, which can be run on one batch. Received: model '{model.name}', which has "
            f"none. {remedy}"
        )


def rows_of_batch(x) -> set:
    """Returns the numbers of rows of the arrays in `x`, of which some may be left out as `None`.

    Raises:
        ValueError: Unless it is arrays, each of at least one row.
    """
    shapes = [tuple(getattr(value, "shape", ())) for value in keras.tree.flatten(x) if value is not None]
    rows = {shape[0] if shape else 0 for shape in shapes}
    if not rows or not all(rows):
        raise ValueError(
            "Expected `x` to be one batch: arrays of at least one example. Received: "
            f"x={type(x).__name__} of shapes {shapes[:3]}. Pass for example `x[:128]`, or "
            "the first batch of a dataset."
        )
    return rows


def dtype_of(value) -> str:
    """Returns the dtype of an array or a tensor as Keras calls it, `"string"` of text."""
    # NumPy has text as characters or as objects, for which Keras has no name.
    return "string" if getattr(value.dtype, "kind", "f") in "OSU" else keras.backend.standardize_dtype(value.dtype)
