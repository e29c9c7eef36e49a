"""`trace_numerics`: the range of every layer, forward and backward, and the first culprit."""

import contextlib
import functools

import keras
import numpy as np

from mpkeras import _keras
from mpkeras.conversion.apply import recorded
from mpkeras.conversion.plan import compute_dtypes, layers_of
from mpkeras.insight.culprit import find_culprit
from mpkeras.insight.gradient_loss import lost_share
from mpkeras.insight.numerics_report import LayerNumerics, NumericsReport
from mpkeras.insight.observation import observe
from mpkeras.insight.ranges import Range, overflow_share, underflow_limit, underflow_share
from mpkeras.insight.scale_window import scale_window
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES
from mpkeras.policies.rules import bound_layers, set_layer_policy
from mpkeras.policies.scalars import number
from mpkeras.scaling.optimizer import LossScaleOptimizer


def trace_numerics(model, x, y=None, sample_weight=None, *, loss_scale=None) -> NumericsReport:
    """Runs one batch forward and backward and returns what range every layer's values are in.

    Each layer that computes in 16 bits is also run in float32 on the same inputs: a value that is inf or NaN only in
    16 bits has overflowed, one that is zero only in 16 bits has underflowed. A second pass, all in float32, gives the
    gradients as they should be, and with them the loss scales that suit. Where the present scale may lose more of the
    weights' gradient than matters, further float32 passes with rounded gradients find out. The model is exactly as
    before afterwards, random generators and statistics included.

    Args:
        model: A `keras.Model` of any kind, compiled with a loss if `y` is given.
        x, y, sample_weight: One batch, as for `train_on_batch`. Without `y` there is no backward pass.
        loss_scale: The factor on the loss; by default that of the model's optimizer, 1 if it does not scale.

    Returns:
        A `NumericsReport`: `str()` is a table with remedies, `.to_dict()` what JSON can hold, `.plot()` a matplotlib
        figure, `.policy()` the policy with the float32 rules that help.

    Raises:
        ValueError: If `y` is given and the model is not compiled with a loss, or `loss_scale` is not a positive
            finite number.
        TypeError: If `model` is no `keras.Model`.

    Example:

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="head")], name="net")
    >>> model.compile("sgd", "mse")
    >>> model = mpkeras.prepare(model, "mixed_float16")
    >>> report = mpkeras.trace_numerics(model, np.full((4, 2), 1e5), np.ones((4, 1)))
    >>> print(report.culprit.message)
    layer 'net/head' is given up to 1e+05, more than float16 holds
    >>> model = mpkeras.prepare(model, report.policy())
    >>> model.layers[0].compute_dtype
    'float32'

    Layers inside recurrent ones and `TimeDistributed` are not looked at one by one: backends run them in loops.
    """
    _check(model, y, loss_scale)
    if loss_scale is None:
        loss_scale = _scale_of(model)
    if not _keras.is_built(model):
        model(x)  # As `fit` would; after it there are variables.
    run = functools.partial(observe, model, x, y, sample_weight)
    observed = run(loss_scale=loss_scale, references=True)
    with _in_float32(model):
        reference = run()
    layers = [_of_call(call, twin, loss_scale) for call, twin in zip(observed.calls, reference.calls, strict=True)]
    _add_weights(layers, observed, reference)

    def run_rounded(rounded):
        with _in_float32(model):
            return run(rounded=rounded)

    window = None
    if y is not None:
        window = scale_window(model, observed, reference, loss_scale, lambda s: run(loss_scale=s), run_rounded)
    return NumericsReport(
        layers,
        find_culprit(observed, reference, loss_scale),
        loss=observed.loss,
        loss_scale=loss_scale if y is not None else None,
        window=None if window is None else (window.smallest, window.highest),
        lost=window.lost if window is not None else {},
        compute_dtypes=compute_dtypes(model),
    )


def _check(model, y, loss_scale):
    if not isinstance(model, keras.Model):
        raise TypeError(
            f"Expected a `keras.Model`. Received: {model!r} (of type {type(model).__name__}). Pass the model itself."
        )
    if y is not None and not getattr(model, "compiled", False):
        raise ValueError(
            f"Expected a model that is compiled with a loss, for the backward pass. Received: model '{model.name}', "
            "which is not. Call `model.compile(loss=...)`, or leave `y` out for the forward pass alone."
        )
    is_scale = isinstance(loss_scale, (int, float)) and np.isfinite(loss_scale) and loss_scale > 0
    if loss_scale is not None and not is_scale:
        raise ValueError(
            f"Expected `loss_scale` to be a positive finite number. Received: loss_scale={loss_scale!r}. "
            "Leave it out to take the optimizer's."
        )


def _scale_of(model) -> float:
    optimizer = getattr(model, "optimizer", None)
    if isinstance(optimizer, LossScaleOptimizer):
        return number(optimizer.loss_scale)
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        scale = optimizer.dynamic_scale if optimizer.built else optimizer.initial_scale
        return number(scale)
    return float(getattr(optimizer, "loss_scale_factor", None) or 1.0)


@contextlib.contextmanager
def _in_float32(model):
    put_back = recorded(model)
    try:
        bound = bound_layers(model, "float32")
        for layer in layers_of(model):
            if id(layer) not in bound:
                set_layer_policy(layer, keras.DTypePolicy("float32"))
        yield
    finally:
        put_back()


def _of_call(call, twin, loss_scale: float) -> LayerNumerics:
    true_grads = [grad for grad in (*twin.input_grads, *twin.output_grads) if grad is not None]
    inputs, outputs = Range.of(call.inputs), Range.of(call.outputs)
    return LayerNumerics(
        path=call.layer.path or call.layer.name,
        class_name=type(call.layer).__name__,
        number=call.number,
        compute_dtype=call.compute_dtype,
        inputs=inputs,
        outputs=outputs,
        # A layer that casts nothing on the way in (LayerNormalization) reads what it is given as it is.
        true_inputs=Range.of(twin.inputs if call.layer.autocast else []),
        true_outputs=Range.of(twin.outputs),
        overflow=_overflow(call, inputs, outputs),
        underflow=underflow_share(call.outputs, call.references),
        grads=Range.of([*call.input_grads, *call.output_grads]),
        true_grads=Range.of(true_grads),
        grad_underflow=_rounds_to_zero(true_grads, call.compute_dtype, loss_scale),
        grad_loss=_loss(true_grads, call.compute_dtype, loss_scale),
    )


def _overflow(call, inputs, outputs) -> float:
    if any(reference is not None for reference in call.references):
        return overflow_share(call.outputs, call.references)
    # Without a float32 twin (a layer that draws numbers): finite in, not finite out.
    return outputs.nonfinite / outputs.size if outputs.size and not inputs.nonfinite else 0.0


def _rounds_to_zero(grads, dtype: str, loss_scale: float) -> float:
    """Returns the share of gradients that `dtype` rounds to zero at this scale, of those that are not zero."""
    nonzero = np.concatenate([np.abs(g[g != 0], dtype="float64").ravel() for g in grads] or [np.zeros(0)])
    if dtype not in SIXTEEN_BIT_DTYPES or not nonzero.size:
        return 0.0
    return float(np.mean(nonzero * loss_scale <= underflow_limit(dtype)))


def _loss(grads, dtype: str, loss_scale: float) -> float:
    return lost_share(grads, dtype, loss_scale) if dtype in SIXTEEN_BIT_DTYPES else 0.0


def _add_weights(layers, observed, reference):
    """Adds the gradients of each layer's own weights to what is known of its last call."""
    last = {id(call.layer): layer for call, layer in zip(observed.calls, layers, strict=True)}
    pairs = zip(observed.variable_grads, reference.variable_grads, strict=True)
    found = {id(variable): (grad, true_grad) for (variable, grad), (_, true_grad) in pairs}
    for call in observed.calls:
        own = [found[id(v)] for v in _keras.own_variables(call.layer) if id(v) in found]
        last[id(call.layer)].weight_grads = Range.of(grad for grad, _ in own)
        last[id(call.layer)].true_weight_grads = Range.of(true_grad for _, true_grad in own)
