"""Travel between replicas on TensorFlow: of gradients, which the optimizer sums; weights are whole on each."""

import tensorflow as tf

from mpkeras.distribution.defaults import check_program, layout_of_number, split_slots, with_dtypes  # noqa: F401

# Whether an optimizer sums gradients over replicas, and so has a dtype for it.
OPTIMIZERS_REDUCE = True


def check_travel(model, policy):
    """Raises `ValueError` for dtypes of a `Policy` in which nothing travels here."""
    if policy.gather_dtype is not None and tf.distribute.get_strategy().num_replicas_in_sync > 1:
        raise ValueError(
            "Expected no `gather_dtype` under a `tf.distribute` strategy, where each replica has whole weights. "
            f"Received: gather_dtype={policy.gather_dtype!r}. Leave it out."
        )


def devices_that_share_a_batch(model) -> int:
    """Returns how many replicas train on parts of one batch; 1 for one alone."""
    return model.distribute_strategy.num_replicas_in_sync
