"""TensorFlow's part of the callbacks: several steps in one graph, and copies of single numbers around a step."""

import functools

import numpy as np
import tensorflow as tf


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


def steps_ahead(model, optimizers):
    """As in `_jax.py`: `None`."""
    del model, optimizers


class NumberCopies:
    """As in `_jax.py`; the numbers are in the variables, and `after_step` returns how many more steps were skipped."""

    def __init__(self, model, variables, skip_counts):
        own_part = model.distribute_strategy.experimental_local_results
        self._variables = [own_part(variable.value)[0] for variable in variables]
        self._counts = [i for i, v in enumerate(variables) if any(v is count for count in skip_counts)]

    def before_step(self):
        # Reading copies nothing: TensorFlow gives a variable a new buffer when it is assigned.
        return [_value(variable) for variable in self._variables]

    def after_step(self, before):
        changes = [tf.subtract(_value(self._variables[i]), before[i]) for i in self._counts]
        return changes[0] if len(changes) == 1 else tf.add_n(changes)

    def skipped(self, before, after) -> bool:
        del before
        return int(after.numpy()) > 0

    def read(self, copies) -> list:
        return [np.array(value.numpy()) for value in copies]


def _value(variable):
    # The operation itself: by way of `tf.Variable` it took four times as long.
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def _array(tensors):
    shapes = [tensor.shape for tensor in tensors]
    shape = functools.reduce(tf.TensorShape.most_specific_compatible_shape, shapes)
    array = tf.TensorArray(tensors[0].dtype, len(tensors), infer_shape=False, element_shape=shape)
    for i, tensor in enumerate(tensors):
        array = array.write(i, tensor)
    return array
