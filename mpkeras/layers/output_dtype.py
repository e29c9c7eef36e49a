"""The option `output_dtype`: what dtype a float32 layer hands on."""

import keras
from keras import ops

from mpkeras.layers.mixin import Float32Mixin
from mpkeras.policies.dtypes import FLOAT_DTYPES
from mpkeras.policies.registry import global_policy


class OutputDtype(Float32Mixin):
    """A float32 layer whose output can be cast back. A subclass ends its `call` with `self.cast_output`.

    Args:
        output_dtype: `None` for float32; `"compute"` for the compute dtype of the global policy at
            construction; or a dtype by name, which is how a saved layer keeps it.
        *args, **kwargs: Of the layer class.

    Raises:
        ValueError: If `output_dtype` is none of these.
    """

    def __init__(self, *args, output_dtype=None, **kwargs):
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
    try:
        name = keras.backend.standardize_dtype(output_dtype)
    except (ValueError, TypeError):
        name = None
    if name not in FLOAT_DTYPES:
        raise ValueError(
            f"Expected `output_dtype` to be None (float32), 'compute' or one of {', '.join(FLOAT_DTYPES)}. "
            f"Received: output_dtype={output_dtype!r}. Use 'compute' for the dtype of the layers around it."
        )
    return name
