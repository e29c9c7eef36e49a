"""On TensorFlow: a step run eagerly under op callbacks, which see every operation, forward and backward."""

import functools
import sys
import types

import keras
import tensorflow as tf
from tensorflow.python.framework import op_callbacks

from mpkeras.insight.operations.origins import Operation, stack, user_line

# Keras and TensorFlow call these between an operation of the backward pass and the code that asked for gradients.
_GRADIENT = "_gradient_function"
_BACKWARD = ("imperative_grad", _GRADIENT)
# They read or make memory: what is not finite there was so before.
_READS = ("ReadVariableOp", "Identity")


def first_operation(step, state, data, gradients, origins, watch_layers):
    """As in `_torch.py`."""
    watching = _Watching(origins)
    data = keras.tree.map_structure(lambda value: None if value is None else tf.convert_to_tensor(value), data)
    before = tf.config.functions_run_eagerly()
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
        tf.config.run_functions_eagerly(before)
    dense = [grad.values if isinstance(grad, tf.IndexedSlices) else grad for grad in gradients]
    return origins.first(_floats([*dense, *keras.tree.flatten(logs)]))


class _Watching:
    def __init__(self, origins):
        self._origins = origins
        self._current: list = []
        # `(layer, line)` of the forward operations, by their name and the tensors that they read or made.
        self._forward: dict = {}
        self._alive: list = []

    def around(self, path, call):
        self._origins.enter(path, list(self._current))
        self._current.append(path)
        try:
            return call()
        finally:
            self._current.pop()

    def __call__(self, op_type, inputs, attrs, outputs, op_name=None, graph=None):
        if graph is not None:
            # A function that is traced all the same: it is seen as one operation when it runs.
            return None
        name = op_type.decode() if isinstance(op_type, bytes) else op_type
        gradient = _gradient_frame()
        if gradient is None:
            where = self._current[-1] if self._current else None
            place = where, user_line(stack())
            for tensor in (*inputs, *outputs):
                self._forward.setdefault((name, id(tensor)), place)
            # An `id` is of another tensor once the first one is gone.
            self._alive.append((inputs, outputs))
        arrays = _floats(outputs)
        if name not in _READS or self._origins_know(inputs):
            describe = functools.partial(self._describe, name, gradient, arrays)
            self._origins.note(lambda: _floats(inputs), arrays, describe)
        return None

    def _origins_know(self, inputs) -> bool:
        """Whether there is a tensor among the inputs, and not only the handle of a variable."""
        return any(tensor.dtype.is_floating for tensor in inputs)

    def _describe(self, name, gradient, outputs, numbers):
        dtype = outputs[0][1].dtype.name
        if gradient is None:
            where = self._current[-1] if self._current else None
            return Operation("forward", name, where, user_line(stack()), dtype, numbers)
        where, line = self._place_of(gradient) or (None, user_line(stack()))
        return Operation("backward", name, where, line, dtype, numbers)

    def _place_of(self, frame):
        """Returns the place of the operation whose gradient is computed."""
        values = frame.f_locals
        name = values.get("op_name")
        if name is None:
            return None
        name = name.decode() if isinstance(name, bytes) else name
        tensors = (*(values.get("outputs") or ()), *(values.get("inputs") or ()))
        found = [self._forward.get((name, id(tensor))) for tensor in tensors if tf.is_tensor(tensor)]
        return next((place for place in found if place is not None), None)


def _gradient_frame():
    """Returns the innermost frame of the backward pass around this code: of an operation's gradient, or of all."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _BACKWARD and "tensorflow" in frame.f_code.co_filename:
            return frame
        frame = frame.f_back
    return None


def _floats(values) -> list:
    return [(value, value.numpy()) for value in values if isinstance(value, tf.Tensor) and value.dtype.is_floating]
