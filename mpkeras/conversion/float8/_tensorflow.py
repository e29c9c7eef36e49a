"""The float8 product on TensorFlow: bfloat16 products of operands rounded to float8. It has no other (2.21)."""

import tensorflow as tf

from mpkeras.conversion.float8.rounding import GRADIENT_DTYPE, OPERAND_DTYPE, rounded


@tf.custom_gradient
def float8_product(inputs, kernel):
    """As in `_jax.py`."""
    inputs, of_inputs = rounded(inputs, OPERAND_DTYPE)
    kernel, of_kernel = rounded(kernel, OPERAND_DTYPE)

    def backward(gradient):
        gradient, of_gradient = rounded(gradient, GRADIENT_DTYPE)
        of_inputs_too = _multiply(gradient, kernel, of_gradient * of_kernel, transpose_b=True)
        return of_inputs_too, _multiply(inputs, gradient, of_inputs * of_gradient, transpose_a=True)

    return _multiply(inputs, kernel, of_inputs * of_kernel), backward


def _multiply(left, right, inverse, **transposed):
    left, right = tf.cast(left, tf.bfloat16), tf.cast(right, tf.bfloat16)
    return tf.matmul(left, right, **transposed) * tf.cast(inverse, tf.bfloat16)
