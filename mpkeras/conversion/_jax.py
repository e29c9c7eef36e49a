"""Attention on JAX whose backward pass has its probabilities in 16 bits."""

import functools

import jax
import jax.numpy as jnp
import keras

from mpkeras import _keras

# Products of 16-bit numbers with sums in float32, in the backward pass, too: what JAX' own attention asks for.
_PRECISION = {"bfloat16": jax.lax.DotAlgorithmPreset.BF16_BF16_F32, "float16": jax.lax.DotAlgorithmPreset.F16_F16_F32}


def takes_kernel(layer, query, key, value, *, is_masked: bool) -> bool:
    """Whether Keras looks for a kernel that keeps no probabilities, or refuses an attention for the lack of one."""
    platform = jax.devices()[0].platform
    return _keras.takes_flash_attention(layer, query, key, value, platform, is_masked=is_masked)


def dot_product_attention(query, key, value, scale: float, mask=None, is_causal: bool = False):
    """Returns what `jax.nn.dot_product_attention` does, by the same operations, and keeps less for its derivative.

    Args:
        query: A 16-bit tensor of shape `(batch, queries, heads, depth)`.
        key, value: Of its dtype, of shape `(batch, keys, heads, depth)`.
        scale: What the scores are multiplied by.
        mask: bools, of a shape that broadcasts to `(batch, heads, queries, keys)`: what is looked at.
        is_causal: Whether a query looks at no later key.

    Returns:
        A tensor of the shape and dtype of `query`.
    """
    product = functools.partial(jnp.einsum, "BTNH,BSNH->BNTS", query, key, preferred_element_type="float32")
    try:
        scores = product(precision=_PRECISION[keras.backend.standardize_dtype(query.dtype)])
    except jax.errors.JaxRuntimeError:
        # As in JAX' own: for one query and one key, at once in eager code, a CPU has no such product.
        scores = product()
    scores *= jnp.float32(scale)
    if is_causal:
        causal = jnp.tril(jnp.ones(scores.shape[2:], bool))
        mask = causal if mask is None else jnp.logical_and(mask, causal)
    if mask is not None:
        # JAX' own number: where nothing is left to look at, all keys count the same.
        scores = jnp.where(mask, scores, -0.7 * jnp.finfo("float32").max)

    def softmax(scores):
        return jax.nn.softmax(scores, axis=-1).astype(query.dtype)

    return jnp.einsum("BNTS,BSNH->BTNH", softmax_from_probabilities(softmax, -1, scores), value)


def softmax_from_probabilities(softmax, axis, scores):
    """Returns `softmax(scores)` with a derivative that is computed in float32 from the result.

    Args:
        softmax: A function of the scores with a 16-bit result.
        axis: The axis or axes over which the result sums to 1.
        scores: Its argument.
    """

    @jax.custom_jvp
    def probabilities(scores):
        # Without the barrier XLA sees that the result is made from a float32 one, and keeps that for the derivative.
        return jax.lax.optimization_barrier(softmax(scores))

    @probabilities.defjvp
    def derivative(primals, tangents):
        result = probabilities(*primals)
        y, t = result.astype("float32"), tangents[0].astype("float32")
        tangent = y * (t - jnp.sum(y * t, axis=axis, keepdims=True))
        return result, tangent.astype(result.dtype)

    return probabilities(scores)
