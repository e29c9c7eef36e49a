"""The product of a vocabulary's head: operands in 16 bits, sums and outputs in float32."""

import functools
import importlib

import keras
from keras import ops

from mpkeras import _keras
from mpkeras._replaced import replace, restore
from mpkeras.conversion.float8 import einsum_by_matrices, has_product, labels_of, mark_product, product_change
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES
from mpkeras.policies.heads import has_own_call, is_reversible_embedding
from mpkeras.policies.rules import is_quantized

# The name of the change, a key of `conversion.changes.CHANGES`.
WITH_FLOAT32_SUMS = "float32 sums and outputs"

# The part of the active backend: only that may be imported.
_backend = importlib.import_module(f"mpkeras.conversion._{keras.backend.backend()}")


def can_sum_in_float32(layer) -> bool:
    """Whether `layer` is one product of two matrices by Keras' own arithmetic."""
    is_product = has_product(layer) or is_reversible_embedding(layer)
    return is_product and not has_own_call(layer) and not is_quantized(layer) and labels_of(layer) is not None


def sum_in_float32(layer):
    """Lets a 16-bit `Dense`, `EinsumDense` or reversed `ReversibleEmbedding` sum and return in float32.

    A layer in 16 bits sums so, too, on a GPU or TPU, and rounds the sums: logits of 30 by up to 0.06 in bfloat16. The
    products of the derivative take the gradient in 16 bits, as those of any 16-bit layer.
    """
    if product_change(layer) == WITH_FLOAT32_SUMS:
        return
    restore(layer, "call", kind="layer")
    labels = labels_of(layer)
    assert labels is not None  # `can_sum_in_float32` has asked.
    make_call = _reversed_with_float32_sums if is_reversible_embedding(layer) else _with_float32_sums
    call = functools.wraps(layer.call)(make_call(layer, layer.call, functools.partial(_product, labels)))
    mark_product(call, WITH_FLOAT32_SUMS)
    replace(layer, "call", call, kind="layer")


def _with_float32_sums(layer, call, product):
    def call_with_float32_sums(inputs, training=None):
        # It may have moved to float32 since.
        if layer.compute_dtype not in SIXTEEN_BIT_DTYPES:
            return call(inputs, training=training)
        outputs = product(inputs, layer.kernel, layer.compute_dtype)
        if layer.bias is not None:
            # As it is stored: within `call` Keras reads it in 16 bits.
            outputs = ops.add(outputs, ops.cast(_keras.unscoped_value(layer.bias), "float32"))
        return outputs if layer.activation is None else layer.activation(outputs)

    return call_with_float32_sums


def _reversed_with_float32_sums(layer, call, product):
    def call_with_float32_sums(inputs, reverse=False):
        dtype = layer.reverse_dtype or layer.compute_dtype
        if not reverse or not {layer.compute_dtype, dtype} <= set(SIXTEEN_BIT_DTYPES):
            return call(inputs, reverse=reverse)
        kernel = ops.transpose(layer.embeddings) if layer.tie_weights else layer.reverse_embeddings
        logits, cap = product(inputs, kernel, dtype), layer.logit_soft_cap
        return logits if cap is None else ops.multiply(ops.tanh(ops.divide(logits, cap)), cap)

    return call_with_float32_sums


def _product(labels, inputs, kernel, dtype: str):
    inputs, kernel = (ops.cast(operand, dtype) for operand in (inputs, kernel))
    return einsum_by_matrices(labels, inputs, kernel, _backend.product_with_float32_sums)
