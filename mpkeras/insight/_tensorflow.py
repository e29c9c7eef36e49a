"""Gradients of a loss by the tensors inside a model, on TensorFlow."""

import keras
import tensorflow as tf


def run_with_gradients(run, variables):
    """Runs `run(tap_input, tap_output)` in a `keras.StatelessScope`, and differentiates the loss it returns.

    Args:
        run: Called with two functions, each of which returns the tensor to go on with in the place of its argument.
            Returns `(loss, results)`: a scalar or `None`, and any structure of tensors.
        variables: Keras variables by which to differentiate, too.

    Returns:
        `(results, gradients by the tapped tensors in the order of the taps, gradients by the variables)`; the gradients
        are `None` where the loss is, or does not depend on them.
    """
    taps = []
    with tf.GradientTape() as tape:

        def tap_output(tensor):
            # The tensor itself: Keras finds the logits of a softmax by an attribute on it.
            tape.watch(tensor)
            taps.append(tensor)
            return tensor

        def tap_input(tensor):
            # A tensor of its own for each layer that reads it.
            tensor = tf.identity(tensor)
            tape.watch(tensor)
            taps.append(tensor)
            return tensor

        native = [variable.value for variable in variables]
        tape.watch(native)
        with keras.StatelessScope(collect_losses=True):
            loss, results = run(tap_input, tap_output)
    if loss is None:
        return results, [None] * len(taps), [None] * len(variables)
    grads = tape.gradient(loss, taps + native)
    grads = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
    return results, grads[: len(taps)], grads[len(taps) :]
