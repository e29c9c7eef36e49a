"""Softmax and sigmoid whose crossentropy gradient does not vanish, for backends that do not fuse the two.

Keras clips probabilities to `[epsilon, 1 - epsilon]` (1e-7) in its crossentropies. A label whose probability
is below that gets the gradient 0: the worst mistakes teach nothing. TensorFlow is spared, as Keras finds the
logits there and fuses. Elsewhere these functions stay just inside the clip, and gradients pass unclipped.
"""

import math

import keras
from keras import ops


def is_fused() -> bool:
    """Returns whether the crossentropies of the active backend find the logits of a probability."""
    return keras.backend.backend() == "tensorflow"


def trainable_softmax(logits, axis=-1):
    """Returns probabilities of at least about `2 * epsilon`, with the gradient of the exact softmax.

    Through a crossentropy that normalizes and clips, the gradient is `softmax(logits) - one_hot(label)` up to
    `2 * epsilon` for each class: 2e-7 for two classes, 1e-3 for five thousand.

    Args:
        logits: float32 tensor of any shape.
        axis: The axis of the classes.
    """
    log_probabilities = ops.log_softmax(logits, axis=axis)
    floor = math.log(2 * keras.config.epsilon())
    # exp(log p) has the derivative p' d(log p), where p' is the floored probability: the crossentropy divides
    # by the same p', and what is left is the exact gradient.
    floored = ops.exp(_with_value(ops.maximum(log_probabilities, floor), gradient_of=log_probabilities))
    return floored / ops.stop_gradient(ops.sum(floored, axis=axis, keepdims=True))


def trainable_sigmoid(logits):
    """Returns probabilities at least `3 * epsilon` away from 0 and 1, whose gradient reaches the logits.

    Through a binary crossentropy the gradient is `sigmoid(logits) - label` up to `3 * epsilon`.

    Args:
        logits: float32 tensor of any shape.
    """
    limit = -math.log(3 * keras.config.epsilon())
    return ops.sigmoid(_with_value(ops.clip(logits, -limit, limit), gradient_of=logits))


def _with_value(value, gradient_of):
    """Returns a tensor that is `value`, and through which gradients flow as through `gradient_of`."""
    return gradient_of + ops.stop_gradient(value - gradient_of)
