"""On TensorFlow: what a model computes, gradients by the tensors inside it, and the operations of a step one by one."""

import keras
import tensorflow as tf
from tensorflow.python.framework import op_callbacks

from mpkeras.insight.flops import Program, owner_name, owner_of, size
from mpkeras.insight.origins import frames, stack, user_line


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
            return tap_output(tf.identity(tensor))

        native = [tf.convert_to_tensor(variable.value) for variable in variables]
        tape.watch(native)
        # Keras reads regularized weights from the scope alone.
        with keras.StatelessScope(state_mapping=list(zip(variables, native, strict=True)), collect_losses=True):
            loss, results = run(tap_input, tap_output)
    if loss is None:
        return results, [None] * len(taps), [None] * len(variables)
    grads = tape.gradient(loss, taps + native)
    grads = [tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in grads]
    return results, grads[: len(taps)], grads[len(taps) :]


def scope(index: int):
    return tf.name_scope(owner_name(index))


def trace(function, inputs) -> Program:
    """Returns what `function`, of a list of tensors of these `(shape, dtype)`, computes; nothing is run."""
    specs = [tf.TensorSpec(shape, dtype) for shape, dtype in inputs]
    traced = tf.function(lambda *tensors: function(list(tensors)), autograph=False).get_concrete_function(*specs)
    program = Program()
    batch = inputs[0][0][0] if inputs and inputs[0][0] else None
    _walk(traced.graph, program, owner=None, times=1, batch=batch)
    return program


def _walk(graph, program, owner, times, batch):
    for operation in _used(graph):
        inside = owner_of(operation.name, owner)
        flops = _FLOPS.get(operation.type)
        if flops is not None:
            _add_product(program, operation, inside, flops, times, batch)
        elif operation.type == "Cast":
            source, target = operation.inputs[0].dtype.name, operation.outputs[0].dtype.name
            program.add_cast(inside, source, target, operation.outputs[0].shape.num_elements() or 0, times)
        for inner, repeated in _functions(operation):
            before = len(program.products)
            _walk(inner, program, inside, times * (repeated or 1), batch)
            program.uncounted += repeated is None and len(program.products) > before


def _used(graph) -> list:
    """Returns the operations that an output depends on; what else Keras left in the graph is never run."""
    waiting, seen = [tensor.op for tensor in graph.outputs], {}
    while waiting:
        operation = waiting.pop()
        if operation.name not in seen:
            seen[operation.name] = operation
            waiting.extend(tensor.op for tensor in operation.inputs)
            waiting.extend(operation.control_inputs)
    return list(seen.values())


def _functions(operation):
    """Yields `(graph, times)` for each function that `operation` runs; `None` times where that is not known."""
    if operation.type in ("While", "StatelessWhile"):
        # The second loop variable of `tf.while_loop` is its limit.
        yield _graph(operation, "body"), _static(operation.inputs[1])
    elif operation.type in ("If", "StatelessIf"):
        yield _graph(operation, "then_branch"), 1
    elif "PartitionedCall" in operation.type:
        yield _graph(operation, "f"), 1


def _graph(operation, attribute):
    # `Graph` has no public name for the functions in it.
    return operation.graph._get_function(operation.get_attr(attribute).name).graph


def _static(tensor) -> int | None:
    if tensor.op.type == "Max":  # as Keras writes the number of steps of a recurrent layer
        tensor = tensor.op.inputs[0]
    value = tf.get_static_value(tensor)
    return int(value) if value is not None and value >= 0 else None


def _add_product(program, operation, owner, flops, times, batch):
    shapes = [tensor.shape for tensor in (*operation.inputs, operation.outputs[0])]
    if not all(shape.is_fully_defined() for shape in shapes):
        # A saved function leaves the size of the batch open.
        program.uncounted += 1
    dtypes = [tensor.dtype.name for tensor in operation.inputs if tensor.dtype.is_floating or tensor.dtype.is_integer]
    try:
        shapes = [[batch if i == 0 and n is None else n for i, n in enumerate(shape.as_list())] for shape in shapes]
        count = flops(operation, shapes[:-1], size(shapes[-1]))
    except (TypeError, ValueError):  # another dimension, or all of them, is not known
        return
    if count:
        program.add_product(owner, dtypes[-2:], count, times)


def _matmul(operation, shapes, results) -> int:
    left = shapes[0][-2 if operation.get_attr("transpose_a") else -1]
    right = shapes[1][-1 if operation.get_attr("transpose_b") else -2]
    return 2 * results * (left or right)  # of an input of unknown shape the kernel knows


def _batch_matmul(operation, shapes, results) -> int:
    return 2 * results * shapes[0][-2 if operation.get_attr("adj_x") else -1]


def _einsum(operation, shapes, results) -> int:
    terms, result = operation.get_attr("equation").decode().split("->")
    terms = terms.split(",")
    if len(terms) < 2:  # a transposition or a sum
        return 0
    sizes: dict = {}
    for term, shape in zip(terms, shapes, strict=True):
        front, _, back = term.partition("...")
        sizes.update(zip(front, shape, strict=False))
        sizes.update(zip(back, shape[len(shape) - len(back) :], strict=True))
    return 2 * results * size(n for label, n in sizes.items() if label not in result)


def _convolution(operation, shapes, results) -> int:
    return 2 * results * size(shapes[1][:-1])


def _depthwise_convolution(operation, shapes, results) -> int:
    return 2 * results * size(shapes[1][:-2])


def _transposed_convolution(operation, shapes, results) -> int:
    return 2 * size(shapes[2]) * size(shapes[1][:-1])


_FLOPS = {
    "MatMul": _matmul,
    "BatchMatMul": _batch_matmul,
    "BatchMatMulV2": _batch_matmul,
    "BatchMatMulV3": _batch_matmul,
    "Einsum": _einsum,
    "Conv2D": _convolution,
    "Conv3D": _convolution,
    "DepthwiseConv2dNative": _depthwise_convolution,
    "Conv2DBackpropInput": _transposed_convolution,
    "Conv3DBackpropInputV2": _transposed_convolution,
}


# Keras and TensorFlow call these between an operation of the backward pass and the code that asked for gradients.
_BACKWARD = ("imperative_grad", "_gradient_function")
# They read or make memory: what is not finite there was so before.
_READS = ("ReadVariableOp", "Identity")


def first_operation(step, state, data, gradients, origins, watch_layers):
    """As in `_torch.py`; a step run eagerly under op callbacks, which see every operation, forward and backward."""
    watching = _Watching(origins)
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
        found = [self._forward.get((name, id(tensor))) for tensor in tensors if tf.is_tensor(tensor)]
        return next((place for place in found if place is not None), None)


def _gradient_frame():
    """Returns the innermost frame of the backward pass around this code: of an operation's gradient, or of all."""
    for frame in frames():
        if frame.f_code.co_name in _BACKWARD and "tensorflow" in frame.f_code.co_filename:
            return frame
    return None


def _floats(values) -> list:
    return [(value, value.numpy()) for value in values if isinstance(value, tf.Tensor) and value.dtype.is_floating]
