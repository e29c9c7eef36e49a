"""On JAX: the operations of a step one by one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal

from mpkeras.tools.blackbox.origins import user_line
from mpkeras.tools.shared._jax import scope
from mpkeras.tools.shared.flops import owner_name, owner_of
from mpkeras.tools.shared.ranges import is_finite


def first_operation(step, state, data, gradients, origins, watch_layers):
    """As in `_torch.py`; the program of the step is interpreted, into what it calls, branches and loops."""
    paths: list = []

    def around(path, call):
        paths.append(path)
        with scope(len(paths) - 1):
            return call()

    def traced(state, data):
        gradients.clear()
        first, second = step(state, data)
        # Keras' train step returns the logs first, ours the state.
        logs = first if isinstance(first, dict) else second
        return [grad for grad in gradients if grad is not None], logs

    with watch_layers(around):
        closed, shapes = jax.make_jaxpr(traced, return_shape=True)(state, data)
    interpreter = _Interpreter(origins, paths)
    values = interpreter.run(closed.jaxpr, closed.consts, jax.tree_util.tree_leaves((state, data)))
    number = len(shapes[0])
    logs = _floats(values[number:])
    operation = origins.first([*_floats(values[:number]), *logs])
    if operation is not None and operation.side == "forward" and all(is_finite(array) for _, array in logs):
        # JAX computes slopes along with the forward pass: what reaches gradients alone is of the backward one.
        return dataclasses.replace(operation, side="backward")
    return operation


class _Interpreter:
    """Runs the equations of a program one by one, and those of the programs that they call."""

    def __init__(self, origins, paths):
        self._origins = origins
        self._paths = paths
        # The layer of the equation before.
        self._last_owner = None

    def run(self, jaxpr, consts, arguments, owner=None, is_backward=False) -> list:
        """Returns the outputs of `jaxpr`.

        Args:
            jaxpr, consts, arguments: The program, and what it takes.
            owner, is_backward: Layer and side of the equation that calls it, where its own equations do not say.
        """
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
            outputs = self._evaluated(equation, inputs, owner, is_backward)
            values.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]

    def _evaluated(self, equation, inputs, owner, is_backward) -> list:
        name, params, scopes = equation.primitive.name, equation.params, str(equation.source_info.name_stack)
        # Operations within a function name their scopes from there on.
        owner = owner_of(scopes, owner)
        is_backward = is_backward or "transpose(" in scopes
        if owner != self._last_owner:
            self._last_owner = owner
            around = [path for i, path in enumerate(self._paths) if owner_name(i) in scopes]
            self._origins.enter(None if owner is None else self._paths[owner], around)

        def inner(jaxpr, arguments):
            consts = getattr(jaxpr, "consts", [])
            return self.run(getattr(jaxpr, "jaxpr", jaxpr), consts, arguments, owner, is_backward)

        if name == "scan":
            return _scan(equation, inputs, inner)
        if name == "while":
            return _while(params, inputs, inner)
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

        def place():
            traceback = equation.source_info.traceback
            frames = [] if traceback is None else traceback.frames
            line = user_line((frame.file_name, frame.line_num, frame.function_name) for frame in frames)
            return "backward" if is_backward else "forward", name, None if owner is None else self._paths[owner], line

        self._origins.note(lambda: _floats(inputs), _floats(outputs), place)
        return outputs


def _scan(equation, inputs, run) -> list:
    params = equation.params
    body = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
    # By the shapes, as each version of JAX has its own parameters for it: what comes from the rounds has an axis more.
    carried = _same_rank(equation.outvars, body.outvars)
    consts = _same_rank(equation.invars, body.invars) - carried
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
        shapes = [variable.aval for variable in body.outvars[carried:]]
        return [*carry, *(jnp.zeros((0, *aval.shape), aval.dtype) for aval in shapes)]
    return [*carry, *(jnp.stack(parts) for parts in zip(*collected, strict=True))]


def _same_rank(variables, others) -> int:
    return sum(one.aval.ndim == other.aval.ndim for one, other in zip(variables, others, strict=True))


def _while(params, inputs, run) -> list:
    of_condition, of_body = params["cond_nconsts"], params["body_nconsts"]
    fixed, body = inputs[:of_condition], inputs[of_condition : of_condition + of_body]
    carry = inputs[of_condition + of_body :]
    while bool(run(params["cond_jaxpr"], [*fixed, *carry])[0]):
        carry = run(params["body_jaxpr"], [*body, *carry])
    return carry


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
