"""The gradient of recurrent weights on torch in 16 bits: a sum over the steps of a sequence in float32."""

import importlib

import keras

from mpkeras._replaced import replace

# The part of the active backend: only that may be imported.
_backend = importlib.import_module(f"mpkeras.conversion._{keras.backend.backend()}")

# The name of the change, a key of `conversion.changes.CHANGES`.
STEPS_IN_FLOAT32 = "gradient over the steps in float32"


def sums_steps_in_16_bits(layer) -> bool:
    """Whether `layer`, which computes in 16 bits, adds up the gradients of its recurrent weights over time in 16 bits.

    Without cuDNN torch runs a loop of Keras, whose steps share one 16-bit copy of the weights: of 1000 equal addends in
    bfloat16 their gradient holds 256 (Keras 3.15.1). In the loop of any other recurrent layer each step makes its copy.
    """
    if keras.backend.backend() != "torch" or not isinstance(layer, (keras.layers.LSTM, keras.layers.GRU)):
        return False
    # As `cudnn_ok` there.
    for_cudnn = layer.activation is keras.activations.tanh and layer.recurrent_activation is keras.activations.sigmoid
    return not (_backend.has_cudnn() and for_cudnn and layer.use_bias and not layer.unroll)


def sum_steps_in_float32(layer):
    """Lets `layer` run the loop in which each step reads the float32 weights."""
    replace(layer, "use_cudnn", False, kind="steps")
