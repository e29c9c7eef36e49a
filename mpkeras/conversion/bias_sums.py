"""The gradient of a bias in bfloat16 on TensorFlow: a sum in float32, as that of any other weight there."""

import contextlib
import functools
import importlib
import threading

import keras

from mpkeras._replaced import is_newest, replace, replaced_on_all, restore
from mpkeras.conversion.float8 import multiplies_in_float8
from mpkeras.policies.heads import has_own_call
from mpkeras.policies.kernels import CONVOLUTIONS

# The part of the active backend: only that may be imported.
_backend = importlib.import_module(f"mpkeras.conversion._{keras.backend.backend()}")

# The name of the change, a key of `conversion.changes.CHANGES`.
BIAS_IN_FLOAT32 = "gradient of the bias in float32"

# Keras' layers that add a bias to a product, and give what that makes to their activation.
_BIASED = (
    keras.layers.Dense,
    keras.layers.EinsumDense,
    *CONVOLUTIONS,
    keras.layers.DepthwiseConv1D,
    keras.layers.DepthwiseConv2D,
    keras.layers.SeparableConv1D,
    keras.layers.SeparableConv2D,
)
# Cells that add it at once, and not gate by gate.
_CELLS = (keras.layers.SimpleRNNCell, keras.layers.LSTMCell, keras.layers.GRUCell)


def sums_bias_in_16_bits(layer, dtype: str) -> bool:
    """Whether `layer`, which computes in `dtype`, adds a bias by Keras' own arithmetic whose gradient sums in 16 bits.

    TensorFlow's `BiasAddGrad` adds up bfloat16 in bfloat16, compiled or not (2.21): of 4096 equal addends it makes 256.
    In float16 it sums in float32, as its other sums do in both.
    """
    if keras.backend.backend() != "tensorflow" or dtype != "bfloat16":
        return False
    adds_once = isinstance(layer, (*_BIASED, *_CELLS)) and getattr(layer, "implementation", 2) == 2
    return adds_once and not has_own_call(layer) and bool(getattr(layer, "use_bias", True))


def sum_bias_in_float32(layer):
    """Lets the gradient of the bias of `layer` be summed in float32 where the layer computes in bfloat16."""
    if is_newest(layer, "call", "bias"):
        return
    # Over another change that has come or gone since, such as a product in float8.
    restore(layer, "call", kind="bias")
    call, other_bias = layer.call, _of_each_row if isinstance(layer, _CELLS) else _with_own_gradient
    # Of two threads that call it at once, the one that ends last would leave what it found of the other.
    lock = threading.RLock()

    @functools.wraps(call)
    def call_and_sum(*args, **kwargs):
        # It may have moved to float32 since.
        if layer.compute_dtype != "bfloat16" or layer.bias is None:
            return call(*args, **kwargs)
        # A replica waits in the product for the scales of the others, whose threads would wait for the lock.
        if multiplies_in_float8(layer) and _backend.is_one_of_replicas():
            return call(*args, **kwargs)
        inputs = keras.tree.flatten((args, kwargs))[0]
        with lock, other_bias(layer, inputs):
            return call(*args, **kwargs)

    replace(layer, "call", call_and_sum, kind="bias")


@contextlib.contextmanager
def _with_own_gradient(layer, inputs):
    """Context manager: the activation of `layer` is told of the gradient of the bias, and the addition is not."""
    bias, activation = keras.ops.cast(layer.bias, layer.compute_dtype), layer.activation
    is_first = getattr(layer, "data_format", "channels_last") == "channels_first"

    # Who asks which function the layer applies is told of that one.
    @functools.wraps(activation or keras.activations.linear)
    def activate(outputs):
        shape = (-1, *[1] * (len(outputs.shape) - 2)) if is_first else bias.shape
        outputs = _backend.with_gradient_of_sum(outputs, keras.ops.reshape(bias, shape))
        return outputs if activation is None else activation(outputs)

    with (
        replaced_on_all([layer], "bias", lambda layer, old: keras.ops.stop_gradient(bias)),
        replaced_on_all([layer], "activation", lambda layer, old: activate),
    ):
        yield


def _of_each_row(cell, inputs):
    """Context manager: the bias of a recurrent `cell` has a row for each one of the batch. To spread it is a sum's end.

    A cell splits what it makes before an activation sees it. The bias of a `GRUCell` has a part for its inputs and one
    for its state.
    """
    *parts, units = cell.bias.shape
    bias = keras.ops.expand_dims(keras.ops.cast(cell.bias, cell.compute_dtype), -2)
    spread = keras.ops.broadcast_to(bias, (*parts, keras.ops.shape(inputs)[0], units))
    return replaced_on_all([cell], "bias", lambda cell, old: spread)
