"""JAX's part of `LossScaleOptimizer`: one branch-free step that selects at each assignment."""

import contextlib
import weakref

import jax
import jax.numpy as jnp
import keras
from jax.experimental import sparse as jax_sparse

from mpkeras import _keras
from mpkeras.distribution._jax import marked
from mpkeras.scaling.facts import STATELESS_SCOPE
from mpkeras.scaling.small_state import UpdateScope

# The most elements of an array that is stacked with others of its shape: biases and statistics, no kernels.
_STACKED = 2**12


def check_all_reduce_dtype(dtype):
    """Raises `ValueError` for any dtype: the compiler puts the reductions in, no optimizer does."""
    if dtype is not None:
        raise ValueError(
            "Expected no `all_reduce_dtype` on JAX, where the program of a step says in which dtype gradients are "
            f"summed. Received: all_reduce_dtype={dtype!r}. Train under `mpkeras.Policy(..., reduce_dtype={dtype!r})`."
        )


def build_scope():
    """The scope in which an optimizer makes its variables: any."""
    return contextlib.nullcontext()


def unshare(variables):
    """Gives each variable an array of its own: one that two hold cannot be donated to the next step.

    Where Keras' `Variable.assign` is given another variable, or an array, it holds that very one.
    """
    seen = set()
    for variable in variables:
        value = _keras.stored_value(variable)
        if id(value) in seen and value is not None:
            _keras.put(variable, jnp.copy(value))
        seen.add(id(value))


def traces() -> list:
    """Returns the innermost trace that this code is compiled in; `[]` in eager code, that of a gradient included."""
    program = _present_program()
    return [] if program is None else [weakref.ref(program)]


def scale_loss(optimizer, loss, facts):
    if optimizer.dynamic and traces() and not _are_values_of_scope(optimizer.scale_state.values()):
        received = "a call outside" if _keras.stateless_scope() is None else "a call in a scope that does not map them"
        raise ValueError(
            "Expected `scale_loss` in a compiled function to be called in a `keras.StatelessScope` that maps "
            f"`optimizer.variables` to this step's values. Received: {received}, which bakes the present "
            "scale into the program as a constant; after the scale moves, every gradient is wrong. Call it in "
            f"{STATELESS_SCOPE}, or use `mpkeras.make_train_step`."
        )
    # What does not depend on a differentiated value belongs to the program around the derivative: after `stop_gradient`
    # the flag is of the train step itself, in a function that `jax.value_and_grad` takes, too.
    flag = jnp.isfinite(jnp.sum(jax.lax.stop_gradient(loss)))
    # A flag for each program: a loop that scales op by op, and applies in compiled code, never takes them.
    flags_of_program = [f for f in facts.loss_flags if _program_of(f) is _program_of(flag)]
    facts.loss_flags = [f for f in facts.loss_flags if _program_of(f) is not _program_of(flag)]
    facts.loss_flags.append(jnp.all(jnp.stack([*flags_of_program, flag])))
    return loss * optimizer.loss_scale


def _are_values_of_scope(variables) -> bool:
    """Whether code that reads `variables` now takes what the `keras.StatelessScope` around it has for each of them."""
    scope = _keras.stateless_scope()
    # A scope hides the one around it.
    return all(scope is not None and scope.get_current_value(variable) is not None for variable in variables)


def _known_loss_flag(facts):
    """Returns whether the losses scaled since the last step are finite, or `None` where this is not known.

    A flag of another program (a `jax.jit`, `jax.checkpoint` or `jax.lax.scan` inside the step, another trace) is
    out of reach, and an error to use. A flag that is no tracer was computed before the program that is traced
    now: as a constant it would decide every later step.
    """
    now = _present_program()
    flags = [flag for flag in facts.loss_flags if _program_of(flag) is now]
    return jnp.all(jnp.stack(flags)) if flags else None


def _program_of(value):
    """Returns the trace that `value` is a value of; `None` where it was computed op by op.

    `Tracer._trace` is private, read in JAX 0.10.2. The public `jax.extend.core.get_opaque_trace_state` tells
    which trace is current, not which one a value belongs to.
    """
    return value._trace if isinstance(value, jax.core.Tracer) else None


def _present_program():
    """Returns the trace of the code that runs now; `None` in eager code, that of a gradient included."""
    return _program_of(jnp.zeros(()) + 1)


def of_all_replicas(grads, variables) -> list:
    """Returns the gradients of the whole batch: here each gradient is one."""
    return grads


def scale_gradient(grad, factor):
    if isinstance(grad, jax_sparse.JAXSparse):
        return jax.tree_util.tree_map(
            lambda leaf: _widened(leaf) * factor if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf, grad
        )
    return _widened(grad) * factor


def _widened(values):
    return values.astype(jnp.float32) if values.dtype in (jnp.float16, jnp.bfloat16) else values


def sums(values):
    """Yields `(indices, sums)`: the float32 sums of some of `values`, of shape `(len(indices),)`, until all are summed.

    Small ones of one shape and dtype are summed together. For each sum a GPU starts a kernel: ResNet-50 has 106
    statistics and as many small gradients, in six shapes.

    Args:
        values: Arrays.
    """
    groups: dict = {}
    for index, value in enumerate(values):
        is_small = value.size <= _STACKED
        groups.setdefault((value.shape, value.dtype) if is_small else index, []).append(index)
    for indices in groups.values():
        array, axes = values[indices[0]], None
        is_small, is_bias = array.size <= _STACKED, array.ndim < 2
        # A large one stays as it is: outside of compiled code a stack is a copy.
        if is_small:
            array, axes = jnp.stack([values[index] for index in indices]), tuple(range(1, array.ndim + 1))
        if is_small or is_bias:
            # Of a bias the gradient is a sum. Without the barrier XLA adds up once more what that is of, gradients of
            # activations: 1.6 GB of the 141 that a step of GPT-2-small moves (16 x 1024 tokens, JAX 0.10.2, H100).
            array = jax.lax.optimization_barrier(array)
        yield indices, jnp.atleast_1d(jnp.sum(array, axis=axes, dtype=jnp.float32))


def computed_once(total):
    """Returns the square root of `total`, a sum of many numbers that many parts of a step need: 0, inf and NaN stay.

    XLA fuses what is cheap into all that need it, and a root counts as expensive. Without it every assignment would
    add up the sums of all gradients again: with 300 of them a step took 1.4 times as long to run and ten times as long
    to compile. Every statistic would ask all others: MobileNetV2 has 104, and its step compiled in twice the time (JAX
    0.10.2 on a CPU).

    Args:
        total: A number of shape `()`, not negative.
    """
    return jnp.sqrt(total)


def grads_are_finite(grads):
    """Returns whether all gradients are finite: a bool scalar of shape `()`.

    A float32 sum of all gradients, tested once: inf and NaN survive every addition, and no boolean tensor of
    the size of the gradients is written.
    """
    values = []
    for grad in grads:
        if grad is not None:
            numbers = grad.data if isinstance(grad, jax_sparse.JAXSparse) else jnp.asarray(grad)
            is_complex = jnp.issubdtype(numbers.dtype, jnp.complexfloating)
            values.append(numbers.real + numbers.imag if is_complex else numbers)
    total = jnp.zeros((), jnp.float32)
    for _, of_some in sums(values):
        total += jnp.sum(of_some)
    return jnp.isfinite(computed_once(jnp.abs(total)))


def apply(optimizer, grads, variables, facts):
    touched = variables + optimizer.variables
    mapping = [(variable, variable.value) for variable in touched]
    new_value = new_values(optimizer, mapping, grads, variables, facts)
    for variable, value in [(variable, new_value(variable)) for variable in touched]:
        variable.assign(value)


def new_values(optimizer, mapping, grads, variables, facts):
    """Returns a function from variable to its value after the step."""
    grads = marked(grads, variables)
    with keras.StatelessScope(state_mapping=mapping):
        decision, own_values = optimizer.decide(facts, grads_are_finite(grads), _known_loss_flag(facts))
    if optimizer.window is not None:
        return _new_values_of_window(optimizer, mapping, grads, variables, facts, decision, own_values)
    rounding = optimizer.rounding()
    with UpdateScope(rounding, decision.is_due, mapping) as scope, rounding.variables_as_float32():
        if rounding.small:
            # The sums of the check read them in 16 bits. Without the barrier they share one cast with the update, for
            # which XLA writes all gradients out in float32 (JAX 0.10.2 on a CPU: 120 MB at 30 M parameters).
            grads = jax.lax.optimization_barrier(list(grads))
        if not facts.grads_are_unscaled:
            grads = optimizer.unscale(grads, variables)
        # Most optimizers of Keras raise for a sparse gradient in compiled code, and all for one that is clipped. They
        # make arrays of the full shape of it in any case.
        grads = [_dense(grad) for grad in grads]
        if rounding.small:
            grads = [grad if grad is None else _widened(grad) for grad in grads]
        with _keras.one_update(optimizer.inner_optimizer):
            optimizer.inner_optimizer.apply(grads, variables)
    # Unscaled with the scale that was used; only now does the scale move.
    for variable, value in own_values:
        scope.write(variable, jnp.asarray(value, variable.dtype))
    return scope.read


def _new_values_of_window(optimizer, mapping, grads, variables, facts, decision, own_values):
    """As `new_values`, where the update is due at the end of a window only."""
    window = optimizer.window
    values = {id(variable): jnp.asarray(value) for variable, value in mapping}
    with keras.StatelessScope(state_mapping=mapping):
        if not facts.grads_are_unscaled:
            grads = optimizer.unscale(grads, variables)
        dense = [None if grad is None else _dense(grad) for grad in grads]
        next_sums = window.next_sums(lambda total: values[id(total)], dense, variables, decision)
    values |= {id(total): value for total, value in next_sums}
    sums = [values[id(total)] for total in window.sums_of(variables)]
    of_window = {id(variable) for variable in window.variables}
    touched = [variable for variable, _ in mapping if id(variable) not in of_window]

    def update(carry):
        rounding = optimizer.rounding()
        scope = UpdateScope(rounding, state_mapping=list(zip(touched, carry[1], strict=True)))
        with scope, rounding.variables_as_float32(), _keras.one_update(optimizer.inner_optimizer):
            optimizer.inner_optimizer.apply(window.means(sums, grads, variables, decision), variables)
        return jnp.zeros((), bool), [scope.read(variable) for variable in touched]

    # A loop that goes round once or not at all: most calls pay for the sums alone, and as a branch XLA would copy the
    # buffers that only one of its sides writes.
    carry = decision.is_due, [values[id(variable)] for variable in touched]
    _, updated = jax.lax.while_loop(lambda carry: carry[0], update, carry)
    values |= {id(variable): value for variable, value in zip(touched, updated, strict=True)}
    # Unscaled with the scale that was used; only now does the scale move.
    values |= {id(variable): jnp.asarray(value, variable.dtype) for variable, value in own_values}
    return lambda variable: values.get(id(variable))


def _dense(grad):
    return grad.todense() if isinstance(grad, jax_sparse.JAXSparse) else grad
