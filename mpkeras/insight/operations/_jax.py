"""On JAX: the program of a step, interpreted equation by equation, into what it calls, branches and loops."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.extend.core import Literal

from mpkeras.insight._jax import scope
from mpkeras.insight.flops import owner_name, owner_of
from mpkeras.insight.operations.origins import Operation, is_finite, user_line


def first_operation(step, state, data, gradients, origins, watch_layers):
    """As in `_torch.py`."""
    paths: list = []

    def around(path, call):
        paths.append(path)
        with scope(len(paths) - 1):
            return call()

    def traced(state, data):
        gradients.clear()
        result, _ = _logs_and_state(step(state, data))
        return [grad for grad in gradients if grad is not None], result

    data = keras.tree.map_structure(lambda value: None if value is None else jnp.asarray(value), data)
    with watch_layers(around):
        closed, shapes = jax.make_jaxpr(traced, return_shape=True)(state, data)
    interpreter = _Interpreter(origins, paths)
    values = interpreter.run(closed.jaxpr, closed.consts, jax.tree_util.tree_leaves((state, data)), None)
    number = len(shapes[0])
    logs = _floats(values[number:])
    operation = origins.first([*_floats(values[:number]), *logs])
    if operation is not None and operation.side == "forward" and all(is_finite(array) for _, array in logs):
        # JAX computes slopes along with the forward pass: what reaches gradients alone is of the backward one.
        return dataclasses.replace(operation, side="backward")
    return operation


def _logs_and_state(result):
    """Returns the logs of a train step of Keras' or of ours, which return them in another order."""
    first, second = result
    return (first, second) if isinstance(first, dict) else (second, first)


class _Interpreter:
    """Runs the equations of a program; those of one that it calls are run by an interpreter that this one makes."""

    def __init__(self, origins, paths, is_backward: bool = False, last_owner: list | None = None):
        self._origins = origins
        self._paths = paths
        # What calls a function may be backward, where the function's own equations do not say so.
        self._is_backward = is_backward
        # The layer of the equation before, for all interpreters of a program.
        self._last_owner = [None] if last_owner is None else last_owner

    def run(self, jaxpr, consts, arguments, owner) -> list:
        """Returns the outputs of `jaxpr`; each equation is run by itself, and looked at."""
        values: dict = {}

        def read(atom):
            return atom.val if isinstance(atom, Literal) else values[atom]

        values.update(zip(jaxpr.constvars, consts, strict=True))
        values.update(zip(jaxpr.invars, arguments, strict=True))
        literals = [atom.val for equation in jaxpr.eqns for atom in equation.invars if isinstance(atom, Literal)]
        for constant in _floats([*consts, *literals]):
            self._origins.know_constant(constant)
        for equation in jaxpr.eqns:
            inputs = [read(atom) for atom in equation.invars]
            outputs = self._evaluated(equation, inputs, owner)
            values.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _evaluated(self, equation, inputs, owner) -> list:
        name, params = equation.primitive.name, equation.params
        # What is within a function names its scopes from there on.
        owner = owner_of(str(equation.source_info.name_stack), owner)
        if owner != self._last_owner[0]:
            self._last_owner[0] = owner
            around = [
                path for i, path in enumerate(self._paths) if owner_name(i) in str(equation.source_info.name_stack)
            ]
            self._origins.enter(None if owner is None else self._paths[owner], around)
        backward = "transpose(" in str(equation.source_info.name_stack)
        inner = self._within(backward, owner)
        if name == "scan":
            return self._scan(params, inputs, inner)
        if name == "while":
            return self._while(params, inputs, inner)
        if name == "cond":
            index = int(np.clip(np.asarray(inputs[0]), 0, len(params["branches"]) - 1))
            return inner(params["branches"][index], inputs[1:])
        called = _called(params, len(inputs), len(equation.outvars))
        if called is not None:
            return inner(called, inputs)
        bound = equation.primitive.get_bind_params(params)
        # Older JAX returns the functions beside the parameters.
        functions, bound = bound if isinstance(bound, tuple) else ((), bound)
        with equation.ctx.manager:
            outputs = equation.primitive.bind(*functions, *inputs, **bound)
        outputs = list(outputs) if equation.primitive.multiple_results else [outputs]
        self._look(equation, inputs, outputs, owner)
        return outputs

    def _within(self, backward, owner):
        """Returns a function that runs a jaxpr within an equation, the side of which its own equations do not know."""

        def run(jaxpr, arguments):
            is_backward = self._is_backward or backward
            interpreter = _Interpreter(self._origins, self._paths, is_backward, self._last_owner)
            closed = jaxpr if hasattr(jaxpr, "consts") else None
            return interpreter.run(getattr(jaxpr, "jaxpr", jaxpr), closed.consts if closed else [], arguments, owner)

        return run

    def _scan(self, params, inputs, run) -> list:
        consts, carried = params["num_consts"], params["num_carry"]
        fixed, carry, sequences = inputs[:consts], inputs[consts : consts + carried], inputs[consts + carried :]
        collected: list = []
        steps = range(params["length"])
        for i in reversed(steps) if params["reverse"] else steps:
            outputs = run(params["jaxpr"], [*fixed, *carry, *(sequence[i] for sequence in sequences)])
            carry = outputs[:carried]
            collected.append(outputs[carried:])
        if params["reverse"]:
            collected.reverse()
        if not collected:
            shapes = [variable.aval for variable in params["jaxpr"].jaxpr.outvars[carried:]]
            return [*carry, *(jnp.zeros((0, *aval.shape), aval.dtype) for aval in shapes)]
        return [*carry, *(jnp.stack(parts) for parts in zip(*collected, strict=True))]

    def _while(self, params, inputs, run) -> list:
        of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
        fixed, body = inputs[:of_condition], inputs[of_condition : of_condition + of_body]
        carry = inputs[of_condition + of_body :]
        while bool(run(params["cond_jaxpr"], [*fixed, *carry])[0]):
            carry = run(params["body_jaxpr"], [*body, *carry])
        return carry

    def _look(self, equation, inputs, outputs, owner):
        arrays = _floats(outputs)
        self._origins.note(lambda: _floats(inputs), arrays, functools.partial(self._describe, equation, arrays, owner))

    def _describe(self, equation, outputs, owner, numbers):
        source = equation.source_info
        side = "backward" if self._is_backward or "transpose(" in str(source.name_stack) else "forward"
        frames = source.traceback.frames if source.traceback is not None else []
        line = user_line((frame.file_name, frame.line_num, frame.function_name) for frame in frames)
        where = None if owner is None else self._paths[owner]
        return Operation(side, equation.primitive.name, where, line, outputs[0][1].dtype.name, numbers)


def _called(params, inputs: int, outputs: int):
    """Returns the jaxpr that an equation calls with its own inputs: of `jit`, `checkpoint`, custom derivatives."""
    for key in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        called = params.get(key)
        jaxpr = getattr(called, "jaxpr", called)
        if hasattr(jaxpr, "eqns") and (len(jaxpr.invars), len(jaxpr.outvars)) == (inputs, outputs):
            return called
    return None


def _floats(values) -> list:
    floats = [value for value in values if jnp.issubdtype(jnp.result_type(value), jnp.floating)]
    return [(value, np.asarray(value)) for value in floats]
