"""`find_culprit`: the first layer, in data-flow order, that turns finite numbers into inf or NaN."""

import dataclasses

import keras
import numpy as np


@dataclasses.dataclass(frozen=True)
class Culprit:
    """Where inf or NaN began.

    Attributes:
        side: `"input"` (the layer was given inf or NaN, or more than its dtype holds), `"weight"`, `"output"`, `"loss"`
            or `"gradient"`.
        path: `layer.path` of the layer; `None` for the data and the loss.
        message: A sentence with the numbers.
    """

    side: str
    path: str | None
    message: str


def find_culprit(observed, reference, loss_scale: float) -> Culprit | None:
    """Returns where inf or NaN began in an `Observation`; `None` where all is finite."""
    return _forward(observed, reference) or _loss(observed) or _backward(observed, loss_scale)


def _forward(observed, reference):
    for call, twin in zip(observed.calls, reference.calls, strict=True):
        if _finite(call.outputs):
            continue
        path = _path(call)
        bad = [v for v in call.layer.weights if "float" in v.dtype and not _finite([_value(v)])]
        if bad:
            return Culprit("weight", path, f"the weight '{bad[0].path}' holds values that are not finite")
        if _finite(call.inputs):
            return Culprit("output", path, f"the output of layer '{path}' is not finite: {_reached(call)}")
        # No layer before this one is to blame.
        if _finite(twin.inputs):
            given = max(np.abs(i).max(initial=0.0) for i in twin.inputs)
            return Culprit(
                "input", path, f"layer '{path}' is given up to {given:.3g}, more than {call.compute_dtype} holds"
            )
        return Culprit("input", path, f"layer '{path}' was given values that are not finite: look into the data")
    return None


def _loss(observed):
    if observed.loss is None or np.isfinite(observed.loss):
        return None
    return Culprit("loss", None, f"all layers are finite, the loss is {observed.loss}: look at the loss and the labels")


def _backward(observed, loss_scale):
    grads = dict((id(variable), grad) for variable, grad in observed.variable_grads)
    # Latest first, and of a layer and those inside it the inner one first.
    for call in sorted(observed.calls, key=lambda call: call.start, reverse=True):
        own = [grads[id(v)] for v in call.layer.trainable_variables if id(v) in grads]
        if _finite(call.output_grads) and not _finite([*call.input_grads, *own]):
            path = _path(call)
            where = "by its input" if not _finite(call.input_grads) else "by its weights"
            largest = max((np.abs(g).max() for g in call.output_grads if g is not None), default=0.0)
            return Culprit(
                "gradient",
                path,
                f"the gradient of layer '{path}' {where} is not finite at a loss scale of {loss_scale:g}, "
                f"while that of its output is (up to {largest:.3g})",
            )
    for call in reversed(observed.calls):
        if not _finite(call.output_grads):
            path = _path(call)
            origin = "the loss" if call is observed.calls[-1] else "what is behind it"
            return Culprit(
                "gradient",
                path,
                f"the gradient of the output of layer '{path}' is not finite at a loss scale of {loss_scale:g}: "
                f"{origin} sends back more than {call.outputs[0].dtype} holds",
            )
    return None


def _finite(arrays) -> bool:
    return all(np.isfinite(np.asarray(array, "float32")).all() for array in arrays if array is not None)


def _value(variable):
    return keras.ops.convert_to_numpy(variable.value)


def _path(call) -> str:
    return call.layer.path or call.layer.name


def _reached(call) -> str:
    """Returns a clause with the largest output in float32, or with the largest input where that is not known."""
    true = [np.abs(r[np.isfinite(r)]).max(initial=0.0) for r in call.references if r is not None]
    if true:
        return f"in float32 it reaches {max(true):.3g}"
    return f"from finite inputs up to {max((np.abs(i).max(initial=0.0) for i in call.inputs), default=0.0):.3g}"
