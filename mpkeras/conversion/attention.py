"""Attention layers that keep their probabilities in 16 bits alone, and derive softmax from them in float32."""

import functools
import importlib
import inspect

import keras
from keras import ops

from mpkeras import _keras
from mpkeras._replaced import replace
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES, tensor_dtype


def save_softmax_memory(layer):
    """Changes the softmax of an attention layer on JAX, which Keras takes with dropout, and where scores are returned.

    JAX makes a float32 tensor of 16-bit probabilities for the derivative of their softmax, too.
    """
    stock, backend = getattr(layer, _keras.ATTENTION_SOFTMAX), _backend()

    def masked_softmax(scores, attention_mask=None):
        if not _is_16_bit(scores):
            return stock(scores, attention_mask)
        softmax = functools.partial(stock, attention_mask=attention_mask)
        return backend.softmax_from_probabilities(softmax, _keras.softmax_axis(layer), scores)

    replace(layer, _keras.ATTENTION_SOFTMAX, masked_softmax, kind="attention")


def save_attention_memory(layer):
    """Changes how an attention layer computes what Keras leaves to `keras.ops.dot_product_attention`.

    It keeps one 16-bit tensor of the size of the scores for its backward pass. Keras' own attention keeps the
    probabilities in float32, under a 16-bit policy, too. Here the forward pass is the same, bit for bit, and the
    derivative of softmax, `y * (t - sum(y * t))`, is computed in float32 from the 16-bit probabilities `y`. Where Keras
    takes a kernel that keeps none (on JAX cuDNN's flash attention, splash attention on TPUs), it still does.

    Four layers (12 heads of 64, sequence 512, batch 8) on JAX, forward and backward, temporaries as a share of
    float32's, and of the same without this: H100 0.35 (0.67) in float16 and 0.41 (0.71) in bfloat16, T4 0.40 (0.79) in
    float16, TPU v5p 0.63 (1.02) in bfloat16. Ten (8 heads of 8, sequence 512, batch 2, causal) in a graph of
    TensorFlow on a CPU, what the process grows by: 0.31 (1.28) in bfloat16.
    """
    stock, backend = getattr(layer, _keras.ATTENTION_METHOD), _backend()
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def compute_attention(*args, **kwargs):
        options = signature.bind(*args, **kwargs).arguments
        tensors = [options[name] for name in ("query", "key", "value")]
        mask, is_causal = options.get("attention_mask"), bool(options.get("use_causal_mask", False))
        if (
            not all(_is_16_bit(tensor) and tensor.dtype == tensors[0].dtype for tensor in tensors)
            or not _keras.is_fused_attention(layer, tensors[0], options.get("return_attention_scores", False))
            or backend.takes_kernel(layer, *tensors, is_masked=mask is not None or is_causal)
        ):
            return stock(*args, **kwargs)
        if mask is not None:
            # To `(batch, heads, queries, keys)`: heads are what a mask lacks.
            mask = ops.cast(mask, "bool")
            while len(mask.shape) < 4:
                mask = ops.expand_dims(mask, -3)
        return backend.dot_product_attention(*tensors, _keras.attention_scale(layer), mask, is_causal), None

    replace(layer, _keras.ATTENTION_METHOD, compute_attention, kind="attention")


def _backend():
    # Imported here: only the active backend may be.
    return importlib.import_module(f"mpkeras.conversion._{keras.backend.backend()}")


def _is_16_bit(tensor) -> bool:
    return ops.is_tensor(tensor) and tensor_dtype(tensor) in SIXTEEN_BIT_DTYPES
