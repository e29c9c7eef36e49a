"""Attention layers whose softmax has a backward pass of its own on JAX: in float32, from the probabilities alone."""

import keras

from mpkeras.conversion.overrides import is_overridden, override, restore
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES, tensor_dtype

# Both compute `self._softmax(scores, mask)` in a method of this name, where they do not use a fused kernel: with
# dropout, and where scores are returned. Read in Keras 3.10 and 3.15.1.
_METHOD = "_masked_softmax"
_STOCK = tuple(
    getattr(layer_class, _METHOD, None)
    for layer_class in (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
)


def save_memory(layer):
    """Lets XLA keep one 16-bit tensor of the size of the scores fewer for the backward pass of `layer`.

    The forward pass is Keras' own, bit for bit. Its derivative `y * (t - sum(y * t))` is computed in float32 from the
    16-bit probabilities `y`. Compiled for a TPU v5p, the training step of two blocks of BERT-base (sequence 512, batch
    32, dropout 0.1) takes 0.65 of the temporary memory of float32 instead of 0.83: see `benchmarks/memory.py`. On JAX
    only.
    """
    if keras.backend.backend() != "jax" or getattr(type(layer), _METHOD, None) not in _STOCK or is_applied(layer):
        return
    from mpkeras.devices._jax import softmax_from_probabilities

    stock = getattr(layer, _METHOD)

    def masked_softmax(scores, attention_mask=None):
        if isinstance(scores, keras.KerasTensor) or tensor_dtype(scores) not in SIXTEEN_BIT_DTYPES:
            return stock(scores, attention_mask)
        return softmax_from_probabilities(stock, layer._softmax.axis, scores, attention_mask)

    override(layer, _METHOD, masked_softmax)


def be_stock(layer):
    """Takes back `save_memory`."""
    restore(layer, _METHOD)


def is_applied(layer) -> bool:
    return is_overridden(layer, _METHOD)
