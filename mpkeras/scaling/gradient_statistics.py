"""What one step's gradients say of its numerics: their norm, and the share that is exactly zero."""

import keras
from keras import ops

NAMES = ("grad_norm", "zero_grad_fraction")


def gradient_statistics(grads, loss_scale) -> tuple:
    """Returns the global norm of the unscaled gradients and the share of their elements that are zero.

    Of a sparse gradient only the rows that are there count. On several replicas these are one replica's own.

    Args:
        grads: List of scaled gradients; `None` entries are left out.
        loss_scale: The scale they are multiplied by, float32 of shape `()`; `None` if they are unscaled.

    Returns:
        Two float32 scalars of shape `()`.
    """
    values = [_real(_values(grad)) for grad in grads if grad is not None]
    size = sum(ops.cast(ops.size(value), "float32") for value in values)
    zeros = sum(ops.sum(ops.cast(ops.equal(value, 0.0), "float32")) for value in values)
    if loss_scale is not None:
        # Before they are squared: at a scale of 2^15 the squares would overflow float32 early.
        values = [value / loss_scale for value in values]
    norm = ops.sqrt(sum(ops.sum(ops.square(value)) for value in values))
    return norm, zeros / size


def _real(values):
    """Returns the values as float32, complex ones as their absolute values."""
    is_complex = "complex" in keras.backend.standardize_dtype(values.dtype)
    return ops.cast(ops.absolute(values) if is_complex else values, "float32")


def _values(grad):
    if hasattr(grad, "dense_shape"):  # tf.IndexedSlices
        return grad.values
    if hasattr(grad, "nse"):  # a sparse array of JAX
        return grad.data
    return grad.to_dense() if getattr(grad, "is_sparse", False) else grad
