"""What travels between replicas on TensorFlow: gradients, which the optimizer sums; weights are whole on each."""

import tensorflow as tf

# Whether an optimizer sums gradients over replicas, and so has a dtype for it.
OPTIMIZERS_REDUCE = True


def check_travel(model, policy):
    """Raises `ValueError` for dtypes of a `Policy` in which nothing travels here."""
    if policy.gather_dtype is not None and tf.distribute.get_strategy().num_replicas_in_sync > 1:
        raise ValueError(
            "Expected no `gather_dtype` under a `tf.distribute` strategy, where each replica has whole weights. "
            f"Received: gather_dtype={policy.gather_dtype!r}. Leave it out."
        )


def check_program(travel, is_compiled: bool):
    """No program says here in which dtypes numbers travel."""


def with_dtypes(run, travel, variables):
    """Returns `run`: the optimizer sums gradients, in the dtype that it was given."""
    return run


def split_slots(slots, weights):
    """Leaves the state of optimizers where it is: there is no `keras.distribution` in parts here."""
