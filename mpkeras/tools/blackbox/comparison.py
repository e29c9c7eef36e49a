"""`Comparison`: one step beside the same step in float32, layer by layer."""

import dataclasses
import functools

import numpy as np

from mpkeras.seams import ConvertedLayer, ModelView, dtypes, in_float32
from mpkeras.tools.shared.observation import STEPPING, observe
from mpkeras.tools.shared.report import Figure, Report, listed, make_figure, percent


@dataclasses.dataclass(frozen=True)
class Deviation:
    """How far one call of a layer is from float32, as shares of the largest number in float32; `inf` if not finite.

    Attributes:
        path: `layer.path`.
        compute_dtype: What it computes in.
        outputs, gradients: Of what it returns, and of the loss by that, without the loss scale.
        is_as_it_was: Whether it draws random numbers, which would be others in float32, and was computed in 16 bits
            both times: what it loses by itself is not in its shares.
    """

    path: str
    compute_dtype: str
    outputs: float
    gradients: float
    is_as_it_was: bool


class Comparison(Report):
    """What `Capsule.compare` returns.

    Attributes:
        rows: List of `Deviation`s in the order of data flow.
        bound: The share beyond which a layer has left float32.
        first: The first row whose outputs are beyond it; where there is none, the last one whose gradient is, as
            gradients flow from the end; `None` where there is none either.

    Example:

    >>> import os, tempfile
    >>> with mpkeras.policy_scope("mixed_float16"):
    ...     hidden = keras.layers.Dense(4, kernel_initializer="ones", name="hidden")
    ...     model = keras.Sequential([keras.Input((2,)), hidden, keras.layers.Dense(1)], name="net")
    >>> step = mpkeras.make_train_step(model, "sgd", "mse", jit_compile=False)
    >>> result = step(np.full((4, 2), 6e4), np.ones((4, 1)))
    >>> path = os.path.join(tempfile.mkdtemp(), "failure.mpk")
    >>> size = step.capsule(path)
    >>> mpkeras.load_capsule(path).compare("float32").first.path
    'net/hidden'
    """

    title = "How far each layer is from float32, in the order of data flow"

    def __init__(self, rows, bound: float):
        self.rows = rows
        self.bound = bound
        forward = next((row for row in rows if row.outputs > bound), None)
        self.first = forward or next((row for row in reversed(rows) if row.gradients > bound), None)

    def table(self) -> tuple[list, list]:
        header = ["Layer", "Computes in", "Outputs", "Gradients"]
        return header, [[row.path, row.compute_dtype, _share(row.outputs), _share(row.gradients)] for row in self.rows]

    def notes(self) -> list:
        as_they_were = dict.fromkeys(row.path for row in self.rows if row.is_as_it_was)
        notes = [
            "In 16 bits both times, as other random numbers would be drawn in float32; what they lose by themselves is "
            f"not in the table: {listed(as_they_were)}."
        ] * bool(as_they_were)
        if self.first is None:
            return [f"No {'other ' * bool(notes)}layer is more than {percent(self.bound)} away from float32.", *notes]
        side = "outputs" if self.first.outputs > self.bound else "gradients"
        share = getattr(self.first, side)
        by_share = _share(share) if share == np.inf else f"by {_share(share)}"
        return [f"The first beyond {percent(self.bound)}: the {side} of '{self.first.path}', {by_share}.", *notes]

    def to_dict(self) -> dict:
        def as_json(row):
            # JSON has no word for inf.
            return {key: str(value) if value == np.inf else value for key, value in dataclasses.asdict(row).items()}

        first = None if self.first is None else as_json(self.first)
        return {"bound": self.bound, "first": first, "rows": list(map(as_json, self.rows))}

    def plot(self) -> Figure:
        """Returns a figure: a bar for each layer, of what is not finite to the right edge."""
        figure = make_figure(figsize=(6.4, 1.2 + 0.24 * len(self.rows)))
        axes = figure.subplots()
        for part, offset in (("outputs", -0.2), ("gradients", 0.2)):
            shares = [min(getattr(row, part), 1.0) for row in self.rows]
            axes.barh([i + offset for i in range(len(shares))], shares, 0.4, label=part)
        axes.axvline(self.bound, color="crimson", linewidth=1, label="bound")
        axes.set_yticks(range(len(self.rows)), [row.path for row in self.rows])
        axes.invert_yaxis()
        axes.set_xlabel("largest difference to float32, as a share of the largest number")
        axes.legend()
        return figure


def compare_with(
    dtype, model, x, y, sample_weight, *, loss_scale: float, bound: float, loss_of, paths: dict
) -> Comparison:
    """Returns how far the layers of `model` are from `dtype` on a batch; the other arguments are those of `observe`."""
    if dtype != "float32" or not 0 < bound < np.inf:
        raise ValueError(
            "Expected `dtype` to be 'float32' and `bound` to be a positive share, such as 0.01. Received: "
            f"dtype={dtype!r}, bound={bound!r}. Leave them out for the defaults."
        )
    run = functools.partial(observe, model, x, y, sample_weight, loss_of=loss_of, paths=paths)
    observed = run(loss_scale=loss_scale)
    drawing = _drawing(model)
    with in_float32(model, but=drawing):
        reference = run()
    rows = [
        Deviation(
            call.path,
            call.compute_dtype,
            _deviation(call.outputs, twin.outputs),
            _deviation(call.output_grads, twin.output_grads, loss_scale),
            id(call.layer) in drawing and call.compute_dtype in dtypes.SIXTEEN_BIT_DTYPES,
        )
        for call, twin in zip(observed.calls, reference.calls, strict=True)
    ]
    return Comparison(rows, bound)


def _drawing(model) -> set:
    """Returns the ids of the layers that draw numbers, which would be others in float32, and of those in one loop."""
    names: set = set()
    for layer in ModelView(model).layers:
        # A loop carries a state from the layers in it back to them: all compute in one dtype.
        together = [layer, *ConvertedLayer(layer).inner] if isinstance(layer, STEPPING) else [layer]
        if any(ConvertedLayer(part).draws_numbers for part in together):
            names.update(map(id, together))
    return names


def _deviation(arrays, references, scale: float = 1.0) -> float:
    """Returns the largest difference over the largest number of `references`; 0 where both are not finite alike."""
    shares = [0.0]
    for array, reference in zip(arrays, references, strict=True):
        if array is None or reference is None or not array.size:
            continue
        array, reference = array.astype("float64") / scale, reference.astype("float64")
        known = np.isfinite(reference)
        if not np.isfinite(array[known]).all():
            return np.inf
        largest = np.abs(reference[known]).max(initial=0.0)
        if largest > 0:
            shares.append(float(np.abs(array[known] - reference[known]).max() / largest))
    return max(shares)


def _share(share: float) -> str:
    return "not finite" if share == np.inf else percent(share)
