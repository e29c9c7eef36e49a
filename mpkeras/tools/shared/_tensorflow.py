"""On TensorFlow: what a model computes, gradients by the tensors inside it, and several steps in one graph."""

import functools

import keras
import tensorflow as tf

from mpkeras.tools.shared.flops import Program, owner_name, owner_of, size


def run_with_gradients(run, variables, values):
    """Runs `run(tap_input, tap_output)` in a `keras.StatelessScope`, and differentiates the loss it returns.

    Args:
        run: Called with two functions, each of which returns the tensor to go on with in the place of its argument.
            Returns `(loss, results)`: a scalar or `None`, and any structure of tensors.
        variables: Keras variables by which to differentiate, too.
        values: The tensors that they are read as.

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

        tape.watch(values)
        # Keras reads regularized weights from the scope alone.
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True)), collect_losses=True):
            loss, results = run(tap_input, tap_output)
    if loss is None:
        return results, [None] * len(taps), [None] * len(variables)
    grads = tape.gradient(loss, taps + values)
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
        if operation.type in ("Range", "Cast"):
            program.add_counted(inside, operation.outputs[0].dtype.name, _numbers_in_a_row(operation))
        for inner, repeated in _functions(operation, batch):
            products_before = len(program.products)
            _walk(inner, program, inside, times * (repeated or 1), batch)
            program.uncounted += repeated is None and len(program.products) > products_before


def _numbers_in_a_row(operation) -> int | None:
    """Returns how many whole numbers in a row an operation hands on; `None` where it does another thing."""
    while operation.type in _HANDING_ON:
        handed_on = [tensor.op for tensor in operation.inputs[:2] if tensor.op.type != "Const"]
        if len(handed_on) != 1:
            return None
        operation = handed_on[0]
    return operation.outputs[0].shape.num_elements() if operation.type == "Range" else None


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


def _functions(operation, batch):
    """Yields `(graph, times)` for each function that `operation` runs; `None` times where that is not known."""
    if operation.type in ("While", "StatelessWhile"):
        # The second loop variable of `tf.while_loop` is its limit.
        yield _graph(operation, operation.get_attr("body")), _static(operation.inputs[1])
    elif operation.type in ("If", "StatelessIf"):
        yield _dearest(operation, [operation.get_attr(name) for name in ("then_branch", "else_branch")], batch), 1
    elif operation.type in ("Case", "StatelessCase"):
        yield _dearest(operation, operation.get_attr("branches"), batch), 1
    elif "PartitionedCall" in operation.type:
        yield _graph(operation, operation.get_attr("f")), 1


def _graph(operation, function):
    # `Graph` has no public name for the functions in it.
    return operation.graph._get_function(function.name).graph


def _dearest(operation, branches, batch):
    """Returns the graph of the branch that multiplies most: one of them runs, and nobody knows which."""

    def flops(graph):
        program = Program()
        _walk(graph, program, owner=None, times=1, batch=batch)
        return program.flops

    return max((_graph(operation, branch) for branch in branches), key=flops)


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


# Operations that leave whole numbers in a row what they are, the sum with a number among them.
_HANDING_ON = ("AddV2", "BroadcastTo", "Cast", "ExpandDims", "Identity", "Reshape", "Squeeze", "Sub", "Transpose")
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


class SeveralSteps:
    """Runs the steps of one execution in one go, as Keras does, and tells what they read.

    Keras runs several steps in one graph only where it reads the batches from a `tf.data.Iterator` itself, and nobody
    learns of them; of batches in a list it calls a graph for each. Here one graph reads, and another runs the steps.

    Args:
        function: The model's train function; of a list iterator it runs a step on each batch.
        steps: Steps per execution.
    """

    def __init__(self, function, steps: int):
        self._function = function

        @tf.function(autograph=False, reduce_retracing=True)
        def read(iterator):
            optionals = [iterator.get_next_as_optional() for _ in range(steps)]
            return optionals, sum(tf.cast(optional.has_value(), tf.int32) for optional in optionals)

        @tf.function(autograph=False, reduce_retracing=True)
        def run(optionals):
            first, *others = [optional.get_value() for optional in optionals]
            tensors_of = functools.partial(tf.nest.flatten, expand_composites=True)
            # Twice in the graph and no more: the first step says what the logs of the others are.
            logs = tf.nest.map_structure(tf.convert_to_tensor, function(iter([first])))

            def step(i, logs, arrays):
                data = tf.nest.pack_sequence_as(first, [array.read(i) for array in arrays], expand_composites=True)
                return i + 1, tf.nest.map_structure(tf.convert_to_tensor, function(iter([data]))), arrays

            arrays = [_array(parts) for parts in zip(*map(tensors_of, others), strict=True)]
            after = tf.while_loop(lambda i, *_: i < len(others), step, (0, logs, arrays), parallel_iterations=1)
            return after[1]

        self._read, self._run, self._steps = read, run, steps

    def __call__(self, iterator) -> tuple:
        """Returns the logs, the number of steps, and a function that returns the batches.

        Raises:
            StopIteration: Where no batch is left, as Keras' own function does.
        """
        optionals, number = self._read(iterator)
        optionals = optionals[: int(number)]

        def batches():
            return [optional.get_value() for optional in optionals]

        if not optionals:
            raise StopIteration
        # The rest at the end of the data: another graph for it would cost more than it saves.
        logs = self._run(optionals) if len(optionals) == self._steps else self._function(iter(batches()))
        return logs, len(optionals), batches


def _array(tensors):
    shapes = [tensor.shape for tensor in tensors]
    shape = functools.reduce(tf.TensorShape.most_specific_compatible_shape, shapes)
    array = tf.TensorArray(tensors[0].dtype, len(tensors), infer_shape=False, element_shape=shape)
    for i, tensor in enumerate(tensors):
        array = array.write(i, tensor)
    return array
