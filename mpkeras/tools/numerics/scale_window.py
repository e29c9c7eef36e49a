"""The loss scales at which gradients neither overflow nor get lost."""

import dataclasses
import functools

import ml_dtypes
import numpy as np
from keras import ops

from mpkeras.seams import ConvertedLayer, ModelView, dtypes, has_logits
from mpkeras.tools.numerics.losses import rounded
from mpkeras.tools.shared.ranges import max_abs, overflow_limit

# The share of a layer's weight gradient, by the norm, that may be lost without a warning: 1 % of the sum of squares,
# far less than what changes from batch to batch.
WORTH = 0.1
# The same of the gradient at a single place: the losses of a hundred places, whose signs differ, add up to `WORTH`.
SAFE = 0.01


def smallest_safe_exponent(grads, dtype: str) -> int | None:
    """Returns the smallest power of two that, as loss scale, loses no more than `SAFE` of a gradient; `None` of zeros.

    From the count of numbers between two powers of two, and so right to about one power.
    """
    nonzero = [np.abs(grad[np.isfinite(grad) & (grad != 0)], dtype="float64") for grad in grads]
    values = np.concatenate([np.zeros(0), *nonzero])
    if not values.size:
        return None
    exponents = np.frexp(values)[1] - 1  # 2**e <= value < 2**(e + 1)
    first, last = int(exponents.min()), int(exponents.max())
    places = np.arange(first, last + 1, dtype="float64")
    squares = np.bincount(exponents - first, weights=np.square(values / values.max()))
    unit = int(np.log2(float(ml_dtypes.finfo(dtype).smallest_subnormal)))
    for scale in range(unit - last - 2, unit - first + 20):
        # The error is evenly spread over half a unit beside numbers of about 1.5 * 2**e; below that all is lost.
        share = np.minimum(1.0, 4.0 ** (unit - scale - places) / (12 * 1.5**2))
        if np.sum(share * squares) <= SAFE**2 * np.sum(squares):
            return scale
    return unit - first + 20


def with_rounded_gradient(tensor, dtype: str, loss_scale: float | None):
    """Returns a float32 tensor as it is, with a gradient that is rounded on its way back.

    As by `rounded`, for a `dtype` whose smallest numbers float32 holds, too. A `loss_scale` of `None` rounds to the
    bits that `dtype` has at any scale.
    """
    info = ml_dtypes.finfo(dtype)
    # Not by casts, which a compiler may leave out.
    if loss_scale is None:
        split = 2.0 ** (23 - info.nmant) + 1.0

        def round_off(x):
            # Dekker's splitting: its first part has as many bits as `dtype`.
            return x * split - (x * split - x)
    else:
        normal, unit = float(info.smallest_normal) / loss_scale, float(info.smallest_subnormal) / loss_scale

        def round_off(x):
            # Below the smallest normal number all that `dtype` has are multiples of one unit.
            return ops.where(ops.abs(x) < normal, ops.round(x / unit) * unit, x)

    @ops.custom_gradient
    def through(x):
        def grad(*args, upstream=None):
            # TensorFlow and JAX pass it alone, torch behind the arguments by its name.
            return round_off(args[0] if upstream is None else upstream)

        return x + 0.0, grad

    return through(tensor)


@dataclasses.dataclass(frozen=True)
class ScaleWindow:
    """The loss scales that suit a batch.

    Attributes:
        smallest, highest: Powers of two. From `smallest` on no layer loses more than `WORTH` of its weights' gradient,
            up to `highest` no gradient overflows. The smallest is above the highest where no scale does both.
        lost: `{path of the layer: share}` of what the present loss scale loses, where that is more than `WORTH`.
    """

    smallest: float
    highest: float
    lost: dict


def scale_window(model, observed, reference, loss_scale: float, run, run_rounded) -> ScaleWindow | None:
    """Returns the `ScaleWindow` of a batch, or `None` where nothing computes in 16 bits or there is no finite gradient.

    The loss of each gradient for itself says which scales are safe. Where the present one is not among them, a pass in
    float32 with every gradient rounded as in float16 shows what is lost of the gradients that the optimizer gets: a
    small gradient that is added to a large one, or that of an easy example, is no loss. Then `smallest` is the present
    scale if that does, and is searched for if it does not.

    Args:
        model: The model.
        observed, reference: The `Observation` at `loss_scale`, and that in float32, not scaled.
        loss_scale: The present one.
        run, run_rounded: `run(loss_scale=...)` repeats the first, `run_rounded(rounded)` the second with the argument
            of `observe`.
    """
    if not reference.gradients_are_finite:
        return None
    weights = _weight_grads(model, observed, reference)
    highest = _highest(reference, weights)
    if highest is None:
        return None
    if loss_scale > 2.0**highest and observed.gradients_are_finite:
        highest = _floor(loss_scale)
    smallest = _safe(reference, weights)
    known = min(_floor(loss_scale), highest)
    in_float16 = {id(layer) for layer in ModelView(model).layers if layer.compute_dtype == "float16"}
    if smallest <= known or not in_float16:
        return ScaleWindow(2.0**smallest, 2.0**highest, {})

    @functools.cache
    def shares_at(scale) -> dict:
        seen = run_rounded(functools.partial(_with_rounded_gradient, in_float16, scale))
        return _shares(weights, seen, scale)

    def lost_at(scale) -> dict:
        """Returns the shares that are lost at this scale and would not be at another one, the largest first."""
        lost = {path: share for path, share in shares_at(scale).items() if share > WORTH}
        # Of a gradient that is zero but for rounding (of a bias before a normalization) nothing is left at any scale.
        at_any = shares_at(None) if lost else {}
        return dict(sorted((item for item in lost.items() if at_any[item[0]] <= WORTH), key=lambda item: -item[1]))

    if not lost_at(2.0**known):
        smallest = known
    else:
        too_small = known
        while smallest - too_small > 1:
            middle = (smallest + too_small) // 2
            smallest, too_small = (smallest, middle) if lost_at(2.0**middle) else (middle, too_small)
        # Only an overflow that was seen says that no scale is left.
        while smallest > highest and run(loss_scale=2.0 ** (highest + 1)).gradients_are_finite:
            highest += 1
    return ScaleWindow(2.0**smallest, 2.0**highest, lost_at(loss_scale) if loss_scale <= 2.0**highest else {})


@dataclasses.dataclass(frozen=True)
class _WeightGrads:
    """The gradients of a layer's own weights: true ones, and whether each came through 16 bits."""

    path: str
    dtype: str
    variables: tuple
    true: tuple
    in_16_bits: list


def _weight_grads(model, observed, reference) -> list:
    pairs = zip(observed.variable_grads, reference.variable_grads, strict=True)
    grads_by_variable = {
        id(v): (v, grad, true) for (v, grad), (_, true) in pairs if grad is not None and true is not None
    }
    result = []
    for layer in ModelView(model).layers:
        grads_of_layer = [
            grads_by_variable.pop(id(v)) for v in ConvertedLayer(layer).own_variables if id(v) in grads_by_variable
        ]
        if grads_of_layer:
            variables, grads, true = zip(*grads_of_layer, strict=True)
            dtype = layer.compute_dtype
            in_16_bits = [_fits(grad, dtype) for grad in grads]
            result.append(_WeightGrads(ConvertedLayer(layer).path, dtype, variables, true, in_16_bits))
    return result


def _fits(grad, dtype: str) -> bool:
    """Returns whether a float32 gradient holds numbers of `dtype` only: then it was computed in it."""
    if dtype not in dtypes.SIXTEEN_BIT_DTYPES:
        return False
    finite = grad[np.isfinite(grad)]
    with np.errstate(over="ignore"):
        return bool(np.all(finite.astype(dtype).astype("float32") == finite))


def _grads_between_layers(reference) -> list:
    """Returns `(gradients, dtype)` for the inputs and for the outputs of each layer that computes in 16 bits."""
    calls = [(call, call.layer.compute_dtype) for call in reference.calls]
    return [
        ([grad for grad in grads if grad is not None], dtype)
        for call, dtype in calls
        if dtype in dtypes.SIXTEEN_BIT_DTYPES
        for grads in (call.input_grads, call.output_grads)
    ]


def _highest(reference, weights) -> int | None:
    """Returns the exponent of the largest loss scale at which no gradient is too large for its dtype."""
    groups = _grads_between_layers(reference)
    groups += [(of.true, of.dtype) for of in weights if of.dtype in dtypes.SIXTEEN_BIT_DTYPES]
    reached = [(max_abs(grads), dtype) for grads, dtype in groups]
    limits = [overflow_limit(dtype) / value for value, dtype in reached if value > 0]
    return int(np.ceil(np.log2(min(limits)))) - 1 if limits else None


def _safe(reference, weights) -> int:
    """Returns an exponent from which on no single gradient loses more than `SAFE` of itself."""
    groups = _grads_between_layers(reference)
    for of in weights:
        groups.append(([grad for grad, is_in in zip(of.true, of.in_16_bits, strict=True) if is_in], of.dtype))
    exponents = [smallest_safe_exponent(grads, dtype) for grads, dtype in groups]
    # -126 is the exponent of float32's own smallest number.
    return max([-126, *(exponent for exponent in exponents if exponent is not None)])


def _floor(scale: float) -> int:
    return int(np.floor(np.log2(scale)))


def _with_rounded_gradient(in_float16, scale, layer, tensor):
    # Where Keras finds the logits by the tensor itself, the gradient does not come through it.
    if id(layer) not in in_float16 or has_logits(tensor):
        return tensor
    return with_rounded_gradient(tensor, "float16", scale)


def _shares(weights, seen, scale) -> dict:
    """Returns `{path: share}`, how far the gradient of each layer's weights is from the true one, by the norm."""
    grads_by_variable = {id(variable): grad for variable, grad in seen.variable_grads}
    shares = {}
    for of in weights:
        grads = [grads_by_variable[id(variable)] for variable in of.variables]
        grads = [np.zeros_like(true) if grad is None else grad for grad, true in zip(grads, of.true, strict=True)]
        if of.dtype == "float16" and scale is not None:
            pairs = zip(grads, of.in_16_bits, strict=True)
            grads = [rounded(grad, "float16", scale) if is_in else grad for grad, is_in in pairs]
        shares[of.path] = min(dtypes.relative_error(grads, of.true), 1.0)
    return shares
