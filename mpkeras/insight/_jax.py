"""On JAX: what a model computes, gradients by the tensors inside it, and the operations of a step one by one."""

import dataclasses

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.extend.core import Literal

from mpkeras.insight.flops import Program, owner_name, owner_of, size
from mpkeras.insight.origins import user_line
from mpkeras.insight.ranges import is_finite


def run_with_gradients(run, variables):
    """As in `_tensorflow.py`; traced twice, as JAX differentiates by arguments: here by zeros that are added."""
    shapes = []

    def note_shape(tensor):
        shapes.append((tensor.shape, tensor.dtype))
        return tensor

    def run_in_scope(values, *taps):
        mapping = list(zip(variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True):
            return run(*taps)

    values = [variable.value for variable in variables]
    has_loss = jax.eval_shape(lambda values: run_in_scope(values, note_shape, note_shape), values)[0] is not None

    def loss_of(zeros, values):
        remaining = iter(zeros)

        def tap(tensor):
            return tensor + next(remaining)

        loss, results = run_in_scope(values, tap, tap)
        return (loss if has_loss else jnp.zeros(())), results

    zeros = [jnp.zeros(shape, dtype) for shape, dtype in shapes]
    # Op by op, as what is compiled for one operation serves the next batch, too: `jit` would begin anew each time.
    _, backward, results = jax.vjp(loss_of, zeros, values, has_aux=True)
    if not has_loss:
        return results, [None] * len(zeros), [None] * len(variables)
    return results, *backward(jnp.ones(()))


def scope(index: int):
    return jax.named_scope(owner_name(index))


def trace(function, inputs) -> Program:
    """Returns what `function`, of a list of tensors of these `(shape, dtype)`, computes; nothing is run."""
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in inputs]
    return program_of(jax.make_jaxpr(function)(structs).jaxpr)


def program_of(jaxpr) -> Program:
    """Returns what a traced function computes."""
    program = Program()
    _walk(jaxpr, program, owner=None, times=1)
    return program


def batch_bytes_of(program) -> int:
    """Returns the bytes on one device of what a compiled program takes after its first argument, the state."""

    def bytes_of(argument, sharding):
        # An argument that nothing reads is left out of the program, and has no sharding.
        return 0 if sharding is None else size(sharding.shard_shape(argument.shape)) * argument.dtype.itemsize

    counted = jax.tree.map(bytes_of, program.in_avals[0][1:], program.input_shardings[0][1:])
    return sum(jax.tree.leaves(counted))


def _walk(jaxpr, program, owner, times):
    for equation in _used(jaxpr):
        name = equation.primitive.name
        # Inner jaxprs name their scopes from the equation on that holds them.
        inside = owner_of(str(equation.source_info.name_stack), owner)
        if name in _FLOPS:
            dtypes = [str(operand.aval.dtype) for operand in equation.invars[:2]]
            program.add_product(inside, dtypes, _FLOPS[name](equation), times)
        elif name == "convert_element_type":
            source, target = (variables[0].aval for variables in (equation.invars, equation.outvars))
            program.add_cast(inside, str(source.dtype), str(target.dtype), size(target.shape), times)
        times_inside = times * equation.params["length"] if name == "scan" else times
        for part in [part for value in equation.params.values() for part in _jaxprs(value)]:
            before = len(program.products)
            _walk(part, program, inside, times_inside)
            program.uncounted += name == "while" and len(program.products) > before


def _jaxprs(value) -> list:
    values = value if isinstance(value, (tuple, list)) else [value]
    values = [getattr(value, "jaxpr", value) for value in values]
    return [value for value in values if hasattr(value, "eqns")]


def _used(jaxpr) -> list:
    """Returns the equations that an output depends on, in their order; a compiler leaves out the others."""
    needed = {id(variable) for variable in jaxpr.outvars}
    used = []
    for equation in reversed(jaxpr.eqns):
        if equation.effects or any(id(variable) in needed for variable in equation.outvars):
            needed.update(id(variable) for variable in equation.invars if not isinstance(variable, Literal))
            used.append(equation)
    return used[::-1]


def _dot_general(equation) -> int:
    (contracting, _), _ = equation.params["dimension_numbers"]
    left = equation.invars[0].aval.shape
    return 2 * size(equation.outvars[0].aval.shape) * size(left[axis] for axis in contracting)


def _convolution(equation) -> int:
    kernel = equation.invars[1].aval.shape
    filters = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
    # A transposed convolution has zeros between its inputs: they cost nothing anywhere else.
    zeros = size(equation.params["lhs_dilation"])
    return 2 * size(equation.outvars[0].aval.shape) * size(kernel) // (filters * zeros)


_FLOPS = {"dot_general": _dot_general, "conv_general_dilated": _convolution}


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
        # What is within a function names its scopes from there on.
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
            return _scan(params, inputs, inner)
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


def _scan(params, inputs, run) -> list:
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
