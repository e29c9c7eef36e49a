"""`Float32Mixin`: keeps a layer in float32 under any policy; with `OutputDtype` it hands on another dtype."""

from typing import TYPE_CHECKING

import keras
from keras import ops

from mpkeras.policies.dtypes import FLOAT_DTYPES, float_dtype
from mpkeras.policies.registry import global_policy, policy_scope

if TYPE_CHECKING:
    # Its attributes and `super()` are those of the Keras layer that comes after it in the bases.
    from keras.layers import Layer as LayerMixin
else:
    LayerMixin = object


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
        with policy_scope("float32"):
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
