"""How far results in 16 bits are from those in float32."""

import itertools
import math
from collections.abc import Callable

import keras
import numpy as np

from mpkeras.policies.dtypes import FLOAT_DTYPES, relative_error, tensor_dtype

# Rounding alone makes 0.001 in float16 and 0.01 in bfloat16.
_TOO_FAR = 0.1


def lost_share(results, references, again: Callable) -> float | None:
    """Returns how far the floats of `results` are from `references`, where that is a tenth and more; otherwise `None`.

    Args:
        results, references: Structures of tensors, the same in 16 bits and in float32.
        again: Function that returns the references of another run. Numbers that differ from run to run in float32,
            too, are drawn, and not lost.
    """
    error = _difference(results, references)
    return error if error > _TOO_FAR and _difference(again(), references) < _TOO_FAR / 10 else None


def _difference(results, references) -> float:
    """Returns the norm of the difference of the floats in two structures over that of `references`.

    It is inf where numbers that are finite in `references` are beyond the dtype of `results`, and 0.0 where there are
    not as many tensors: what a call adds to the losses may depend on what it computes.
    """
    values, references = _floats(results), _floats(references)
    if len(values) != len(references):
        return 0.0
    pairs = zip(values, references, strict=True)
    return math.inf if any(itertools.starmap(_is_beyond, pairs)) else relative_error(values, references)


def _is_beyond(values, references) -> bool:
    """Whether numbers that are finite in float32 are not; those that hide others in a softmax may be -inf."""
    return values.shape == references.shape and bool(
        np.any((np.isnan(values) | (values == np.inf)) & np.isfinite(references))
    )


def _floats(structure) -> list:
    # Not from 16 bits: TensorFlow makes no array of a scalar in bfloat16.
    return [
        keras.ops.convert_to_numpy(keras.ops.cast(value, "float32"))
        for value in keras.tree.flatten(structure)
        if tensor_dtype(value) in FLOAT_DTYPES
    ]
