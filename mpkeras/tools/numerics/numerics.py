"""`trace_numerics`: the range of every layer, forward and backward, and the first culprit."""

import dataclasses
import functools
import math
from numbers import Real

import keras
import numpy as np
from keras import ops

from mpkeras.policies.policy import Policy
from mpkeras.policies.registry import get_policy
from mpkeras.scaling.optimizer import LossScaleOptimizer
from mpkeras.seams import (
    ConvertedLayer,
    ModelView,
    RuleNames,
    check_model,
    dtypes,
    in_float32,
    let_heads_tell,
    number,
)
from mpkeras.tools.numerics.losses import (
    EXPONENTS,
    Range,
    lost_share,
    overflow_share,
    underflow_share,
    zeroed_share,
)
from mpkeras.tools.numerics.scale_window import WORTH, scale_window
from mpkeras.tools.shared.arguments import check_call, rows_of_batch
from mpkeras.tools.shared.compiled import loss_and_targets
from mpkeras.tools.shared.observation import find_culprit, observe
from mpkeras.tools.shared.ranges import all_finite, beyond, largest, overflow_limit
from mpkeras.tools.shared.report import Figure, Report, make_figure, percent

_NOTHING = Range.of([])


def trace_numerics(model, x, y=None, sample_weight=None, *, loss_scale: float | None = None) -> "NumericsReport":
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
        ValueError: If the model has no `call`, as many a GAN, the batch is empty, `y` is given and the model is not
            compiled with a loss, or `loss_scale` is not a positive finite number.
        TypeError: If `model` is no `keras.Model`.

    Example:

    >>> layers = [keras.Input((2,)), keras.layers.Dense(4, name="hidden"), keras.layers.Dense(1)]
    >>> model = keras.Sequential(layers, name="net")
    >>> model.compile("sgd", "mse")
    >>> model = mpkeras.prepare(model, "mixed_float16")
    >>> report = mpkeras.trace_numerics(model, np.full((4, 2), 1e5), np.ones((4, 1)))
    >>> print(report.culprit.message)
    layer 'net/hidden' is given up to 1e+05, more than float16 holds
    >>> model = mpkeras.prepare(model, report.policy())
    >>> model.layers[0].compute_dtype
    'float32'

    Layers inside recurrent ones and `TimeDistributed` are not looked at one by one: backends run them in loops.
    """
    _check(model, x, y, loss_scale)
    loss_scale = _scale_of(model) if loss_scale is None else float(loss_scale)
    if not ModelView(model).is_built:
        # As `fit` would; after it there are variables.
        with ModelView(model).native_states_put_back():
            model(x)
    return traced(model, x, y, sample_weight, loss_scale)


def traced(
    model, x, y, sample_weight, loss_scale: float, loss_of=None, paths=None, training: bool = True
) -> "NumericsReport":
    """`trace_numerics` of a built model.

    `loss_of` and `training` are those of `observe`; `paths` has, by the path that a layer has now, the one that it is
    shown with.
    """
    paths, given = paths or {}, x
    x, y, sample_weight = keras.tree.map_structure(_as_in_step, (x, y, sample_weight))
    # Else the first call of the pass would look for them, with runs of its own that are not the model's.
    with ModelView(model).native_states_put_back():
        let_heads_tell(model, x)
    observe_batch = functools.partial(observe, model, x, paths=paths, training=training)
    with in_float32(model):
        reference = observe_batch(y, sample_weight, loss_of=loss_of)
        moved = reference if y is None else observe_batch(None, None, moves_weights=True)

    def run(**options):
        observed = observe_batch(y, sample_weight, loss_of=loss_of, **options)
        return observed.with_gradients_of_what_moves(reference, moved)

    observed = run(loss_scale=loss_scale, references=True)
    reference.with_gradients_of_what_moves(reference, moved)

    def run_rounded(rounded):
        with in_float32(model):
            return run(rounded=rounded)

    window = scale_window(model, observed, reference, loss_scale, run, run_rounded)
    return NumericsReport(
        _layers(observed, reference, loss_scale),
        find_culprit(observed, reference, loss_scale),
        loss=observed.loss,
        loss_scale=None if y is None else loss_scale,
        window=None if window is None else (window.smallest, window.highest),
        lost={} if window is None else {paths.get(path, path): share for path, share in window.lost.items()},
        compute_dtypes=ModelView(model).compute_dtypes(),
        policy=ModelView(model).policy_in_training,
        rounded=[rounded.shown_with(paths) for rounded in ModelView(model).rounded_whole_numbers(given)],
    )


def _as_in_step(value):
    """Returns an array of numbers as the tensor that `compute_loss` is given in a step: a model may have its own."""
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "biuf":
        return value
    with np.errstate(over="ignore"):
        return ops.convert_to_tensor(dtypes.as_array(value))


def _check(model, x, y, loss_scale):
    check_model(model)
    rows_of_batch(x)
    check_call(model, "Trace the models inside, each with what it is given: `trace_numerics(model.generator, noise)`.")
    if y is not None and not getattr(model, "compiled", False):
        raise ValueError(
            f"Expected a model that is compiled with a loss, for the backward pass. Received: model '{model.name}', "
            "which is not. Call `model.compile(loss=...)`, or leave `y` out for the forward pass alone."
        )
    # Keras says of other targets what their structure is, and not what it should be.
    loss_and_targets(model, y)
    is_number = isinstance(loss_scale, Real) and not isinstance(loss_scale, bool)
    is_scale = is_number and 0 < float(loss_scale) < math.inf
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


def _layers(observed, reference, loss_scale: float) -> list:
    """Returns a `LayerNumerics` for each call."""
    layers = [_of_call(call, twin, loss_scale) for call, twin in zip(observed.calls, reference.calls, strict=True)]
    for i, (call, numerics) in enumerate(zip(observed.calls, layers, strict=True)):
        # A layer around one that is off is off as well, and not at fault.
        inside = [layers[j] for j in range(i) if observed.calls[j].start > call.start]
        is_of_inside = any(layer.is_off or layer.is_off_in_float8 for layer in inside)
        numerics.is_off = numerics.loses_outputs and not is_of_inside
    last = {id(call.layer): (call.layer, numerics) for call, numerics in zip(observed.calls, layers, strict=True)}
    pairs = zip(observed.variable_grads, reference.variable_grads, strict=True)
    grads_by_variable = {id(variable): (grad, true_grad) for (variable, grad), (_, true_grad) in pairs}
    for layer, numerics in last.values():
        grads_of_layer = [
            grads_by_variable[id(v)] for v in ConvertedLayer(layer).own_variables if id(v) in grads_by_variable
        ]
        numerics.weight_grads = Range.of(grad for grad, _ in grads_of_layer)
        numerics.true_weight_grads = Range.of(true_grad for _, true_grad in grads_of_layer)
    return layers


def _of_call(call, twin, loss_scale: float) -> "LayerNumerics":
    true_grads = [grad for grad in (*twin.input_grads, *twin.output_grads) if grad is not None]
    inputs, outputs, dtype = Range.of(call.inputs), Range.of(call.outputs), call.compute_dtype
    is_small = dtype in dtypes.SIXTEEN_BIT_DTYPES
    output_error = dtypes.relative_error(call.outputs, call.references)
    return LayerNumerics(
        path=call.path,
        class_name=type(call.layer).__name__,
        number=call.number,
        compute_dtype=dtype,
        inputs=inputs,
        outputs=outputs,
        # A layer that casts nothing on the way in (LayerNormalization) reads what it is given as it is.
        true_inputs=Range.of(twin.inputs if call.layer.autocast else []),
        true_outputs=Range.of(twin.outputs),
        overflow=overflow_share(call.outputs, _references(call, twin)),
        underflow=underflow_share(call.outputs, call.references),
        grads=Range.of([*call.input_grads, *call.output_grads]),
        true_grads=Range.of(true_grads),
        grad_underflow=zeroed_share(true_grads, dtype, loss_scale) if is_small else 0.0,
        grad_loss=lost_share(true_grads, dtype, loss_scale) if is_small else 0.0,
        float8=_in_float8(call, output_error) if ConvertedLayer(call.layer).multiplies_in_float8 else None,
        references=Range.of(call.references),
        output_error=output_error,
        added_overflow=overflow_share(call.added_losses, call.added_references),
        added_error=dtypes.relative_error(call.added_losses, call.added_references),
    )


def _references(call, twin) -> list:
    """Returns the outputs in float32 on the same inputs; of a layer that draws numbers, those of the pass in float32.

    Where the inputs are not finite there are none: what comes of those is no fault of this layer.
    """
    if any(reference is not None for reference in call.references):
        return call.references
    return twin.outputs if all_finite(call.inputs) else [None] * len(call.outputs)


def _in_float8(call, output_error: float) -> dict:
    kernel = keras.ops.convert_to_numpy(keras.ops.cast(call.layer.kernel, "float32"))
    sides = {
        "inputs": (call.inputs, ConvertedLayer.FLOAT8_OPERANDS),
        "kernel": ([kernel], ConvertedLayer.FLOAT8_OPERANDS),
        "gradients": (call.output_grads, ConvertedLayer.FLOAT8_GRADIENT),
    }
    shares = {name: zeroed_share(*side) for name, side in sides.items()}
    return shares | {"output_error": output_error}


@dataclasses.dataclass
class LayerNumerics:
    """One call of one layer.

    Attributes:
        path, class_name: `layer.path` and the name of its class.
        number: 0 for the first call of the layer in this pass.
        compute_dtype: What it computes in.
        inputs, outputs, grads, weight_grads: `Range`s of what was seen; gradients are those by inputs and outputs,
            times the loss scale, where a step computes them: not in front of all trained weights, as in a frozen base.
            `weight_grads` stands with the last call of a layer.
        true_inputs, true_outputs, true_grads, true_weight_grads: The same when all of the model is in float32, with a
            loss scale of 1.
        overflow: Share of outputs that are inf or NaN, and finite in float32 on the same inputs.
        underflow: Share of outputs that are zero, and not zero in float32 on the same inputs.
        grad_underflow: Share of the gradients, of those that are not zero, that round to zero at the loss scale.
        grad_loss: Share of the gradient that this layer loses at the loss scale, by the norm: many tiny numbers beside
            a large one are next to nothing.
        float8: Of a layer that multiplies in float8: `"inputs"`, `"kernel"` and `"gradients"` (by its outputs), the
            share of their values that round to zero beside the largest of their tensor, and `"output_error"`, the norm
            of what its outputs differ by from those in float32 on the same inputs, over the norm of these. Nothing
            saturates: the scale is that of the present values. `None` for other layers.
        references: `Range` of the outputs in float32 on the same inputs; of zero values where that is not known.
        output_error: The norm of what the outputs differ by from those in float32 on the same inputs, over the norm of
            these; 0.0 where they are not known. Rounding alone makes it about 0.001 in float16, and 0.01 in bfloat16.
        added_overflow, added_error: As `overflow` and `output_error`, of what it gives to `add_loss`.
        is_off: Whether `output_error` or `added_error` is above a tenth in 16 bits, and those of no layer inside this
            one.
    """

    path: str
    class_name: str
    number: int
    compute_dtype: str
    inputs: Range
    outputs: Range
    true_inputs: Range
    true_outputs: Range
    overflow: float
    underflow: float
    grads: Range
    true_grads: Range
    grad_underflow: float
    grad_loss: float
    weight_grads: Range = _NOTHING
    true_weight_grads: Range = _NOTHING
    float8: dict | None = None
    references: Range = _NOTHING
    output_error: float = 0.0
    added_overflow: float = 0.0
    added_error: float = 0.0
    is_off: bool = False

    @property
    def too_large(self) -> tuple[str, float] | None:
        """The numbers beyond the range of their dtype, and how far they reach, gradients unscaled; or `None`."""
        if self.compute_dtype not in dtypes.SIXTEEN_BIT_DTYPES:
            return None
        # The output first: it is what the layer itself has made.
        ranges = {
            "output": max(self.true_outputs, self.references, key=lambda numbers: numbers.max_abs),
            "input": self.true_inputs,
            "gradient": self.true_grads,
            "weight gradient": self.true_weight_grads,
        }
        for what, numbers in ranges.items():
            if numbers.max_abs >= overflow_limit(self.compute_dtype):
                return what, numbers.max_abs
        return None

    @property
    def fails_inside(self) -> bool:
        """Whether it makes inf or NaN in 16 bits alone, while all that comes in and goes out is within their range."""
        overflows = self.overflow > 0 or self.added_overflow > 0
        return overflows and self.compute_dtype in dtypes.SIXTEEN_BIT_DTYPES and self.too_large is None

    @property
    def loses_outputs(self) -> bool:
        """Whether its finite outputs, or losses that it adds, are off by more than a tenth in 16 bits."""
        is_small = self.compute_dtype in dtypes.SIXTEEN_BIT_DTYPES and self.float8 is None
        return is_small and not self.overflow and max(self.output_error, self.added_error) > WORTH

    @property
    def is_off_in_float8(self) -> bool:
        """Whether its outputs in float8 are off by more than a tenth."""
        return self.float8 is not None and self.float8["output_error"] > WORTH

    def to_dict(self) -> dict:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value.to_dict() if isinstance(value, Range) else value for name, value in values.items()}


class NumericsReport(Report):
    """What `trace_numerics` returns.

    Attributes:
        layers: List of `LayerNumerics` in the order of data flow; a layer that is called twice is there twice.
        culprit: Where inf or NaN began, a `Culprit`; `None` where all is finite.
        loss: The loss, not scaled; `None` without labels.
        loss_scale: The factor on it; `None` without labels.
        window: `(smallest, largest)` loss scale: powers of two between which no gradient overflows and no layer loses
            more than a tenth of the gradient of its weights, by the norm. The smallest is above the largest where no
            scale does both. `None` without labels, and where no layer computes in 16 bits.
        lost: `{path of the layer: share}` of the gradients that more than a tenth is lost of at the loss scale.
        rounded: List of the whole numbers in the batch that a layer rounds before they are read as ids, codes or
            positions: each with `layer`, `reader`, `dtype`, `before` and `after`.

    Example:

    >>> body = keras.layers.Dense(4, kernel_initializer="zeros", name="body")
    >>> model = keras.Sequential([keras.Input((2,)), body, keras.layers.Dense(1)], name="net")
    >>> model = mpkeras.apply_policy(model, "mixed_float16")
    >>> report = mpkeras.trace_numerics(model, np.full((4, 2), 1e5))
    >>> print(report.remedies()[0])
    Layer 'net/body': its input reaches 1e+05, over float16's 65504: keep it in float32 with `keep_float32=(..., ...
    >>> report.policy().keep_float32[-1]
    'path:^net/body$'
    """

    title = "Ranges by layer, in the order of data flow"

    def __init__(self, layers, culprit, *, loss, loss_scale, window, compute_dtypes, policy, lost=None, rounded=()):
        self.layers = layers
        self.culprit = culprit
        self.loss = loss
        self.loss_scale = loss_scale
        self.window = window
        self.lost = lost or {}
        self.rounded = list(rounded)
        self._compute_dtypes = compute_dtypes
        self._policy = policy

    @property
    def rules(self) -> tuple[str, ...]:
        """The float32 rules for the layers that leave their dtype's range, lose their outputs, or round `rounded`."""
        failing = [layer.path for layer in self.layers if layer.too_large or layer.fails_inside or layer.is_off]
        in_float32 = map(RuleNames.of_path, failing)
        return tuple(dict.fromkeys([*in_float32, *(rule for rounded in self.rounded for rule in rounded.rules)]))

    @property
    def rules_16_bits(self) -> tuple[str, ...]:
        """The `keep_16_bits` rules, one for each layer whose outputs are off by more than a tenth in float8."""
        return tuple(dict.fromkeys(RuleNames.of_path(layer.path) for layer in self.layers if layer.is_off_in_float8))

    def policy(self) -> Policy:
        """Returns the policy that the model trains under, with the rules for what is too large, or off, beside its own.

        Of a model in float32 it is `"mixed_float16"`.
        """
        base = self._policy if self._policy.compute_dtype in dtypes.SIXTEEN_BIT_DTYPES else get_policy("mixed_float16")
        new = [rule for rule in self.rules if rule not in base.keep_float32]
        new_16_bits = [rule for rule in self.rules_16_bits if rule not in base.keep_16_bits]
        if not new and not new_16_bits:
            return base
        rules = {"keep_float32": (*base.keep_float32, *new), "keep_16_bits": (*base.keep_16_bits, *new_16_bits)}
        return Policy._from_settings(dataclasses.replace(base._settings, **rules))

    def table(self) -> tuple[list, list]:
        header = ["Layer", "Class", "Computes in", "Largest output", "Overflow", "Underflow"]
        if self.loss_scale is not None:
            header += ["Largest gradient", "Gradient lost"]
        return header, [self._row(layer) for layer in self.layers]

    def _row(self, layer) -> list:
        name = layer.path + (f" (call {layer.number + 1})" if layer.number else "")
        row = [name, layer.class_name, layer.compute_dtype, _magnitude(layer.outputs)]
        row += [_percent(layer.overflow), _percent(layer.underflow)]
        if self.loss_scale is not None:
            row += [_magnitude(layer.grads), _percent(layer.grad_loss)]
        return row

    def notes(self) -> list:
        lines = [] if self.loss is None else [f"Loss {self.loss:.4g}, loss scale {self.loss_scale:g}."]
        lines.append(f"First culprit: {self.culprit.message}." if self.culprit else "Everything is finite.")
        lines += [" ".join(rounded.sentences()) for rounded in self.rounded]
        return lines + self.remedies()

    def remedies(self) -> list:
        """Returns what to do, one sentence each; an empty list where nothing is wrong."""
        lines = []
        too_large = {layer.path: (layer.compute_dtype, *layer.too_large) for layer in self.layers if layer.too_large}
        for path, (dtype, what, reached) in too_large.items():
            lines.append(
                f"Layer '{path}': its {what} reaches {beyond(reached, dtype)}, over {dtype}'s {largest(dtype):g}: keep "
                f"it in float32 with {RuleNames.keeping(path)}."
            )
        for layer in {layer.path: layer for layer in self.layers if layer.fails_inside}.values():
            if layer.path not in too_large:
                share = f"{_percent(layer.overflow)} of its outputs" if layer.overflow else "losses that it adds"
                lines.append(
                    f"Layer '{layer.path}': {share} are not finite in {layer.compute_dtype}, and are in float32: what "
                    f"it computes on the way is not for {layer.compute_dtype}. Keep it in float32 with "
                    f"{RuleNames.keeping(layer.path)}."
                )
        lines += [line for path, line in remedies_of_lost_outputs(self).items() if path not in too_large]
        for layer in {layer.path: layer for layer in self.layers if layer.is_off_in_float8}.values():
            lines.append(
                f"Layer '{layer.path}': its outputs are off by {_percent(layer.float8['output_error'])} in float8, and "
                f"{_percent(layer.float8['inputs'])} of its inputs round to zero: keep it in 16 bits with "
                f"{RuleNames.keeping(layer.path, 'keep_16_bits')}."
            )
        if lines:
            other = "; or train in 'mixed_bfloat16'" if "float16" in self._compute_dtypes else ""
            lines.append(f"`report.policy()` is the policy with these rules{other}.")
        return lines + self._about_scale()

    def _about_scale(self) -> list:
        if self.window is None or "float16" not in self._compute_dtypes:
            return []
        if self.culprit is not None and self.culprit.side != "gradient":
            # No scale makes the forward pass finite.
            return []
        smallest, highest = self.window
        if smallest > highest:
            return [
                f"No loss scale suits: from {_power(highest * 2)} on gradients overflow, and below {_power(smallest)} "
                f"{self._losing()}. Train in 'mixed_bfloat16', or keep the layers with the largest gradients in "
                "float32."
            ]
        lines = [
            f"Loss scales from {_power(smallest)} to {_power(highest)} suit: no gradient overflows, and no layer loses "
            "more than a tenth of the gradient of its weights."
        ]
        if self.loss_scale < smallest:
            lines.append(
                f"The loss scale of {self.loss_scale:g} is too small: {self._losing()}. Scale the loss, "
                f"`loss_scale={f'2.0**{round(np.log2(highest))}' if highest > 2**20 else f'{highest:g}'}`."
            )
        elif self.loss_scale > highest:
            lines.append(f"The loss scale of {self.loss_scale:g} is too large; a dynamic one comes down by itself.")
        return lines

    def _losing(self) -> str:
        """Returns a clause: which layers lose how much at the present scale."""
        if not self.lost:  # it is so large that it overflows
            return "gradients are lost"
        path, share = next(iter(self.lost.items()))
        others = len(self.lost) - 1
        more = f", and {others} more lose over a tenth" if others else ""
        return f"layer '{path}' loses {_percent(share)} of the gradient of its weights{more}"

    def to_dict(self) -> dict:
        return {
            # JSON has no word for inf and NaN.
            "loss": self.loss if self.loss is None or np.isfinite(self.loss) else str(self.loss),
            "loss_scale": self.loss_scale,
            "window": None if self.window is None else list(map(float, self.window)),
            "lost": self.lost,
            "culprit": None if self.culprit is None else dataclasses.asdict(self.culprit),
            "rounded": [
                # JSON has no word for inf.
                {**dataclasses.asdict(rounded), "after": rounded.after if np.isfinite(rounded.after) else None}
                for rounded in self.rounded
            ],
            "rules": list(self.rules),
            "remedies": self.remedies(),
            "layers": [layer.to_dict() for layer in self.layers],
        }

    def plot(self) -> Figure:
        """Returns a figure: a row for each layer, a column for each power of two, the darker the more values."""
        panels = [("outputs", "Outputs")]
        if self.loss_scale is not None:
            panels.append(("grads", f"Gradients, times the loss scale of {self.loss_scale:g}"))
        figure = make_figure(figsize=(5.2 * len(panels) + 1.6, 1.8 + 0.24 * len(self.layers)))
        row_of_axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, (name, title) in zip(row_of_axes, panels, strict=True):
            self._plot_panel(axes, [getattr(layer, name) for layer in self.layers], title)
        row_of_axes[0].set_yticks(range(len(self.layers)), [layer.path for layer in self.layers])
        return figure

    def _plot_panel(self, axes, ranges, title):
        shares = np.array([numbers.exponents / max(numbers.exponents.sum(), 1) for numbers in ranges], "float64")
        image = np.where(shares > 0, shares, np.nan)
        extent = (EXPONENTS[0], EXPONENTS[-1] + 1, len(ranges) - 0.5, -0.5)
        axes.imshow(image, aspect="auto", cmap="viridis_r", vmin=0.0, vmax=0.25, extent=extent)
        for row, numbers in enumerate(ranges):
            if numbers.nonfinite:
                axes.text(EXPONENTS[-1], row, "inf", color="crimson", ha="right", va="center", weight="bold")
        # float16: 2^-24 is the smallest subnormal number, 2^-14 the smallest normal one, 2^16 is beyond the largest.
        for exponent, style in ((-24, ":"), (-14, "--"), (16, "-")):
            axes.axvline(exponent, color="crimson", linestyle=style, linewidth=1)
        axes.set_title(title, fontsize=10)
        label = "power of two; darker: more values (red: float16's smallest, smallest normal, largest)"
        axes.set_xlabel(label, fontsize=8)


def remedy_of_culprit(report) -> str:
    """Returns the sentence of `report.remedies()` that is about its culprit, or an empty string."""
    if report.culprit is None:
        return ""
    remedies = report.remedies()
    about = [line for line in remedies if line.startswith(f"Layer '{report.culprit.path}'")]
    if not about and report.culprit.side == "gradient":
        about = remedies
    return about[0] if about else ""


def remedies_of_lost_outputs(report) -> dict:
    """Returns `{path: sentence}` for the layers whose finite outputs, or losses that they add, 16 bits lose."""
    sentences = {}
    for layer in report.layers:
        if layer.is_off:
            lost, error = "its outputs", layer.output_error
            if error <= WORTH:
                lost, error = "the losses that it adds", layer.added_error
            sentences[layer.path] = (
                f"Layer '{layer.path}': {lost} in {layer.compute_dtype} are off by {_percent(error)} from those in "
                f"float32 on the same inputs: keep it in float32 with {RuleNames.keeping(layer.path)}."
            )
    return sentences


def _magnitude(numbers: Range) -> str:
    if not numbers.size:
        return "-"
    text = f"{numbers.max_abs:.3g}"
    return f"{text}, {numbers.nonfinite} not finite" if numbers.nonfinite else text


def _percent(share: float) -> str:
    return percent(share) if share else "-"


def _power(scale: float) -> str:
    return f"{scale:g}" if 1 <= scale <= 2**20 else f"2^{round(np.log2(scale))}"
