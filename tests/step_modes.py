"""Runs optimizer steps in every compilation mode of the active backend, for the tests."""

import keras
import numpy as np
import pytest

MODES = {
    "tensorflow": ["eager", "graph", "xla"],
    "jax": ["eager", "jit"],
    "torch": ["eager"],
}[keras.backend.backend()]
# The same for `fit`, as options of `compile`.
FIT_MODES = {
    "tensorflow": [
        pytest.param({"run_eagerly": True}, id="eager"),
        pytest.param({"jit_compile": False}, id="graph"),
        pytest.param({"jit_compile": True}, id="xla"),
    ],
    "jax": [pytest.param({"run_eagerly": True}, id="eager"), pytest.param({"jit_compile": True}, id="jit")],
    "torch": [pytest.param({}, id="eager")],
}[keras.backend.backend()]

# Options of `compile` for tests of something else: on TensorFlow XLA takes a second and more, and a graph one.
QUICK_TO_COMPILE = {"jit_compile": False} if keras.backend.backend() == "tensorflow" else {}
QUICK_TO_START = {"run_eagerly": True} if keras.backend.backend() == "tensorflow" else {}


def applier(optimizer, variables, mode):
    """Returns a function that takes NumPy gradients, or `None`, and applies them to `variables` in `mode`."""
    if mode in ("graph", "xla"):
        import tensorflow as tf

        optimizer.build(variables)

        @tf.function(jit_compile=mode == "xla")
        def step(grads):
            optimizer.apply(grads, variables)

        return lambda grads: step([None if g is None else tf.constant(g) for g in grads])
    if mode == "jit":
        import jax

        optimizer.build(variables)
        step = jax.jit(optimizer.stateless_apply)

        def apply(grads):
            new_variables, new_state = step([v.value for v in optimizer.variables], grads, [v.value for v in variables])
            for variable, value in zip(variables, new_variables, strict=True):
                variable.assign(value)
            for variable, value in zip(optimizer.variables, new_state, strict=True):
                variable.assign(value)

        return apply

    def apply(grads):
        optimizer.apply([None if g is None else keras.ops.convert_to_tensor(g) for g in grads], variables)

    return apply


def snapshot(variables):
    """Returns the bytes of each variable: equal only when equal bit for bit, the sign of zero included."""
    return [np.asarray(keras.ops.convert_to_numpy(v.value)).tobytes() for v in variables]
