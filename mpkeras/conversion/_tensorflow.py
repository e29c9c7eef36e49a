"""Attention on TensorFlow whose backward pass has its probabilities in 16 bits."""

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from mpkeras import _keras
from mpkeras.devices._tensorflow import in_xla


def takes_kernel(layer, query, key, value, *, is_masked: bool) -> bool:
    """Whether a layer asks for flash attention, which Keras refuses on TensorFlow."""
    del query, key, value, is_masked
    return _keras.asks_for_flash_attention(layer)


def dot_product_attention(query, key, value, scale: float, mask=None, is_causal: bool = False):
    """As in `_jax.py`, by the operations of Keras' `dot_product_attention` on TensorFlow."""
    scores = tf.cast(tf.einsum("BTNH,BSNH->BNTS", query, key, optimize="optimal"), tf.float32) * scale
    if is_causal:
        causal = tf.linalg.band_part(tf.ones(tf.shape(scores)[2:], tf.bool), -1, 0)
        mask = causal if mask is None else tf.logical_and(mask, causal)
    if mask is not None:
        # Keras' own number: where nothing is left to look at, all keys count the same.
        scores = tf.where(mask, scores, -0.7 * 3.38953e38)
    return tf.einsum("BNTS,BSNH->BTNH", _probabilities(scores, query.dtype), value, optimize="optimal")


def _probabilities(scores, dtype):
    """Returns the softmax of float32 `scores` in 16 bits, with a derivative that is computed from the result."""

    @tf.custom_gradient
    def probabilities(scores):
        result = _barrier(tf.cast(tf.nn.softmax(scores, axis=-1), dtype))

        def gradient(upstream):
            # A graph computes what it can as soon as it can: this would be there from the forward pass on.
            with tf.control_dependencies([upstream]):
                y = tf.cast(result, tf.float32)
            t = tf.cast(upstream, tf.float32)
            return y * (t - tf.reduce_sum(y * t, axis=-1, keepdims=True))

        return result, gradient

    return probabilities(scores)


@tf.custom_gradient
def _barrier(values):
    """Hides from XLA that 16-bit `values` are made from float32 ones, which it would keep for the derivative."""
    # TensorFlow has no public name for it, and no gradient.
    (hidden,) = gen_xla_ops.xla_optimization_barrier([values]) if in_xla() else (values,)
    return hidden, lambda upstream: upstream
