"""On TensorFlow: the operations of a step one by one."""

import keras
import tensorflow as tf
from tensorflow.python.framework import op_callbacks

from mpkeras.tools.blackbox.origins import frames, stack, user_line

# Keras and TensorFlow call these between an operation of the backward pass and the code that asked for gradients.
_BACKWARD = ("imperative_grad", "_gradient_function")
# They read or make memory: what is not finite there was so before.
_READS = ("ReadVariableOp", "Identity")


def first_operation(step, state, data, gradients, origins, watch_layers):
    """As in `_torch.py`; a step run eagerly under op callbacks, which see every operation, forward and backward."""
    watching = _Watching(origins)
    ran_eagerly = tf.config.functions_run_eagerly()
    # Or a `tf.function` in the step would be one operation. It warns of `tf.data`, which is not part of a step.
    tf.config.run_functions_eagerly(True)
    try:
        with watch_layers(watching.around):
            # `tf.debugging.enable_check_numerics`, the public form, stops at the first inf, that of a mask, too.
            op_callbacks.add_op_callback(watching)
            try:
                logs = step(*state, data)
            finally:
                op_callbacks.remove_op_callback(watching)
    finally:
        tf.config.run_functions_eagerly(ran_eagerly)
    dense = [grad.values if isinstance(grad, tf.IndexedSlices) else grad for grad in gradients]
    return origins.first(_floats([*dense, *keras.tree.flatten(logs)]))


class _Watching:
    def __init__(self, origins):
        self._origins = origins
        # `(layer, line)` of the forward operations, by their name and the tensors that they read or made.
        self._forward: dict = {}
        self._alive: list = []

    def around(self, path, call):
        with self._origins.within(path):
            return call()

    def __call__(self, op_type, inputs, attrs, outputs, op_name=None, graph=None):
        if graph is not None:
            # A function that is traced all the same: it is seen as one operation when it runs.
            return
        name = op_type.decode() if isinstance(op_type, bytes) else op_type
        gradient = _gradient_frame()
        if gradient is None:
            here = self._origins.layer, user_line(stack())
            for tensor in (*inputs, *outputs):
                self._forward.setdefault((name, id(tensor)), here)
            # An `id` is of another tensor once the first one is gone.
            self._alive.append((inputs, outputs))

        def place():
            if gradient is None:
                return "forward", name, *here
            return "backward", name, *(self._place_of(gradient) or (None, user_line(stack())))

        # Of a read of a variable the input is a handle, and no number.
        if name not in _READS or any(tensor.dtype.is_floating for tensor in inputs):
            self._origins.note(lambda: _floats(inputs), _floats(outputs), place)

    def _place_of(self, frame):
        """Returns the place of the operation whose gradient is computed; `None` where it is not known."""
        name = frame.f_locals.get("op_name")
        if name is None:
            return None
        name = name.decode() if isinstance(name, bytes) else name
        tensors = (*(frame.f_locals.get("outputs") or ()), *(frame.f_locals.get("inputs") or ()))
        places = [self._forward.get((name, id(tensor))) for tensor in tensors if tf.is_tensor(tensor)]
        return next((place for place in places if place is not None), None)


def _gradient_frame():
    """Returns the innermost frame of the backward pass around this code: of an operation's gradient, or of all."""
    for frame in frames():
        if frame.f_code.co_name in _BACKWARD and "tensorflow" in frame.f_code.co_filename:
            return frame
    return None


def _floats(values) -> list:
    return [(value, value.numpy()) for value in values if isinstance(value, tf.Tensor) and value.dtype.is_floating]
