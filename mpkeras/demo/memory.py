"""Bytes of one training batch: what the layers return, and what XLA reserves where it says so."""

import keras
from keras import ops

from mpkeras.policies.dtypes import bytes_of


def layer_output_bytes(model: keras.Model, x, batch_size: int) -> int:
    """Returns the bytes of all layer outputs of one batch, in the dtypes that the layers really return.

    The model is run on one example: the symbolic dtypes of a Functional model are those it was built with,
    not those of the policies its layers have now. Operations between layers (`x + y`) count as layers. What
    a layer keeps inside (attention scores) does not count, nor is there a discount for what a compiler
    fuses away: the number compares policies and does not predict peak memory.

    Args:
        model: A Functional model with one input.
        x: Input array, shape `(examples, ...)`; only the first example is used.
        batch_size: Examples a batch.
    """
    symbolic = []
    for operation in model.operations:
        if not isinstance(operation, keras.layers.InputLayer):
            symbolic.extend(keras.tree.flatten(operation.output))
    outputs = keras.Model(model.inputs, symbolic)(ops.convert_to_tensor(x[:1]))
    found = [(tensor.shape, keras.backend.standardize_dtype(tensor.dtype)) for tensor in keras.tree.flatten(outputs)]
    return batch_size * sum(bytes_of(shape, dtype) for shape, dtype in found)


class XlaMemory(keras.callbacks.Callback):
    """Reads what XLA says about the memory of the compiled train step, where the backend tells (JAX).

    It compiles the step once more when training begins. Goes after `MixedPrecision` in the list of
    callbacks, so that it sees the guarded step.

    Args:
        x, y: One training batch.

    Attributes:
        temporary_bytes: Bytes of temporary buffers, or `None` where the backend does not say.
    """

    def __init__(self, x, y):
        super().__init__()
        self._batch = (x, y)
        self.temporary_bytes = None

    def on_train_begin(self, logs=None):
        if keras.backend.backend() == "jax":
            from mpkeras.demo import _jax

            self.temporary_bytes = _jax.temporary_bytes(self.model, *self._batch)
