"""The dtypes of a policy, and what policy names mean to Keras."""

import math

import keras
import numpy as np
from keras import ops

from mpkeras import _keras
from mpkeras._arguments import is_one_of

FLOAT_DTYPES = ("float16", "bfloat16", "float32", "float64")
SIXTEEN_BIT_DTYPES = ("float16", "bfloat16")
# Weights and optimizer state may be stored in it to save memory. The range of float16 is too small.
SMALL_DTYPE = "bfloat16"
SLOT_DTYPES = ("auto", "float32", SMALL_DTYPE)


def stock_name(compute_dtype: str, variable_dtype: str) -> str | None:
    """Returns the name of the Keras policy with these dtypes, or `None` if there is none."""
    if compute_dtype == variable_dtype:
        return compute_dtype
    if variable_dtype == "float32" and compute_dtype in SIXTEEN_BIT_DTYPES:
        return f"mixed_{compute_dtype}"
    return None


def float_dtype(dtype) -> str | None:
    """Returns the name of a float dtype in any form that Keras takes; `None` for anything else."""
    try:
        name = keras.backend.standardize_dtype(dtype)
    except (ValueError, TypeError):
        return None
    return name if name in FLOAT_DTYPES else None


def check_dtype(argument: str, dtype) -> str:
    name = float_dtype(dtype)
    if name is None:
        raise ValueError(
            f"Expected `{argument}` to be one of {', '.join(FLOAT_DTYPES)}. Received: {argument}={dtype!r}. "
            "For float8 and integers build the model first, then call `model.quantize`."
        )
    return name


def check_slot_dtype(slot_dtype) -> str:
    """Returns `slot_dtype`. Raises `ValueError` unless the state of an optimizer can be stored in it."""
    if not is_one_of(slot_dtype, SLOT_DTYPES):
        raise ValueError(
            f"Expected `slot_dtype` to be one of {SLOT_DTYPES}. Received: slot_dtype={slot_dtype!r}. Use 'bfloat16' "
            "for half the memory (the range of float16 is too small for squares of gradients), or 'auto' for the dtype "
            "of the weights."
        )
    return slot_dtype


def check_keras_name(name: str, compute_dtype: str, variable_dtype: str):
    """Raises `ValueError` if `name` stands for other dtypes in Keras: a reloaded layer gets those."""
    dtypes = keras_dtypes(name)
    if dtypes is not None and dtypes != (compute_dtype, variable_dtype):
        raise ValueError(
            f"Expected {name!r} to stand for the dtypes it has in Keras, compute_dtype={dtypes[0]!r} and "
            f"variable_dtype={dtypes[1]!r}. Received: compute_dtype={compute_dtype!r}, "
            f"variable_dtype={variable_dtype!r}. Give the policy a name of its own."
        )


def keras_dtypes(name: str) -> tuple[str, str] | None:
    """Returns the compute and variable dtype that `name` has in Keras, or `None`."""
    try:
        policy = keras.DTypePolicy(name)
    except ValueError:
        return None
    return policy.compute_dtype, policy.variable_dtype


def tensor_dtype(value) -> str | None:
    """Returns the dtype of a tensor, symbolic or not; `None` for anything else, variables included."""
    if ops.is_tensor(value) or isinstance(value, keras.KerasTensor):
        return keras.backend.standardize_dtype(value.dtype)
    return None


def widen(value):
    """Returns a 16-bit tensor in float32, with its mask; anything else as it is."""
    return _keras.cast_with_mask(value, "float32") if tensor_dtype(value) in SIXTEEN_BIT_DTYPES else value


def bytes_of(shape, dtype: str) -> int:
    """Returns the bytes of a tensor. Raises `TypeError` where a dimension is not known."""
    # "bfloat16" and "int32" end in their size in bits; "bool" does not. "float8_e4m3fn" has it in the middle.
    bits = 8 if dtype == "bool" else int(dtype.split("_")[0].lstrip("abcdefghijklmnopqrstuvwxyz"))
    return math.prod(shape) * bits // 8


def as_array(value) -> np.ndarray:
    """Returns `value` as an array; float64, NumPy's default and not what was meant, becomes Keras' float.

    Raises:
        TypeError: If it is none, but what makes batches.
    """
    try:
        array = np.asarray(value)
    except ValueError:  # Batches in a sequence, each of several arrays.
        array = np.empty((), object)
    if array.dtype == object and not hasattr(value, "dtype"):
        raise TypeError(
            f"Expected a batch of arrays. Received: a {type(value).__name__}. Of what makes batches pass one after the "
            "other: `for x, y in data: step(x, y)`."
        )
    return array.astype(keras.config.floatx()) if array.dtype == np.float64 else array


def relative_error(values, references) -> float:
    """Returns the norm of the difference over the norm of the references, of two lists of arrays.

    Numbers that are not finite are left out, and so are pairs of other shapes, or with a `None`.
    """
    difference = total = 0.0
    for value, reference in zip(values, references, strict=True):
        if value is None or reference is None or value.shape != reference.shape:
            continue
        value, reference = np.asarray(value, "float64"), np.asarray(reference, "float64")
        both = np.isfinite(value) & np.isfinite(reference)
        difference += float(np.sum(np.square(value[both] - reference[both])))
        total += float(np.sum(np.square(reference[both])))
    return float(np.sqrt(difference / total)) if total else 0.0
