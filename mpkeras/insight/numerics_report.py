"""What `trace_numerics` returns: a table, remedies, a figure, and the policy that helps."""

import dataclasses
import re

import numpy as np

from mpkeras.insight.ranges import EXPONENTS, Range, largest, overflow_limit
from mpkeras.insight.report import Report, make_figure
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES
from mpkeras.policies.policy import Policy
from mpkeras.policies.registry import get_policy

_NOTHING = Range.of([])


@dataclasses.dataclass
class LayerNumerics:
    """One call of one layer.

    Attributes:
        path, class_name: `layer.path` and the name of its class.
        number: 0 for the first call of the layer in this pass.
        compute_dtype: What it computes in.
        inputs, outputs, grads, weight_grads: `Range`s of what was seen; gradients are those by inputs and outputs,
            times the loss scale. `weight_grads` stands with the last call of a layer.
        true_inputs, true_outputs, true_grads, true_weight_grads: The same when all of the model is in float32, with a
            loss scale of 1.
        overflow: Share of outputs that are inf or NaN, and finite in float32 on the same inputs.
        underflow: Share of outputs that are zero, and not zero in float32 on the same inputs.
        grad_underflow: Share of the gradients, of those that are not zero, that round to zero at the loss scale.
        grad_loss: Share of the gradient that this layer loses at the loss scale, by the norm: many tiny numbers beside
            a large one are next to nothing.
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

    @property
    def is_too_large(self) -> bool:
        """Whether the layer reads or writes numbers, or gradients at a loss scale of 1, beyond its dtype's range."""
        if self.compute_dtype not in SIXTEEN_BIT_DTYPES:
            return False
        limit = overflow_limit(self.compute_dtype)
        ranges = (self.true_inputs, self.true_outputs, self.true_grads, self.true_weight_grads)
        return self.overflow > 0 or any(found.max_abs >= limit for found in ranges)

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

    Example:

    >>> layers = [keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros", name="head")]
    >>> model = keras.Sequential(layers, name="net")
    >>> model = mpkeras.apply_policy(model, "mixed_float16")
    >>> report = mpkeras.trace_numerics(model, np.full((4, 2), 1e5))
    >>> print(report.remedies()[0])
    Layer 'net/head': its input reaches 1e+05, over float16's 65504: keep it in float32 with the rule 'path:^net/head$'.
    >>> report.policy().keep_float32[-1]
    'path:^net/head$'
    """

    title = "Ranges by layer, in the order of data flow"

    def __init__(self, layers, culprit, *, loss, loss_scale, window, compute_dtypes, lost=None):
        self.layers = layers
        self.culprit = culprit
        self.loss = loss
        self.loss_scale = loss_scale
        self.window = window
        self.lost = lost or {}
        self._compute_dtypes = compute_dtypes

    @property
    def rules(self) -> tuple[str, ...]:
        """The float32 rules, one for each layer whose numbers are beyond its dtype's range."""
        paths = dict.fromkeys(layer.path for layer in self.layers if layer.is_too_large)
        return tuple(f"path:^{re.escape(path)}$" for path in paths)

    def policy(self) -> Policy:
        """Returns the mixed policy of the model with the rules that keep what is too large in float32."""
        dtype = "bfloat16" if "bfloat16" in self._compute_dtypes else "float16"
        base = get_policy(f"mixed_{dtype}")
        new = [rule for rule in self.rules if rule not in base.keep_float32]
        return Policy(base.name, keep_float32=(*base.keep_float32, *new)) if new else base

    def table(self):
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
        return lines + self.remedies()

    def remedies(self) -> list:
        """Returns what to do, one sentence each; an empty list where nothing is wrong."""
        lines = []
        for layer in {layer.path: layer for layer in self.layers if layer.is_too_large}.values():
            what, reached = _largest_of(layer)
            lines.append(
                f"Layer '{layer.path}': its {what} reaches {reached:.3g}, over {layer.compute_dtype}'s "
                f"{largest(layer.compute_dtype):g}: keep it in float32 with the rule 'path:^{re.escape(layer.path)}$'."
            )
        if lines:
            lines.append("`report.policy()` is the policy with these rules; or train in 'mixed_bfloat16'.")
        return lines + self._about_scale()

    def _about_scale(self) -> list:
        if self.window is None or self.loss_scale is None or "float16" not in self._compute_dtypes:
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
            "more than a tenth of its gradient."
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
        """Returns which layers lose how much at the present scale."""
        if not self.lost:  # it is so large that it overflows
            return "gradients are lost"
        path, share = next(iter(self.lost.items()))
        others = len(self.lost) - 1
        more = f", and {others} more lose over a tenth" if others else ""
        return f"layer '{path}' loses {_percent(share)} of its gradient{more}"

    def to_dict(self) -> dict:
        return {
            # JSON has no word for inf and NaN.
            "loss": self.loss if self.loss is None or np.isfinite(self.loss) else str(self.loss),
            "loss_scale": self.loss_scale,
            "window": None if self.window is None else list(map(float, self.window)),
            "lost": self.lost,
            "culprit": None if self.culprit is None else dataclasses.asdict(self.culprit),
            "rules": list(self.rules),
            "remedies": self.remedies(),
            "layers": [layer.to_dict() for layer in self.layers],
        }

    def plot(self):
        """Returns a figure: a row for each layer, a column for each power of two, the darker the more values."""
        panels = [("outputs", "Outputs")]
        if self.loss_scale is not None:
            panels.append(("grads", f"Gradients, times the loss scale of {self.loss_scale:g}"))
        height = 1.8 + 0.24 * len(self.layers)
        figure = make_figure(figsize=(5.2 * len(panels) + 1.6, height))
        for axes, (name, title) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            self._plot_panel(axes, [getattr(layer, name) for layer in self.layers], title)
            axes.set_yticks(
                range(len(self.layers)),
                [layer.path for layer in self.layers] if axes.get_subplotspec().is_first_col() else [],
            )
        return figure

    def _plot_panel(self, axes, ranges, title):
        shares = np.array([found.exponents / max(found.exponents.sum(), 1) for found in ranges], "float64")
        image = np.where(shares > 0, shares, np.nan)
        axes.imshow(
            image,
            aspect="auto",
            cmap="viridis_r",
            vmin=0.0,
            vmax=0.25,
            extent=(EXPONENTS[0], EXPONENTS[-1] + 1, len(ranges) - 0.5, -0.5),
        )
        for found, row in zip(ranges, range(len(ranges)), strict=True):
            if found.nonfinite:
                axes.text(EXPONENTS[-1], row, "inf", color="crimson", ha="right", va="center", weight="bold")
        # float16: 2^-24 is the smallest subnormal number, 2^-14 the smallest normal one, 2^16 is beyond the largest.
        for exponent, style in ((-24, ":"), (-14, "--"), (16, "-")):
            axes.axvline(exponent, color="crimson", linestyle=style, linewidth=1)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(
            "power of two; darker: more values (red: float16's smallest, smallest normal, largest)", fontsize=8
        )


def _largest_of(layer) -> tuple[str, float]:
    """Returns what of a layer is the largest in float32, and how large."""
    ranges = {
        "input": layer.true_inputs,
        "output": layer.true_outputs,
        "gradient": layer.true_grads,
        "weight gradient": layer.true_weight_grads,
    }
    limit = overflow_limit(layer.compute_dtype)
    # The output first: it is what the layer itself has made.
    for what in ("output", "input", "gradient", "weight gradient"):
        if ranges[what].max_abs >= limit:
            return what, ranges[what].max_abs
    return "output", max(layer.true_outputs.max_abs, layer.outputs.max_abs)


def _magnitude(found: Range) -> str:
    if not found.size:
        return "-"
    text = f"{found.max_abs:.3g}"
    return f"{text}, {found.nonfinite} not finite" if found.nonfinite else text


def _percent(share: float) -> str:
    if share == 0:
        return "-"
    return f"{share:.2%}" if share >= 5e-5 else "< 0.01%"


def _power(scale: float) -> str:
    return f"{scale:g}" if 1 <= scale <= 2**20 else f"2^{round(np.log2(scale))}"
