"""Sums the scaled gradients over replicas in 16 bits: half the bytes on the wire."""

import contextlib

import tensorflow as tf

from mpkeras import _keras

DTYPES = (None, "float16", "bfloat16")


def replica() -> int:
    """Returns the number of the replica that this code runs on; 0 where there is one, or one program for all."""
    context = tf.distribute.get_replica_context() if tf.distribute.has_strategy() else None
    number = None if context is None else tf.get_static_value(context.replica_id_in_sync_group)
    return 0 if number is None else int(number)


def check_all_reduce_dtype(dtype):
    """Raises `ValueError` unless gradients can be summed in `dtype`."""
    if dtype not in DTYPES:
        raise ValueError(
            f"Expected `all_reduce_dtype` to be one of {DTYPES}. Received: all_reduce_dtype={dtype!r}. "
            "Leave it out to sum gradients in their own dtype."
        )


def is_active(optimizer) -> bool:
    """Whether there is something to sum in 16 bits; on one device there is not."""
    return optimizer.all_reduce_dtype is not None and tf.distribute.get_strategy().num_replicas_in_sync > 1


def summed(optimizer, scaled_grads, variables, takes_unscaled: bool) -> list:
    """Returns the sums of the gradients over all replicas, in `optimizer.all_reduce_dtype`.

    They are summed while they are still scaled, or the small ones would be lost in float16. An overflow of
    the sum itself makes it infinite, so that the finite check that follows skips the step.

    Args:
        scaled_grads: List of this replica's scaled gradients; `None` entries allowed.
        variables: The variables, one for each gradient.
        takes_unscaled: Whether the gradients have been unscaled, which is an error.
    """
    if takes_unscaled:
        raise ValueError(
            "Expected scaled gradients with `all_reduce_dtype`, as unscaled ones may be too small for 16 bits. "
            f"Received: all_reduce_dtype={optimizer.all_reduce_dtype!r} and gradients that are not scaled. Call "
            "`scale_loss` and pass its gradients to `apply`, or leave `all_reduce_dtype` out."
        )

    def cast(grad):
        if isinstance(grad, tf.IndexedSlices):
            return tf.IndexedSlices(cast(grad.values), grad.indices, grad.dense_shape)
        return tf.cast(grad, optimizer.all_reduce_dtype)

    # A gradient that is the new value (float8 scales) is not summed by Keras either.
    is_summed = [
        g is not None and not _keras.overwrites_with_gradient(v) for g, v in zip(scaled_grads, variables, strict=True)
    ]
    narrow = [cast(grad) for grad, sums in zip(scaled_grads, is_summed, strict=True) if sums]
    if narrow:
        narrow = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, narrow)
    sums = iter(narrow)
    return [next(sums) if takes else grad for grad, takes in zip(scaled_grads, is_summed, strict=True)]


@contextlib.contextmanager
def no_second_sum(optimizer):
    """Within this context the inner optimizer takes its gradients as summed over replicas already.

    Its method is covered on the instance for the length of the call, around all replicas: each runs in a
    thread of its own, and the last one out must not find it uncovered.
    """
    inner_optimizer = optimizer.inner_optimizer
    covered = [inner_optimizer, *getattr(inner_optimizer, "optimizers", [])] if is_active(optimizer) else []
    for part in covered:
        # In the instance's dictionary, not by `setattr`: TensorFlow would track the function.
        part.__dict__[_keras.GRADIENT_SUM_METHOD] = lambda grads_and_vars: list(grads_and_vars)
    try:
        yield
    finally:
        for part in covered:
            part.__dict__.pop(_keras.GRADIENT_SUM_METHOD)
