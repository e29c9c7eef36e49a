"""`scale_window`: between which loss scales a batch's gradients neither overflow nor get lost."""

import dataclasses
import functools

import numpy as np

from mpkeras import _keras
from mpkeras.conversion.plan import layers_of
from mpkeras.insight.observation import Observation
from mpkeras.insight.ranges import WORTH, overflow_limit, rounded, smallest_safe_exponent, with_rounded_gradient
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES


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


def scale_window(model, observed: Observation, reference: Observation, loss_scale: float, run, run_rounded):
    """Returns the `ScaleWindow` of a batch, or `None` where nothing computes in 16 bits or there is no gradient.

    What each gradient loses for itself says which scales are safe. Where the present one is not among them, a pass in
    float32 with every gradient rounded as in float16 shows what is lost of the gradients that the optimizer gets: a
    small gradient that is added to a large one, or that of an easy example, is no loss. Then `smallest` is the present
    scale if that does, and is searched for if it does not.

    `observed` is the pass at `loss_scale`, `reference` the same in float32 and not scaled; `run(scale)` repeats the
    first, `run_rounded(rounded)` the second with the argument of `observe`.
    """
    dtypes = {id(layer): dtype for layer in layers_of(model) if (dtype := layer.compute_dtype) in SIXTEEN_BIT_DTYPES}
    weights = _weight_grads(model, observed, reference)
    highest = _highest(reference, weights, dtypes)
    if highest is None:
        return None
    if loss_scale > 2.0**highest and is_finite(observed):
        highest = _floor(loss_scale)
    smallest = _safe(reference, weights, dtypes)
    known = min(_floor(loss_scale), highest)
    if smallest <= known or "float16" not in dtypes.values():
        return ScaleWindow(2.0**smallest, 2.0**highest, {})

    @functools.cache
    def shares_at(scale) -> dict:
        seen = run_rounded(functools.partial(_with_rounded_gradient, dtypes, scale))
        return _shares(weights, seen, dtypes, scale)

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
        # That no scale is left is said only of what was seen to overflow.
        while smallest > highest and is_finite(run(2.0 ** (highest + 1))):
            highest += 1
    return ScaleWindow(2.0**smallest, 2.0**highest, lost_at(loss_scale) if loss_scale <= 2.0**highest else {})


def is_finite(observed: Observation) -> bool:
    """Returns whether all gradients of an `Observation` are finite."""
    grads = [grad for _, grad in observed.variable_grads]
    for call in observed.calls:
        grads += [*call.input_grads, *call.output_grads]
    return all(np.isfinite(np.asarray(grad, "float32")).all() for grad in grads if grad is not None)


@dataclasses.dataclass(frozen=True)
class _WeightGrads:
    """The gradients of a layer's own weights: true ones, and whether each came through 16 bits."""

    layer: object
    variables: list
    true: list
    in_16_bits: list


def _weight_grads(model, observed, reference) -> list:
    pairs = zip(observed.variable_grads, reference.variable_grads, strict=True)
    found = {id(v): (v, grad, true) for (v, grad), (_, true) in pairs if grad is not None and true is not None}
    result = []
    for layer in layers_of(model):
        own = [found.pop(id(v)) for v in _keras.own_variables(layer) if id(v) in found]
        if own:
            variables, grads, true = zip(*own, strict=True)
            dtype = layer.compute_dtype
            result.append(_WeightGrads(layer, list(variables), list(true), [_fits(grad, dtype) for grad in grads]))
    return result


def _fits(grad, dtype: str) -> bool:
    """Returns whether a float32 gradient holds numbers of `dtype` only: then it was computed in it."""
    if dtype not in SIXTEEN_BIT_DTYPES:
        return False
    finite = grad[np.isfinite(grad)]
    with np.errstate(over="ignore"):
        return bool(np.all(finite.astype(dtype).astype("float32") == finite))


def _highest(reference, weights, dtypes) -> int | None:
    """Returns the exponent of the largest loss scale at which no gradient is too large for its dtype."""
    grads = [
        (grad, dtypes[id(call.layer)])
        for call in reference.calls
        if id(call.layer) in dtypes
        for grad in (*call.input_grads, *call.output_grads)
    ]
    grads += [(grad, dtypes[id(of.layer)]) for of in weights if id(of.layer) in dtypes for grad in of.true]
    largest = [(_largest(grad), dtype) for grad, dtype in grads if grad is not None]
    limits = [overflow_limit(dtype) / value for value, dtype in largest if value > 0]
    return int(np.ceil(np.log2(min(limits)))) - 1 if limits else None


def _largest(grad) -> float:
    return float(np.abs(grad[np.isfinite(grad)], dtype="float64").max(initial=0.0))


def _safe(reference, weights, dtypes) -> int:
    """Returns an exponent from which on no single gradient loses more than `SAFE` of itself."""
    groups = [
        (grads, dtypes[id(call.layer)])
        for call in reference.calls
        if id(call.layer) in dtypes
        for grads in (call.input_grads, call.output_grads)
    ]
    groups += [
        ([grad for grad, is_in in zip(of.true, of.in_16_bits, strict=True) if is_in], dtypes[id(of.layer)])
        for of in weights
        if id(of.layer) in dtypes
    ]
    exponents = [smallest_safe_exponent([g for g in grads if g is not None], dtype) for grads, dtype in groups]
    # -126 is the exponent of float32's own smallest number.
    return max([-126, *(exponent for exponent in exponents if exponent is not None)])


def _floor(scale: float) -> int:
    return int(np.floor(np.log2(scale)))


def _with_rounded_gradient(dtypes, scale, layer, tensor):
    # Where Keras finds the logits by the tensor itself, the gradient does not come through it.
    if dtypes.get(id(layer)) != "float16" or _keras.has_logits(tensor):
        return tensor
    return with_rounded_gradient(tensor, "float16", scale)


def _shares(weights, seen, dtypes, scale) -> dict:
    """Returns `{path: share}`, how far the gradient of each layer's weights is from the true one, by the norm."""
    found = {id(variable): grad for variable, grad in seen.variable_grads}
    shares = {}
    for of in weights:
        grads = [found[id(variable)] for variable in of.variables]
        grads = [np.zeros_like(true) if grad is None else grad for grad, true in zip(grads, of.true, strict=True)]
        if dtypes.get(id(of.layer)) == "float16" and scale is not None:
            grads = [
                rounded(g, "float16", scale) if small else g for g, small in zip(grads, of.in_16_bits, strict=True)
            ]
        true_norm = _norm(of.true)
        if true_norm:
            error = _norm([grad - true for grad, true in zip(grads, of.true, strict=True)])
            shares[of.layer.path or of.layer.name] = min(error / true_norm, 1.0)
    return shares


def _norm(grads) -> float:
    return float(np.sqrt(sum(np.sum(np.square(np.where(np.isfinite(g), g, 0), dtype="float64")) for g in grads)))
