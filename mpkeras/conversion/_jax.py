"""JAX's part of a conversion: attention that keeps 16-bit probabilities, float8, remat, and what a call makes."""

import contextlib
import functools

import jax
import jax.extend.core
import jax.numpy as jnp
import keras
from jax.ad_checkpoint import checkpoint_name

from mpkeras import _keras
from mpkeras.conversion.float8_rounding import GRADIENT_DTYPE, OPERAND_DTYPE, once, rounded
from mpkeras.devices._jax import has_float8_units
from mpkeras.policies.heads import Flow

# Products of 16-bit numbers with sums in float32, in the backward pass, too: what JAX' own attention asks for.
_PRECISION = {"bfloat16": jax.lax.DotAlgorithmPreset.BF16_BF16_F32, "float16": jax.lax.DotAlgorithmPreset.F16_F16_F32}


def has_cudnn() -> bool:
    """As in `_torch.py`. That of `jax.experimental.rnn` takes float32 alone, and Keras 3.15 hands it 16 bits."""
    return False


def keeping_arguments(function):
    """Returns `function`, elementwise, for a step of a loop: the backward pass keeps its arguments, and nothing else.

    Otherwise it keeps each gate in float32, for all steps.
    """
    return jax.checkpoint(function, prevent_cse=False)


def takes_kernel(layer, query, key, value, *, is_masked: bool) -> bool:
    """Whether Keras looks for a kernel that keeps no probabilities, or refuses an attention for the lack of one."""
    platform = jax.devices()[0].platform
    return _keras.takes_flash_attention(layer, query, key, value, platform, is_masked=is_masked)


def dot_product_attention(query, key, value, scale: float, mask=None, is_causal: bool = False):
    """Returns what `jax.nn.dot_product_attention` does, by the same operations, and keeps less for its derivative.

    Args:
        query: A 16-bit tensor of shape `(batch, queries, heads, depth)`.
        key, value: Of its dtype, of shape `(batch, keys, heads, depth)`.
        scale: The factor of the scores.
        mask: bools, of a shape that broadcasts to `(batch, heads, queries, keys)`: what is looked at.
        is_causal: Whether a query looks at no later key.

    Returns:
        A tensor of the shape and dtype of `query`.
    """
    product = functools.partial(jnp.einsum, "BTNH,BSNH->BNTS", query, key, preferred_element_type="float32")
    try:
        scores = product(precision=_PRECISION[keras.backend.standardize_dtype(query.dtype)])
    except jax.errors.JaxRuntimeError:
        # As in JAX' own: for one query and one key, at once in eager code, a CPU has no such product.
        scores = product()
    scores *= jnp.float32(scale)
    if is_causal:
        causal = jnp.tril(jnp.ones(scores.shape[2:], bool))
        mask = causal if mask is None else jnp.logical_and(mask, causal)
    if mask is not None:
        # JAX' own number: where nothing is left to look at, all keys count the same.
        scores = jnp.where(mask, scores, -0.7 * jnp.finfo("float32").max)

    def softmax(scores, mask):
        del mask
        return jax.nn.softmax(scores, axis=-1).astype(query.dtype)

    return jnp.einsum("BNTS,BSNH->BTNH", softmax_from_probabilities(softmax, -1, scores), value)


def softmax_from_probabilities(softmax, axis, scores, mask=None):
    """Returns `softmax(scores, mask)` with a derivative that is computed in float32 from the result.

    Args:
        softmax: A function of scores and mask with a 16-bit result.
        axis: The axis or axes over which the result sums to 1.
        mask: Arguments of `softmax` beside the scores: a value that it took from around it would leave the
            checkpoint in which it was made.
    """

    @jax.custom_jvp
    def probabilities(scores, mask):
        # Without the barrier XLA sees that the result is made from a float32 one, and keeps that for the derivative.
        return jax.lax.optimization_barrier(softmax(scores, mask))

    @probabilities.defjvp
    def derivative(primals, tangents):
        result = probabilities(*primals)
        y, t = result.astype("float32"), tangents[0].astype("float32")
        tangent = y * (t - jnp.sum(y * t, axis=axis, keepdims=True))
        return result, tangent.astype(result.dtype)

    return probabilities(scores, mask)


@jax.custom_vjp
def product_with_float32_sums(inputs, kernel):
    """Returns the product of two 16-bit matrices, summed and returned in float32.

    Its derivative multiplies the gradient in 16 bits, as that of a product which returns 16 bits.

    Args:
        inputs, kernel: 16-bit, shapes `(rows, summed)` and `(summed, columns)`.
    """
    return jnp.matmul(inputs, kernel, preferred_element_type=jnp.float32)


def _multiply_with_float32_sums(inputs, kernel):
    return product_with_float32_sums(inputs, kernel), (inputs, kernel)


def _differentiate_sums(operands, gradient):
    inputs, kernel = operands
    gradient = gradient.astype(inputs.dtype)
    return jnp.matmul(gradient, kernel.T), jnp.matmul(inputs.T, gradient)


product_with_float32_sums.defvjp(_multiply_with_float32_sums, _differentiate_sums)


# Float8 operands and sums in float32. Without an algorithm XLA prefers a fusion of its own, which may multiply the
# operands as float16 (seen in the PTX of JAX 0.10.2 for an H100); with it it calls cuBLASLt.
_ALGORITHM = jax.lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32


def float8_product(inputs, kernel, training):
    """Returns the product of two bfloat16 matrices, computed from float8 operands, in bfloat16.

    Args:
        inputs, kernel: bfloat16, shapes `(rows, summed)` and `(summed, columns)`.
        training: Whether a tensor is scaled as a whole. Outside training each row of the inputs is scaled by itself, so
            that what it becomes does not depend on the rows that share its batch.
    """
    return _float8_product(not training, inputs, kernel)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _float8_product(by_row, inputs, kernel):
    return _round_and_multiply(by_row, inputs, kernel)[0]


def _round_and_multiply(by_row, inputs, kernel):
    inputs, of_inputs = rounded(inputs, OPERAND_DTYPE, by_row=by_row)
    kernel, of_kernel = rounded(kernel, OPERAND_DTYPE)
    outputs = _multiply_float8(inputs, kernel, (1, 0), of_inputs * of_kernel)
    return outputs, (inputs, of_inputs, kernel, of_kernel)


def _differentiate_product(by_row, residuals, gradient_as_given):
    inputs, of_inputs, kernel, of_kernel = residuals
    gradient, of_gradient = rounded(gradient_as_given, GRADIENT_DTYPE)
    by_inputs = _multiply_float8(gradient, kernel, (1, 1), of_gradient * of_kernel)
    if by_row:
        # The product sums over rows, each of which has a scale of its own: the gradient takes it along.
        gradient, of_gradient = rounded(gradient_as_given * of_inputs.astype(jnp.bfloat16), GRADIENT_DTYPE)
        of_inputs = 1.0
    return once(by_inputs), once(_multiply_float8(inputs, gradient, (0, 0), of_inputs * of_gradient))


_float8_product.defvjp(_round_and_multiply, _differentiate_product)


def _multiply_float8(left, right, summed, inverse):
    """Returns the product of two float8 matrices over the axes `summed` of each, times `inverse`, in bfloat16.

    `inverse` is a scalar, or has one number for each row of the product.
    """
    algorithm = _ALGORITHM
    # XLA calls cuBLASLt for no product of a vector and a matrix, and refuses the algorithm in its own.
    if left.shape[1 - summed[0]] == 1 or not has_float8_units():
        # float8 values are bfloat16 values: the same products, on any device.
        left, right, algorithm = left.astype(jnp.bfloat16), right.astype(jnp.bfloat16), None
    elif summed == (1, 0):
        # In this order, and in no other, the product loses its algorithm where XLA cuts it among devices.
        right, summed = right.T, (1, 1)
    axes = (((summed[0],), (summed[1],)), ((), ()))
    product = jax.lax.dot_general(left, right, axes, precision=algorithm, preferred_element_type=jnp.bfloat16)
    return product * inverse.astype(jnp.bfloat16)


# Whether products with weights can be kept while all else is computed again.
CAN_KEEP_PRODUCTS = True
# Whether a compiler orders what is computed again, and joins it to what needs it.
JOINS_OPERATIONS = True


def compute_again(run, tensors, layers, *, keeps_products: bool) -> list:
    """Returns `run(tensors)`, of which the backward pass keeps `tensors` alone and computes the rest again.

    State that `run` writes goes through: values that it assigns, losses and masks are results of the checkpoint.

    Args:
        run: Function of a list of tensors that returns one.
        layers: The layers that it runs.
        keeps_products: Whether products with weights are kept, too.
    """
    outer = _keras.stateless_scope()
    if outer is None:
        # Values of variables are taken as they are: nobody differentiates here.
        return run(tensors)
    known = dict(outer.state_mapping)
    written: list = []
    added: list = []

    def pure(tensors, masks):
        for tensor, mask in zip(tensors, masks, strict=True):
            _keras.set_mask(tensor, mask)
        scope = keras.StatelessScope(collect_losses=outer.collect_losses)
        scope.state_mapping.update(known)
        with scope:
            outputs = run(tensors)
        written[:] = [key for key, value in scope.state_mapping.items() if value is not known.get(key)]
        added[:] = scope.losses
        values = [scope.state_mapping[key] for key in written]
        return outputs, list(map(_keras.get_mask, outputs)), values, list(scope.losses)

    policy = _is_product_with_weights if keeps_products else None
    masks = list(map(_keras.get_mask, tensors))
    outputs, masks, values, losses = jax.checkpoint(pure, policy=policy)(tensors, masks)
    for tensor, mask in zip(outputs, masks, strict=True):
        _keras.set_mask(tensor, mask)
    outer.state_mapping.update(zip(written, values, strict=True))
    _keras.rename_losses(layers, added, losses)
    outer.losses.extend(losses)
    return outputs


def check_again(layers):
    """Raises `ValueError` where a part that runs `layers` is known, before it runs, to be none to compute again."""
    del layers  # JAX carries all that they make.


def _is_product_with_weights(primitive, *args, **params) -> bool:
    """The policy of a checkpoint: whether the result of an operation is kept. Products in attention have batch axes."""
    is_product = jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *args, **params)
    return bool(is_product) or primitive is jax.extend.core.primitives.conv_general_dilated_p


_MARK = "mpkeras_output_"


class FlowTrace:
    """Finds the `Flow` of a call that is traced, by names on what is marked."""

    def __init__(self):
        self._makers: list = []
        self._given_to: dict = {}
        self._marked: dict = {}

    def mark(self, tensor, made_by):
        """Returns `tensor` by another name: as one that a layer, or another part of the call, has made."""
        self._makers.append(made_by)
        return checkpoint_name(tensor, f"{_MARK}{len(self._makers) - 1}")

    def run(self, call, args, kwargs) -> Flow:
        """Returns the `Flow` of `call(*args, **kwargs)`."""

        def call_with(*tensors):
            following = iter(tensors)
            new_args, new_kwargs = keras.tree.map_structure(
                lambda value: next(following) if keras.ops.is_tensor(value) else value, (args, kwargs)
            )
            return _tensors(call(*new_args, **new_kwargs))

        jaxpr = jax.make_jaxpr(call_with)(*_tensors((args, kwargs))).jaxpr
        return Flow(self._follow(jaxpr, [(id(v), None) for v in jaxpr.invars]), self._given_to, self._marked)

    def _follow(self, jaxpr, inputs) -> list:
        """Notes the equations of `jaxpr`, for tensors of a `Flow`, and returns its outputs."""
        made = {id(variable): (id(variable), None) for variable in jaxpr.constvars}
        made |= {id(variable): tensor for variable, tensor in zip(jaxpr.invars, inputs, strict=True)}

        def tensors(atoms) -> list:
            # A literal has a value, and no equation.
            return [made.get(id(atom), (id(atom), None)) for atom in atoms]

        for equation in jaxpr.eqns:
            given, inner = tensors(equation.invars), _body(equation)
            if inner is not None:
                returned = self._follow(inner, given)
            else:
                call = len(self._given_to)
                self._given_to[call] = given
                if equation.primitive.name == "name" and equation.params["name"].startswith(_MARK):
                    self._marked[call] = self._makers[int(equation.params["name"].removeprefix(_MARK))]
                returned = [(id(variable), call) for variable in equation.outvars]
            made |= {id(variable): tensor for variable, tensor in zip(equation.outvars, returned, strict=True)}
        return tensors(jaxpr.outvars)


def _tensors(structure) -> list:
    return [value for value in keras.tree.flatten(structure) if keras.ops.is_tensor(value)]


def _body(equation):
    """Returns the program inside an equation that takes and returns what the equation does: of `jit`, a checkpoint."""
    for value in equation.params.values():
        program = getattr(value, "jaxpr", value)
        if isinstance(program, jax.extend.core.Jaxpr):
            counts = [[len(part.invars), len(part.outvars)] for part in (program, equation)]
            return program if counts[0] == counts[1] else None
    return None


def trace(layer, call, args, kwargs, *, is_dry_run=False):
    """Runs `call`, that of `layer`, for shapes alone: nothing is computed or assigned.

    Args:
        is_dry_run: Whether it raises where it would raise with these arguments.
    """
    del is_dry_run  # It always does.
    _keras.trace_for_shapes(call, layer.variables, args, kwargs)


def buffers_put_back(layers):
    """As in `_torch.py`: here no run of symbols writes."""
    return contextlib.nullcontext()
