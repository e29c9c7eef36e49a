"""On JAX: what a model computes, and gradients by the tensors inside it."""

import jax
import jax.numpy as jnp
import keras
from jax.extend.core import Literal

from mpkeras.tools.shared.flops import Program, owner_name, owner_of, size


def run_with_gradients(run, variables, values):
    """As in `_tensorflow.py`; traced twice, as JAX differentiates by arguments: here by zeros that are added."""
    shapes = []

    def note_shape(tensor):
        shapes.append((tensor.shape, tensor.dtype))
        return tensor

    def run_in_scope(values, *taps):
        mapping = list(zip(variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True):
            return run(*taps)

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


def outputs_of(model, x):
    """Returns what a model makes of `KerasTensor`s, as such: traced, whether its variables have values or not."""

    def like(tensor):
        return jax.ShapeDtypeStruct(tuple(tensor.shape), tensor.dtype)

    state = [list(map(like, group)) for group in (model.trainable_variables, model.non_trainable_variables)]
    inputs = keras.tree.map_structure(lambda tensor: None if tensor is None else like(tensor), x)
    outputs, _ = jax.eval_shape(model.stateless_call, *state, inputs)
    return keras.tree.map_structure(lambda output: keras.KerasTensor(output.shape, str(output.dtype)), outputs)


def batch_bytes_of(program) -> int:
    """Returns the bytes on one device of what a compiled program takes after its first argument, the state."""

    def bytes_of(argument, sharding):
        # An argument that nothing reads is left out of the program, and has no sharding.
        return 0 if sharding is None else size(sharding.shard_shape(argument.shape)) * argument.dtype.itemsize

    counted = jax.tree.map(bytes_of, program.in_avals[0][1:], program.input_shardings[0][1:])
    return sum(jax.tree.leaves(counted))


def _walk(jaxpr, program, owner, times):
    # How many whole numbers in a row a variable holds.
    numbers: dict = {}
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
        if name == "iota":
            numbers[id(equation.outvars[0])] = equation.params["shape"][equation.params["dimension"]]
        elif name in _HANDING_ON:
            handed_on = [operand for operand in equation.invars if not isinstance(operand, Literal)]
            if len(handed_on) == 1 and id(handed_on[0]) in numbers:
                numbers[id(equation.outvars[0])] = numbers[id(handed_on[0])]
        if name in ("iota", "convert_element_type"):
            program.add_counted(inside, str(equation.outvars[0].aval.dtype), numbers.get(id(equation.outvars[0])))
        times_inside = times * equation.params["length"] if name == "scan" else times
        bodies = [body for value in equation.params.values() for body in _jaxprs(value)]
        if name == "cond":
            # One of its branches runs, and nobody knows which: the one that multiplies most.
            bodies = [max(bodies, key=lambda body: program_of(body).flops)]
        for body in bodies:
            products_before = len(program.products)
            _walk(body, program, inside, times_inside)
            program.uncounted += name == "while" and len(program.products) > products_before


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
    inputs, kernel = (variable.aval.shape for variable in equation.invars)
    axes = equation.params["dimension_numbers"]
    # A transposed convolution has zeros between its inputs: they cost nothing anywhere else.
    zeros = size(equation.params["lhs_dilation"])
    by_outputs = size(equation.outvars[0].aval.shape) * size(kernel) // (kernel[axes.rhs_spec[0]] * zeros)
    # Nor do those around them, where it has more outputs than its inputs reach: each input meets each weight once.
    by_inputs = size(inputs) * size(kernel) // inputs[axes.lhs_spec[1]]
    return 2 * min(by_outputs, by_inputs)


# Operations that leave whole numbers in a row what they are, the sum with a number among them.
_HANDING_ON = ("add", "broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "sub", "transpose")
_FLOPS = {"dot_general": _dot_general, "conv_general_dilated": _convolution}
