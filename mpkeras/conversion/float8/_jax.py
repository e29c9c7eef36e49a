"""The float8 product on JAX: three `dot_general` of float8 operands, which XLA hands to cuBLASLt as they are."""

import jax
import jax.numpy as jnp

from mpkeras.conversion.float8.rounding import GRADIENT_DTYPE, OPERAND_DTYPE, once, rounded
from mpkeras.devices._jax import has_float8_units

# Float8 operands and sums in float32. Without an algorithm XLA prefers a fusion of its own, which may multiply the
# operands as float16 (seen in the PTX of JAX 0.10.2 for an H100); with it it calls cuBLASLt.
_ALGORITHM = jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32


def float8_product(inputs, kernel, training, state=()):
    """Returns the product of two bfloat16 matrices, computed from float8 operands, in bfloat16.

    Args:
        inputs, kernel: bfloat16, shapes `(rows, summed)` and `(summed, columns)`.
        training: Whether all devices take part. On JAX they do in any case: the arrays are those of all.
        state: The `history` of `rounded` for the inputs, the kernel and the gradient, joined; what these become is
            their gradient. `()`: each is scaled by itself.
    """
    del training
    return _product(inputs, kernel, tuple(state))


@jax.custom_vjp
def _product(inputs, kernel, state):
    return _forward(inputs, kernel, state)[0]


def _forward(inputs, kernel, state):
    inputs, of_inputs, by_inputs = rounded(inputs, OPERAND_DTYPE, state[:2])
    kernel, of_kernel, by_kernel = rounded(kernel, OPERAND_DTYPE, state[2:4])
    outputs = _multiply(inputs, kernel, (1, 0), of_inputs * of_kernel)
    return outputs, (inputs, of_inputs, kernel, of_kernel, (*by_inputs, *by_kernel), state[4:])


def _backward(kept, gradient):
    inputs, of_inputs, kernel, of_kernel, state, history = kept
    gradient, of_gradient, by_gradient = rounded(gradient, GRADIENT_DTYPE, history)
    by_inputs = _multiply(gradient, kernel, (1, 1), of_gradient * of_kernel)
    by_kernel = _multiply(inputs, gradient, (0, 0), of_inputs * of_gradient)
    return once(by_inputs), once(by_kernel), (*state, *by_gradient)


_product.defvjp(_forward, _backward)


def _multiply(left, right, summed, inverse):
    """Returns the product of two float8 matrices over the axes `summed` of each, times `inverse`, in bfloat16."""
    axes = (((summed[0],), (summed[1],)), ((), ()))

    if has_float8_units():
        product = jax.lax.dot_general(left, right, axes, precision=_ALGORITHM, preferred_element_type=jnp.bfloat16)
    else:
        # float8 values are bfloat16 values: the same products, on any device.
        left, right = left.astype(jnp.bfloat16), right.astype(jnp.bfloat16)
        product = jax.lax.dot_general(left, right, axes, preferred_element_type=jnp.bfloat16)
    return product * inverse.astype(jnp.bfloat16)
