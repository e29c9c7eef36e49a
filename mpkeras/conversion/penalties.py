"""What layers add to the loss, computed and summed in float32: activity regularizers and `add_loss`."""

import functools

import keras
from keras import ops

from mpkeras._replaced import is_replaced, replace
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES, tensor_dtype


def add_in_float32(layer):
    """Lets the activity regularizer of `layer`, and its `add_loss`, see float32 where they would see 16 bits.

    Keras hands an activity regularizer the layer's output as it is: the L2 penalty of 512 values of 400 is inf in
    float16. The config stays that of the regularizer itself.
    """
    regularizer = layer.activity_regularizer
    if regularizer is not None and not isinstance(regularizer, _Float32Call):
        replace(layer, "activity_regularizer", _stand_in_for(regularizer), kind="penalties")
    # Stock layers add what their regularizers return; a layer of the user's adds whatever it likes.
    if not type(layer).__module__.startswith("keras.") and not is_replaced(layer, "add_loss", "penalties"):
        add_loss = layer.add_loss

        @functools.wraps(add_loss)
        def add_float32_loss(loss):
            return add_loss(keras.tree.map_structure(_widen, loss))

        replace(layer, "add_loss", add_float32_loss, kind="penalties")


def regularizes_in_16_bits(layer) -> bool:
    """Whether the activity regularizer of `layer`, if it has one, is computed in 16 bits."""
    regularizer = layer.activity_regularizer
    is_given_16_bits = layer.compute_dtype in SIXTEEN_BIT_DTYPES and not isinstance(regularizer, _Float32Call)
    return regularizer is not None and is_given_16_bits


class _Float32Call:
    """Calls a regularizer with float32; to everyone who asks it is the regularizer."""


def _stand_in_for(regularizer):
    class StandIn(_Float32Call):
        # Keras saves a regularizer under the name of its `__class__`, which an object may answer for itself.
        __class__ = property(lambda self: type(regularizer))

        def __call__(self, x):
            return regularizer(_widen(x))

        def __getattr__(self, name):
            return getattr(regularizer, name)

    return StandIn()


def _widen(value):
    return ops.cast(value, "float32") if tensor_dtype(value) in SIXTEEN_BIT_DTYPES else value
