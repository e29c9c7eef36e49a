"""`float32_island`: float32 inside one function or method."""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import keras
import numpy as np
from keras import ops

from mpkeras import _keras
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES, tensor_dtype

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def float32_island(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorator: 16-bit tensors go into the function as float32, and variables are read in float32 inside.

    For a function, or for a method of a layer. Tensors are found in nested structures as well. Other dtypes
    go in as they are, float64 too, and what the function returns stays as it computed it. A layer that is
    called inside still follows its own policy. A function that is no method knows of no layer: called from one
    whose variables have 16 bits, it reads them as they are stored.

    On a layer's `call` the decorator comes too late for inputs beyond float16's range: Keras casts them to
    the layer's compute dtype before `call` runs. There, use `Float32Mixin`.

    Args:
        function: A function of tensors, or a method of a layer.

    Returns:
        A function that takes the same arguments.

    Raises:
        TypeError: If it is not used on a function.

    Example:

    >>> @mpkeras.float32_island
    ... def norm(x):
    ...     return keras.ops.sqrt(keras.ops.sum(keras.ops.square(x), axis=-1))
    >>> float(norm(keras.ops.array([300.0, 400.0], dtype="float16")))  # 9e4 is more than float16 holds
    500.0
    """
    if inspect.isclass(function) or not callable(function):
        raise TypeError(
            "Expected a function or method. Received: "
            f"{function!r} (of type {type(function).__name__}). Write `@float32_island` without parentheses; "
            "for a layer class put `Float32Mixin` before it in the bases."
        )

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        with _float32_variables(args[0] if args else None):
            args, kwargs = keras.tree.map_structure(_widen, (args, kwargs))
            return function(*args, **kwargs)

    return wrapper


def _float32_variables(owner):
    """Returns a context in which float variables that would be read in 16 bits are read in float32."""
    # A layer with 16-bit variables has no scope: it reads them as they are stored.
    dtype = _keras.autocast_dtype() or getattr(owner, "compute_dtype", None)
    return _keras.autocast_scope("float32") if dtype in SIXTEEN_BIT_DTYPES else contextlib.nullcontext()


def _widen(value):
    if isinstance(value, keras.Variable):
        # Left to the scope above: inside, it may be assigned to. Its own cast is off with `autocast=False`.
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        return value.astype("float32") if value.dtype.name in SIXTEEN_BIT_DTYPES else value
    if tensor_dtype(value) not in SIXTEEN_BIT_DTYPES:
        return value
    widened = ops.cast(value, "float32")
    _keras.copy_mask(value, widened)
    return widened
