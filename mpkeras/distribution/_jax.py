"""The program of a step on JAX, in which gradients are summed, and travel between devices, in the dtypes of the policy.

JAX sums the gradient of a weight that is used in many places, a bias or a row of an `Embedding`, in the dtype in which
it is used: from 256 equal addends on a sum in bfloat16 stands still. And the compiler puts the collectives in, in the
dtype of what it finds: a gradient that is computed in bfloat16 is summed over devices in bfloat16, and rounded once for
each. `with_dtypes` therefore traces a step, and makes these changes:

- a sum that makes the gradient of a weight is taken in float32, on one device, too;
- where devices share a batch, a product or a sum that makes the gradient of a weight returns `reduce_dtype`, not the
  dtype of its operands;
- a weight that is split over these devices is gathered in `gather_dtype`, as a whole.

References:
    GSPMD, which partitions the program: Xu et al., 2021, https://arxiv.org/abs/2105.04663. How a jaxpr is interpreted:
    https://docs.jax.dev/en/latest/notebooks/Writing_custom_interpreters_in_Jax.html.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from mpkeras import _keras
from mpkeras.distribution.sharded import Sharded
from mpkeras.distribution.travel import GATHERED, REDUCED, Travel
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES

# Whether an optimizer sums gradients over replicas, and so has a dtype for it.
OPTIMIZERS_REDUCE = False
_NARROW = (jnp.dtype("float16"), jnp.dtype("bfloat16"))
# The name of the function, which does nothing, around a gradient that an optimizer is given.
_GRADIENT = "mpkeras_gradient_of:"
# Operations that add nothing up: a sum behind one of them may be taken in the wider dtype as well.
_ELEMENTWISE = {"add", "add_any", "copy", "div", "mul", "neg", "reshard", "select_n", "sharding_constraint", "sub"}
_SHAPES = {"broadcast_in_dim", "concatenate", "expand_dims", "pad", "reshape", "rev", "slice", "squeeze", "transpose"}
_PRODUCTS = {"conv_general_dilated", "dot_general"}
_SUMS = {"cumsum", "reduce_sum", "scatter-add"}
# Operations by which layers read a weight and optimizers do not: those compute with each element by itself.
_READS = _PRODUCTS | _SHAPES | {"gather"}
# Operations with a program inside: in each of them a gradient may be made.
_WITH_PROGRAM = {"checkpoint", "cond", "jit", "remat2", "scan"}


@dataclasses.dataclass(frozen=True)
class _Weight:
    """A weight in the program: its path, where its parts lie, and where the whole lies while a layer reads it."""

    path: str
    shape: tuple
    laid_out: jax.sharding.Sharding
    gathered: jax.sharding.Sharding

    @property
    def is_split(self) -> bool:
        return self.laid_out != self.gathered


def check_travel(model, policy):
    """Raises `ValueError` for dtypes of a `Policy` in which nothing travels here."""
    if policy.reduce_dtype in (None, "float32", policy.compute_dtype):
        return
    raise ValueError(
        "Expected `reduce_dtype` to be 'float32' or the dtype of the arithmetic on JAX, where the compiler sums a "
        f"gradient as it is computed. Received: reduce_dtype={policy.reduce_dtype!r} and "
        f"compute_dtype={policy.compute_dtype!r}. Leave it out for float32."
    )


def check_program(travel: Travel, is_compiled: bool):
    """Raises `ValueError` where a user asks for dtypes and no program of the step is made that could have them."""
    if is_compiled or not travel.is_asked_for or _sharing() is None:
        return
    raise ValueError(
        "Expected a compiled step for `gather_dtype` and `reduce_dtype`: one that runs op by op has no program to say "
        "them in. Received: a step under `run_eagerly` or without `jit_compile`. Compile the step, or leave them out "
        "of the policy."
    )


def devices_that_share_a_batch(model) -> int:
    """Returns how many devices train on parts of one batch; 1 for one alone."""
    distribution = _sharing()
    return 1 if distribution is None else math.prod(distribution.device_mesh.shape)


def marked(grads, variables) -> list:
    """Returns gradients that `with_dtypes` finds in the program of a step; the same where none is traced."""
    pairs = zip(grads, variables, strict=True)
    return [_marked(grad, variable) if isinstance(grad, jax.core.Tracer) else grad for grad, variable in pairs]


def _marked(grad, variable):
    def gradient(grad):
        return grad

    gradient.__name__ = _GRADIENT + variable.path
    # In float32, in which the gradient is unscaled in any case.
    return jax.jit(gradient)(grad.astype(jnp.float32) if grad.dtype in _NARROW else grad)


def layout_of_number():
    """Returns the `TensorLayout` of a number that each device holds whole; `None` without a distribution."""
    distribution = keras.distribution.distribution()
    return None if distribution is None else keras.distribution.TensorLayout([], distribution.device_mesh)


def split_slots(slots, weights):
    """Splits the state that an optimizer keeps beside weights, where the distribution in force splits state alone."""
    distribution = keras.distribution.distribution()
    if not isinstance(distribution, Sharded) or distribution.shard != "state":
        return
    beside_weights = _keras.weights_of_slots(slots, weights)
    for slot in slots:
        if id(slot) in beside_weights:
            _keras.give_layout(slot, distribution.split(slot.shape))


def _sharing():
    """Returns the distribution in force where several devices share a batch, or `None`."""
    distribution = keras.distribution.distribution()
    return None if distribution is None or distribution.batch_dim_name is None else distribution


def with_dtypes(run, travel: Travel, model):
    """Returns `run`, with sums and collectives in the dtypes of `travel`.

    Args:
        run: A step `run(state, data)`, in which an optimizer is given what `marked` returns. The first part of the
            state has the values of the weights that are trained.
        travel: The dtypes.
        model: The model that `run` trains.
    """
    distribution = _sharing()
    layers = _keras.flatten_layers(model, include_self=True)
    if distribution is None and not any(layer.compute_dtype in SIXTEEN_BIT_DTYPES for layer in layers):
        return run
    weights = [] if distribution is None else [_weight(each, distribution) for each in model.trainable_variables]

    def run_with_dtypes(state, data):
        values, structure = jax.tree.flatten((state, data))
        if not any(isinstance(value, jax.core.Tracer) for value in values):
            return run(state, data)
        program, results = jax.make_jaxpr(
            lambda *values: run(*jax.tree.unflatten(structure, values)), return_shape=True
        )(*values)
        # The weights come first.
        inputs = [_Value(value) for value in values]
        outputs = _Rewriting(travel, distribution, weights).run(program, inputs, dict(enumerate(weights)), {})
        return jax.tree.unflatten(jax.tree.structure(results), [output.as_made() for output in outputs])

    return run_with_dtypes


def _weight(variable, distribution) -> _Weight:
    layout = distribution.get_variable_layout(variable)
    sharding = getattr(layout, "backend_layout", layout)
    # A `Format` of JAX says the order in memory, too.
    sharding = getattr(sharding, "sharding", sharding)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        raise ValueError(
            "Expected layouts that name the axes of a mesh, by which it is known what is gathered and summed. "
            f"Received: {sharding!r} for '{variable.path}'. Return a `keras.distribution.TensorLayout` or a "
            "`jax.sharding.NamedSharding` from `get_variable_layout`."
        )
    batch = distribution.batch_dim_name
    axes = [names if isinstance(names, tuple) else (names,) for names in sharding.spec]
    axes_kept = [None if batch in names else names[0] if len(names) == 1 else names for names in axes]
    gathered = jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*axes_kept))
    return _Weight(variable.path, tuple(variable.shape), sharding, gathered)


class _Value:
    """A value of the program: as the traced step makes it, in the wider dtype in its place, or both."""

    def __init__(self, value=None, *, wide=None, dtype=None):
        self._value, self._wide, self._dtype = value, wide, dtype
        self._gathered: dict = {}

    def as_made(self):
        """Returns the value in the dtype that the traced step has for it."""
        if self._value is None:
            self._value = self._wide.astype(self._dtype)
        return self._value

    def wide(self, dtype):
        """Returns the value in `dtype` where it has fewer bits, else as it is."""
        if self._wide is not None:
            return self._wide
        is_widened = jnp.result_type(self._value) in _NARROW and dtype not in _NARROW
        return self._value.astype(dtype) if is_widened else self._value

    def gathered(self, dtype, gather):
        """Returns what `gather(value)` returns for this value and `dtype`: the same for all that read it."""
        if dtype not in self._gathered:
            self._gathered[dtype] = gather(self.as_made())
        return self._gathered[dtype]


class _Rewriting:
    """The interpreter of a step."""

    def __init__(self, travel: Travel, distribution, weights: list):
        self._split = {weight.path: weight for weight in weights if weight.is_split}
        self._gather_dtype = None if travel.gather_dtype is None else jnp.dtype(travel.gather_dtype)
        # On one device nothing travels, and so nothing is gained by sums in 16 bits.
        self._reduce_dtype = jnp.dtype("float32" if distribution is None else travel.reduce_dtype)
        self._distribution = distribution

    def run(self, program: ClosedJaxpr, inputs: list, weights: dict, gradients: dict) -> list:
        """Returns the outputs of a program, each a `_Value`.

        Args:
            program: The program.
            inputs: Its inputs, each a `_Value`.
            weights: `{number of an input: _Weight}`.
            gradients: `{number of an output: path}` of the outputs that belong to the gradient of a weight.
        """
        jaxpr = program.jaxpr
        known = dict(zip(jaxpr.constvars, map(_Value, program.consts), strict=True))
        known |= dict(zip(jaxpr.invars, inputs, strict=True))
        weights = {jaxpr.invars[i]: weight for i, weight in weights.items() if weight.is_split}
        ends = {jaxpr.outvars[i]: path for i, path in gradients.items() if not isinstance(jaxpr.outvars[i], Literal)}
        paths = _paths(jaxpr, ends)

        def read(variable):
            if isinstance(variable, Literal):
                # Of NumPy: a number that is written into the program again, not a constant beside it.
                return _Value(np.asarray(variable.val, variable.aval.dtype))
            return known[variable]

        for equation in jaxpr.eqns:
            values = [read(variable) for variable in equation.invars]
            of_inputs = {i: weights[v] for i, v in enumerate(equation.invars) if _is_in(v, weights)}
            of_outputs = {i: paths[v] for i, v in enumerate(equation.outvars) if v in paths}
            # Operations keep the names of the layers that they are in.
            if of_inputs or of_outputs or _gradient_of(equation):
                with jax.named_scope(str(equation.source_info.name_stack)):
                    results = self._results(equation, jaxpr, values, of_inputs, of_outputs)
            else:
                results = _as_traced(equation, jaxpr, values)
            known.update(zip(equation.outvars, results, strict=True))
        return [read(variable) for variable in jaxpr.outvars]

    def _results(self, equation, jaxpr, values, weights, gradients) -> list:
        name = equation.primitive.name
        if _gradient_of(equation):
            return values
        if name in _READS or name == "scan":
            # Of a loop before it: inside, the weight would be gathered in each round.
            values = [self._gathered(value, weights[i]) if i in weights else value for i, value in enumerate(values)]
            weights = {}
        if name in _WITH_PROGRAM and (weights or gradients):
            if name == "jit":
                return self.run(equation.params["jaxpr"], values, weights, gradients)
            return self._with_program_inside(equation, values, weights, gradients)
        if name == "convert_element_type":
            if weights:
                return [self._gathered(values[0], weights[0], equation.params["new_dtype"])]
            # A mask or a counter may become a factor of a gradient, and is none itself.
            if gradients and _is_float(equation.invars[0]) and _is_float(equation.outvars[0]):
                return [self._converted(equation, values[0].wide(self._reduce_dtype))]
        if gradients and name in _PRODUCTS | _SUMS | _ELEMENTWISE | _SHAPES:
            return [self._gradient(equation, values, gradients[0])]
        if gradients:
            # Summed as it was traced, such as in a loop that a layer's own gradient runs; known by the weight's name.
            with jax.named_scope(REDUCED.format(next(iter(gradients.values())))):
                return _as_traced(equation, jaxpr, values)
        return _as_traced(equation, jaxpr, values)

    def _converted(self, equation, wide):
        dtype = equation.params["new_dtype"]
        # Where gradients are summed in 16 bits, nothing stays in a wider dtype than it was traced in.
        stays_wide = dtype in _NARROW and self._reduce_dtype not in _NARROW
        return _Value(wide=wide, dtype=dtype) if stays_wide else _Value(wide.astype(dtype))

    def _gradient(self, equation, values, path) -> _Value:
        """Returns what an equation adds to a gradient, in the wider dtype."""
        dtype, parameters = self._reduce_dtype, dict(equation.params)
        is_product, output = equation.primitive.name in _PRODUCTS, equation.outvars[0].aval
        if is_product and self._distribution is None:
            # It sums in float32 by itself, and rounds the sum, as every product in 16 bits.
            return _Value(equation.primitive.bind(*[value.as_made() for value in values], **parameters))
        widens = output.dtype in _NARROW and dtype not in _NARROW
        if equation.primitive.name == "conv_general_dilated" and widens:
            with jax.named_scope(REDUCED.format(path)):
                return self._convolution(equation, *values)
        if is_product and widens:
            parameters["preferred_element_type"] = dtype
        operands = [value.as_made() if is_product else value.wide(dtype) for value in values]
        with jax.named_scope(REDUCED.format(path)):
            if equation.primitive.name == "scatter-add":
                # Among its parameters is the addition, traced for the dtype.
                for name in ("update_consts", "update_jaxpr"):
                    del parameters[name]
                result = jax.lax.scatter_add(*operands, **parameters)
            else:
                result = equation.primitive.bind(*operands, **parameters)
        return _Value(wide=result, dtype=output.dtype) if widens else _Value(result)

    def _convolution(self, equation, images, gradients) -> _Value:
        """Returns the gradient of a convolution's kernel: what each device computes of its rows, and then the sum.

        Convolutions return the dtype of their operands: with another one XLA casts the operands up for GPUs, and
        multiplies in float32 (JAX 0.10.2).
        """
        (_, rows, *_), (_, rows_of_gradients, *_), _ = equation.params["dimension_numbers"]
        batch, mesh = self._distribution.batch_dim_name, self._distribution.device_mesh.backend_mesh
        if equation.invars[0].aval.shape[rows] % mesh.shape[batch]:
            # Of something that is no batch, and so is whole on each device.
            return _Value(equation.primitive.bind(images.as_made(), gradients.as_made(), **equation.params))

        def of_own_rows(images, gradients):
            part = equation.primitive.bind(images, gradients, **equation.params)
            return jax.lax.psum(part.astype(self._reduce_dtype), batch)

        specs = [
            jax.sharding.PartitionSpec(*[batch if axis == split else None for axis in range(value.aval.ndim)])
            for value, split in zip(equation.invars, (rows, rows_of_gradients), strict=True)
        ]
        summed = jax.shard_map(
            of_own_rows,
            mesh=mesh,
            in_specs=tuple(specs),
            out_specs=jax.sharding.PartitionSpec(),
            axis_names={batch},
        )
        return _Value(wide=summed(images.as_made(), gradients.as_made()), dtype=equation.outvars[0].aval.dtype)

    def _gathered(self, value: _Value, weight: _Weight, dtype=None) -> _Value:
        """Returns a weight that is split, as a layer reads it: whole, in `dtype` or as it is stored."""
        read_in = jnp.dtype(value.as_made().dtype if dtype is None else dtype)
        # A float32 layer reads numbers that are not rounded.
        travels_in = read_in if self._gather_dtype is None or read_in not in _NARROW else self._gather_dtype

        def gather(stored):
            with jax.named_scope(GATHERED.format(weight.path)):
                # The parts first: of a cast whose result has to be whole, the compiler gathers the operand.
                parts = jax.lax.with_sharding_constraint(stored.astype(travels_in), weight.laid_out)
                whole = jax.lax.with_sharding_constraint(parts, weight.gathered)
                if travels_in != read_in:
                    # Or the compiler casts first, where that gives it fewer bytes to send.
                    whole = jax.lax.optimization_barrier(whole)
                return _Value(whole.astype(read_in))

        return value.gathered(read_in, gather)

    def _with_program_inside(self, equation, values, weights, gradients) -> list:
        """Returns what a loop, a branch or a checkpoint makes, with the same changes in the program inside it."""
        parameters = dict(equation.params)
        if equation.primitive.name == "cond":
            # The first input says which of the programs runs.
            weights = {i - 1: weight for i, weight in weights.items()}
            branches = parameters["branches"]
            parameters["branches"] = tuple(self._rewritten(inside, weights, gradients) for inside in branches)
        else:
            parameters["jaxpr"] = self._rewritten(parameters["jaxpr"], weights, gradients)
        results = equation.primitive.bind(*[value.as_made() for value in values], **parameters)
        if equation.primitive.name == "scan":
            results = self._summed_behind(results, gradients, _carried(equation))
        return list(map(_Value, results))

    def _summed_behind(self, results: list, gradients, carried: int) -> list:
        """Returns the results of a loop, with gradients that went from round to round whole on each device.

        The compiler then sums them over devices once, behind the loop, and not each part where it lies in every round.

        Args:
            results: Arrays; what went from round to round comes first.
            gradients: `{number of a result: path}`.
            carried: How many results went from round to round.
        """
        results = list(results)
        for i, path in gradients.items():
            weight = self._split.get(path)
            if i < carried and weight is not None and results[i].shape == weight.shape:
                results[i] = jax.lax.with_sharding_constraint(results[i], weight.gathered)
        return results

    def _rewritten(self, inside, weights, gradients):
        """Returns the program inside an operation, of the same class, with the same changes.

        Args:
            inside, weights, gradients: As of `run`.
        """
        closed = inside if isinstance(inside, ClosedJaxpr) else ClosedJaxpr(inside, ())

        def run(*inputs):
            outputs = self.run(closed, list(map(_Value, inputs)), weights, gradients)
            return [output.as_made() for output in outputs]

        shapes = [
            jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False))
            for v in closed.jaxpr.invars
        ]
        rewritten = jax.make_jaxpr(run)(*shapes)
        return rewritten if isinstance(inside, ClosedJaxpr) else rewritten.jaxpr


def _carried(loop) -> int:
    """Returns how many results of a `scan` went from round to round; they come before those of each round."""
    # By their shapes: each version of JAX has its own parameters for it. Results of rounds have an axis of rounds more.
    inside = loop.params["jaxpr"]
    pairs = zip(loop.outvars, getattr(inside, "jaxpr", inside).outvars, strict=True)
    return sum(outer.aval.ndim == inner.aval.ndim for outer, inner in pairs)


def _as_traced(equation, jaxpr, values) -> list:
    """Returns what an equation of `jaxpr` makes of `values`, as it was traced."""
    # A program of this equation alone, which JAX runs: how an operation is bound differs from version to version.
    inputs = {v: value for v, value in zip(equation.invars, values, strict=True) if not isinstance(v, Literal)}
    alone = jaxpr.replace(constvars=[], invars=list(inputs), outvars=equation.outvars, eqns=[equation])
    results = jaxpr_as_fun(ClosedJaxpr(alone, ()))(*[value.as_made() for value in inputs.values()])
    return list(map(_Value, results))


def _paths(jaxpr, ends: dict) -> dict:
    """Returns `{variable: path}` of what becomes the gradient of a weight, back to the sums over a batch.

    Args:
        jaxpr: A program.
        ends: The same of its outputs.
    """
    paths = dict(ends)
    for equation in reversed(jaxpr.eqns):
        name = equation.primitive.name
        path = _gradient_of(equation) or next((paths[v] for v in equation.outvars if v in paths), None)
        if path is None:
            continue
        if name == "jit" and not _gradient_of(equation):
            inside = equation.params["jaxpr"].jaxpr
            outputs = zip(inside.outvars, equation.outvars, strict=True)
            ends_inside = {v: paths[outer] for v, outer in outputs if outer in paths and not isinstance(v, Literal)}
            paths_inside = _paths(inside, ends_inside)
            inputs = [outer for v, outer in zip(inside.invars, equation.invars, strict=True) if v in paths_inside]
        elif name == "scatter-add":
            inputs = equation.invars[:1]
        elif _gradient_of(equation) or name in _ELEMENTWISE | _SHAPES | {"convert_element_type"}:
            inputs = equation.invars
        elif name in _PRODUCTS | _SUMS | _WITH_PROGRAM and not (name == "reduce_sum" and _has_size_of_output(equation)):
            # It is made here. A bias has axes of size 1 while it is added, over which its gradient is summed once more.
            inputs = []
        else:
            # Such as the bounds of a gradient that is clipped: what comes before may be summed in the wider dtype.
            size = next(v.aval.size for v in equation.outvars if v in paths)
            inputs = [v for v in equation.invars if getattr(v.aval, "size", None) == size]
        paths |= {v: path for v in inputs if not isinstance(v, Literal) and _is_float(v)}
    return paths


def _gradient_of(equation) -> str:
    """Returns the path of the weight whose gradient goes into the optimizer in this equation, or `""`."""
    name = equation.params.get("name", "") if equation.primitive.name == "jit" else ""
    return name.removeprefix(_GRADIENT) if name.startswith(_GRADIENT) else ""


def _has_size_of_output(equation) -> bool:
    return equation.invars[0].aval.size == equation.outvars[0].aval.size


def _is_in(variable, known: dict) -> bool:
    return not isinstance(variable, Literal) and variable in known


def _is_float(variable) -> bool:
    return jnp.issubdtype(variable.aval.dtype, jnp.floating)
