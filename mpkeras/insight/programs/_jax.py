"""Products and casts of a jaxpr."""

import jax
from jax.extend.core import Literal

from mpkeras.insight.programs.program import Program, owner_name, owner_of, size


def scope(index: int):
    return jax.named_scope(owner_name(index))


def trace(function, inputs) -> Program:
    """Returns what `function`, of a list of tensors, computes; nothing is run.

    Args:
        function: Takes and returns a list of tensors.
        inputs: List of `(shape, dtype)`.
    """
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in inputs]
    program = Program()
    _walk(jax.make_jaxpr(function)(structs).jaxpr, program, owner=None, times=1)
    return program


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
        is_loop = name == "while"
        inner = [part for value in equation.params.values() for part in _jaxprs(value)]
        for part in inner:
            before = len(program.products)
            _walk(part, program, inside, times * equation.params.get("length", 1) if name == "scan" else times)
            program.uncounted += is_loop and len(program.products) > before


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
