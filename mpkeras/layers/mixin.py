"""float32 in layers of one's own: `Float32Mixin` for a whole layer, `float32_island` for one function or method."""

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import keras
import numpy as np
from keras import ops

from mpkeras import _keras
from mpkeras.policies.dtypes import FLOAT_DTYPES, SIXTEEN_BIT_DTYPES, float_dtype, widen
from mpkeras.policies.registry import global_in_scope, global_policy

if TYPE_CHECKING:
    # Its attributes and `super()` are those of the Keras layer that comes after it in the bases.
    from keras.layers import Layer as LayerMixin
else:
    LayerMixin = object

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class Float32Mixin(LayerMixin):
    """Keeps a layer's inputs, arithmetic and variables in float32. Goes before the layer class in the bases.

    The layers that its constructor makes are kept in float32 as well. `TimeDistributed` passes by the policy
    of the layer it wraps: there, give the wrapper `dtype="float32"` too.

    Args:
        *args, **kwargs: Of the layer class, without `dtype` and `autocast`.

    Raises:
        ValueError: If `dtype` is given and is not float32, or `autocast=False` is given.

    Example:

    >>> @keras.saving.register_keras_serializable("my_package")
    ... class Float32Dense(mpkeras.layers.Float32Mixin, keras.layers.Dense):
    ...     pass
    >>> with mpkeras.policy_scope("mixed_float16"):
    ...     Float32Dense(2).compute_dtype
    'float32'
    """

    def __init__(self, *args, **kwargs) -> None:
        _check_dtype(self, kwargs.get("dtype"))
        if kwargs.get("autocast", True) is not True:
            raise ValueError(
                "Expected `autocast` to be true: it casts the inputs to float32. Received: "
                f"autocast={kwargs['autocast']!r}. Leave it out."
            )
        # The policy, not a cast inside `call`: Keras casts the *inputs* to the policy's compute dtype before
        # `call` runs, and 7e4 is already inf by then.
        kwargs["dtype"] = "float32"
        with global_in_scope("float32"):
            super().__init__(*args, **kwargs)
        # `LayerNormalization` and `GroupNormalization` turn it off, and then round their float32 result to
        # the dtype of the input.
        self.autocast = True


def _check_dtype(layer, dtype):
    if dtype is None:
        return
    try:
        policy = keras.dtype_policies.get(dtype)
    except (ValueError, TypeError):
        policy = None
    dtypes = policy and (policy.compute_dtype, policy.variable_dtype, policy.quantization_mode)
    if dtypes != ("float32", "float32", None):
        raise ValueError(
            f"Expected `dtype` to be float32, which {type(layer).__name__} always is. Received: "
            f"dtype={dtype!r}. Leave it out, or use the layer of `keras.layers` for another precision."
        )


class OutputDtype(Float32Mixin):
    """A float32 layer whose output can be cast back. A subclass ends its `call` with `self.cast_output`.

    Args:
        output_dtype: `None` for float32; `"compute"` for the compute dtype of the global policy at
            construction; or a dtype by name, which is how a saved layer keeps it.
        *args, **kwargs: Of the layer class.

    Raises:
        ValueError: If `output_dtype` is none of these.
    """

    def __init__(self, *args, output_dtype: str | None = None, **kwargs) -> None:
        output_dtype = _resolve(output_dtype)
        super().__init__(*args, **kwargs)
        self.output_dtype = output_dtype

    def cast_output(self, outputs):
        """Returns `outputs` in `output_dtype`.

        Args:
            outputs: A float32 tensor of any shape.
        """
        # Not cast where nothing changes: a cast would lose the logits that Keras remembers on TensorFlow.
        if keras.backend.standardize_dtype(outputs.dtype) == self.output_dtype:
            return outputs
        return ops.cast(outputs, self.output_dtype)

    def compute_output_spec(self, *args, **kwargs):
        spec = super().compute_output_spec(*args, **kwargs)
        return keras.KerasTensor(spec.shape, dtype=self.output_dtype)

    def get_config(self):
        # By name, so that a reloaded layer does not depend on the global policy.
        return {**super().get_config(), "output_dtype": self.output_dtype}


def _resolve(output_dtype) -> str:
    if output_dtype is None:
        return "float32"
    if output_dtype == "compute":
        return global_policy().compute_dtype
    name = float_dtype(output_dtype)
    if name is None:
        raise ValueError(
            f"Expected `output_dtype` to be None (float32), 'compute' or one of {', '.join(FLOAT_DTYPES)}. "
            f"Received: output_dtype={output_dtype!r}. Use 'compute' for the dtype of the layers around it."
        )
    return name


def float32_island(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Decorator: 16-bit tensors go into the function as float32, and variables are read in float32 inside.

    For a function, or for a method of a layer. Tensors are found in nested structures as well. Other dtypes
    go in as they are, float64 too, and what the function returns stays as it computed it. A layer that is
    called inside still follows its own policy; one that is made inside computes in float32. A function that is
    no method knows of no layer: called from one whose variables have 16 bits, it reads them as they are stored.

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
        with _float32_scope(args[0] if args else None):
            args, kwargs = keras.tree.map_structure(_widen, (args, kwargs))
            return function(*args, **kwargs)

    return wrapper


def _float32_scope(owner):
    """Returns a context that computes in float32 where variables would be read in 16 bits."""
    # A layer with 16-bit variables has no scope: it reads them as they are stored.
    dtype = _keras.autocast_dtype() or getattr(owner, "compute_dtype", None)
    return _keras.computing_in_float32() if dtype in SIXTEEN_BIT_DTYPES else contextlib.nullcontext()


def _widen(value):
    if isinstance(value, keras.Variable):
        # Left to the scope above: inside, it may be assigned to. Its own cast is off with `autocast=False`.
        return value
    if isinstance(value, (np.ndarray, np.generic)):
        return value.astype("float32") if value.dtype.name in SIXTEEN_BIT_DTYPES else value
    return widen(value)
