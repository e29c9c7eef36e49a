"""`audit`: the dtypes that each layer of a model computes in, and what looks wrong; no data is needed."""

import dataclasses
from collections import Counter, defaultdict

import keras

from mpkeras.policies.policy import Policy
from mpkeras.seams import ConvertedLayer, ModelView, RuleNames, check_model, checked_count, dtypes, native
from mpkeras.tools.audit import findings as checks
from mpkeras.tools.audit.findings import SEVERITIES, in_order
from mpkeras.tools.audit.travel import TravelInStep, check_travel, travel_in_step
from mpkeras.tools.shared.flops import OPEN_SIZE, Program, forward_pass, size, sums_by_dtype
from mpkeras.tools.shared.report import (
    Figure,
    Report,
    bytes_text,
    computed_again_text,
    float8_text,
    make_figure,
    percent,
)

_UNITS = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"))
# Beyond it a figure is higher than any screen; the smallest are left out.
_BARS = 40
# Of the bytes of weights and outputs: what casts may read and write before it matters.
_MANY_CASTS = 0.1


def audit(
    model, inputs=None, *, batch_size: int = 8, open_size: int = OPEN_SIZE, device: str | None = None
) -> "AuditReport":
    """Returns what each layer of a model computes in, what that covers, and what looks wrong.

    Per layer: compute and variable dtype, parameters, and how much of the FLOPs is in 16 bits, counted in the program
    that the backend makes of a forward pass. No data is needed, and the model stays as it is. Then findings, each with
    a remedy: 16-bit variables and losses, float16 without loss scaling, probability heads in 16 bits, float32 layers
    that cost much, layers that mix dtypes, sizes that are no multiple of 8, and a device on which 16 bits do not pay.
    Only where `inputs` hold whole numbers beyond 16 bits is the model run, once, to name the layers that round them.
    With `device`, of a model on many devices, the training step is compiled too, and what travels between them is
    listed by kind, dtype, bytes and weight; what differs from the policy is a finding.

    Args:
        model: A `keras.Model`, compiled or not. Of one that is not built yet only the layers are known.
        inputs: The inputs of a call of the model: arrays or `keras.KerasTensor`s, of which shapes and dtypes are
            taken, and of arrays whether whole numbers in them would be rounded. Functional and Sequential models say it
            themselves, and a subclassed model knows the shapes it was built with.
        batch_size: At least 1. The batch for which FLOPs and bytes are counted, where the inputs leave it open; on
            many devices the rows of each.
        open_size: At least 1. Likewise for each other size that they leave open, such as the length of a sequence;
            the report says so where it was needed.
        device: With a `keras.distribution` of several devices in force, on JAX, and a compiled model: the accelerator
            for which the training step is compiled, as in `mpkeras.forecast`. It need not be there, and compiling
            takes seconds to minutes. `None`: what travels is not counted, and the notes say so.

    Returns:
        An `AuditReport`: `str()` is a table with the findings under it, `.summary()` the same without the table and the
        notes, `.findings` the findings, `.to_dict()` what JSON can hold, `.plot()` a matplotlib figure.

    Raises:
        TypeError: If `model` is no `keras.Model`.
        ValueError: If `batch_size` or `open_size` is no whole number of at least 1, or `inputs` hold something without
            a shape. If `device` is given and no devices share a batch, the model is not compiled, or no program of its
            step can be made.
        ModuleNotFoundError: If the compiler of `device` is not installed.

    Example:

    >>> with mpkeras.policy_scope("mixed_float16"):
    ...     layers = [keras.Input((8,)), keras.layers.Dense(2, "softmax", name="head")]
    ...     model = keras.Sequential(layers, name="net")
    >>> report = mpkeras.audit(model)
    >>> print(report)
    Audit of 'net' on the ... backend
    ...
    >>> print(report.findings[0])
    warning: net/head: Its activation computes in float16, which the default rule 'activation:softmax' keeps ...
    """
    optimizer = getattr(model, "optimizer", None)
    return audit_with_optimizer(model, optimizer, inputs, batch_size=batch_size, open_size=open_size, device=device)


def audit_with_optimizer(
    model, optimizer, inputs=None, *, batch_size: int = 8, open_size: int = OPEN_SIZE, device: str | None = None
) -> "AuditReport":
    """As `audit`, with the optimizer that the model will be trained by, or `None`."""
    _check_arguments(model, inputs, batch_size, open_size)
    backend = keras.backend.backend()
    # First: it may be refused.
    travel = travel_in_step(model, inputs, batch_size=batch_size, open_size=open_size, device=device)
    forward = forward_pass(model, inputs, batch_size, open_size)
    rows = layer_rows(model, forward)
    findings = [
        *checks.check_variables(model, optimizer),
        *checks.check_optimizer(model, optimizer),
        *checks.check_losses(model),
        *checks.check_trace(forward, rows),
        *checks.check_whole_numbers(model, inputs),
        *checks.check_counted_numbers(forward, rows),
        *checks.check_float32_rules(model, rows),
        *checks.check_missing_kernels(model, rows),
        *checks.check_rounded_outputs(model, rows),
        *checks.check_written_state(model, rows),
        *checks.check_islands(model, rows),
        *checks.check_devices(model, native.probe(backend), backend),
        *checks.check_sizes(rows),
        *check_travel(model, optimizer, travel),
    ]
    view = ModelView(model)
    bytes_by_part, again = view.training_bytes(optimizer), view.computed_again()
    return AuditReport(model.name, backend, rows, in_order(findings), forward, bytes_by_part, again, travel)


def _check_arguments(model, inputs, batch_size, open_size):
    check_model(model)
    checked_count("batch_size", batch_size, "Leave it out for 8.")
    checked_count("open_size", open_size, f"Leave it out for {OPEN_SIZE}.")
    if inputs is None:
        return
    if not keras.tree.flatten(inputs):
        raise ValueError(
            f"Expected at least one array in `inputs`. Received: {inputs!r}. Leave it out where the model says what it "
            "takes."
        )
    for value in keras.tree.flatten(inputs):
        if not (hasattr(value, "shape") and hasattr(value, "dtype")):
            raise ValueError(
                f"Expected `inputs` to be arrays or `keras.KerasTensor`s. Received: {value!r} (of type "
                f"{type(value).__name__}). Pass for example `keras.KerasTensor((None, 28, 28, 1))`."
            )


@dataclasses.dataclass
class LayerRow:
    """One layer, without those in it.

    Attributes:
        rule: The default rule that keeps it in float32, or its class where there is no kernel in 16 bits; `None` for
            most.
        reason: Why it stays in float32; of others what the plan of a conversion says.
        weight_bytes: `{dtype: bytes}` of its own variables; `parameters` numbers.
        flops: `{dtype: FLOPs}` of its products in one forward pass; `None` where it is not known.
        casts: Casts between float dtypes within it; `None` where it is not known.
        output_bytes: `{dtype: bytes}` of what it returns; empty where it is not known, or a layer in it returns it.
        float8: Of a layer with a product, in a model under a policy with float8: "yes", or why it is not in float8.
    """

    layer: keras.layers.Layer
    path: str
    compute_dtype: str
    rule: str | None
    reason: str
    weight_bytes: dict
    parameters: int
    flops: dict | None
    casts: int | None
    output_bytes: dict
    float8: str | None = None

    @property
    def class_name(self) -> str:
        return type(self.layer).__name__

    @property
    def total_flops(self) -> int:
        return sum((self.flops or {}).values())

    @property
    def half_flops(self) -> int:
        return sum(flops for dtype, flops in (self.flops or {}).items() if dtype in dtypes.SIXTEEN_BIT_DTYPES)

    @property
    def is_container(self) -> bool:
        """Whether the layer is a model or an input: it computes nothing itself."""
        return isinstance(self.layer, (keras.Model, keras.layers.InputLayer))

    def to_dict(self) -> dict:
        names = [field.name for field in dataclasses.fields(self) if field.name != "layer"]
        return {"class_name": self.class_name, **{name: getattr(self, name) for name in names}}


def layer_rows(model, forward) -> list:
    """Returns a `LayerRow` for each layer of `model`, in their order."""
    is_traced = forward.program is not None
    program = forward.program or Program()
    flops_of: defaultdict = defaultdict(Counter)
    for product in program.products:
        flops_of[product.owner or 0][product.dtype] += product.flops
    casts_of = Counter(cast.owner or 0 for cast in program.casts)
    rows = []
    by_default = Policy("audit", compute_dtype="bfloat16", variable_dtype="float32", keep_float32=RuleNames.default())
    planned = ModelView(model).plan(by_default, heads=ModelView(model).known_heads())
    in_float8 = ModelView(model).float8_products()
    for index, layer in enumerate(ModelView(model).layers):
        variables = [variable for variable in ConvertedLayer(layer).own_variables if _is_initialized(variable)]
        weight_bytes: Counter = Counter()
        for variable in variables:
            weight_bytes[str(variable.dtype)] += dtypes.bytes_of(variable.shape, str(variable.dtype))
        row = LayerRow(
            layer,
            path=ConvertedLayer(layer).path,
            compute_dtype=layer.compute_dtype,
            rule=planned[index].rule,
            reason=planned[index].reason,
            weight_bytes=dict(weight_bytes),
            parameters=sum(size(variable.shape) for variable in variables),
            flops=dict(flops_of[index]) if is_traced else None,
            casts=casts_of[index] if is_traced else None,
            output_bytes=dict(forward.output_bytes.get(index, {})),
        )
        if id(layer) in in_float8:
            row.float8 = in_float8[id(layer)] or "yes"
        rows.append(row)
    return rows


def rows_to_show(rows) -> list:
    """Returns the rows to print: no inputs, no models, no layers without weights that do as the layer around them."""
    inner_to_outer = {}
    for row in rows:
        if not row.is_container:
            for layer in ConvertedLayer(row.layer).direct:
                inner_to_outer[id(layer)] = row.layer

    def says_something(row):
        if row.parameters or row.total_flops:
            return True
        outer = inner_to_outer.get(id(row.layer))
        return not row.is_container and (outer is None or outer.compute_dtype != row.compute_dtype)

    return [row for row in rows if says_something(row)]


def _is_initialized(variable) -> bool:
    return variable.shape is not None and None not in tuple(variable.shape) and str(variable.dtype) != "string"


class AuditReport(Report):
    """What `audit` returns.

    Attributes:
        layers: List of `LayerRow`, one for each layer.
        findings: List of `Finding`, the worst first.
        flops: `{dtype: FLOPs}` of a forward pass; `None` where it is not known.
        half_share: Share of the FLOPs in 16 bits, from 0 to 1; `None` where it is not known.
        casts: `{(source, target): (casts, elements)}` between float dtypes; `None` where it is not known.
        training_bytes: `{"weights": {dtype: bytes}, "slots": ..., "gradients": ...}`: what training holds beside the
            activations; without `"slots"` where the optimizer is not built.
        input_shapes: The shapes for which this was counted.
        open_size: What was taken for the sizes that the model leaves open besides that of the batch; `None` where it
            leaves none.
        collectives: `[{"kind", "dtype", "bytes", "tensors"}]`: what travels between devices in a training step, bytes
            on one device, `tensors` by the path of the weight (`""`: of none); `None` where it was not counted.

    Example:

    >>> report = mpkeras.audit(keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)]), batch_size=4)
    >>> report.flops, report.half_share, report.input_shapes
    ({'float32': 128}, 0.0, [(4, 8)])
    >>> report.to_dict()["weight_bytes"]
    {'float32': 72}
    """

    def __init__(
        self,
        name: str,
        backend: str,
        layers: list,
        findings: list,
        forward,
        training_bytes,
        computed_again,
        travel: TravelInStep,
    ):
        self.title = f"Audit of '{name}' on the {backend} backend"
        self.name = name
        self.backend = backend
        self.layers = layers
        self.findings = findings
        self.input_shapes = forward.input_shapes
        self.open_size = forward.open_size
        self.training_bytes = training_bytes
        self.computed_again = computed_again
        self.collectives = travel.collectives
        self._travel = travel
        self.flops: dict | None = None
        self.half_share: float | None = None
        self.casts: dict | None = None
        if forward.program is not None:
            self.flops = sums_by_dtype(layers, "flops")
            half = sum(row.half_flops for row in layers)
            self.half_share = half / (sum(self.flops.values()) or 1)
            self.casts = {}
            for cast in forward.program.casts:
                number, elements = self.casts.get((cast.source, cast.target), (0, 0))
                self.casts[cast.source, cast.target] = (number + 1, elements + cast.elements)

    def table(self) -> tuple[list, list]:
        header = ["Layer", "Class", "Computes in", "Variables", "Parameters", "FLOPs", "In 16 bits"]
        return header, [self._cells(row) for row in rows_to_show(self.layers)]

    def _cells(self, row) -> list:
        flops = half = "?" if self.flops is None else "-"
        if self.flops and row.total_flops:
            flops = percent(row.total_flops / sum(self.flops.values()))
            half = percent(row.half_flops / row.total_flops)
        variables = ", ".join(row.weight_bytes) or "-"
        return [row.path, row.class_name, row.compute_dtype, variables, f"{row.parameters:,}", flops, half]

    def summary(self) -> str:
        """Returns the short form: how many layers compute in what, the sums, and what is more than a note.

        Example:

        >>> print(mpkeras.audit(keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])).summary())
        Audit of 'sequential...' on the ... backend
        Layers: 1 in float32.
        ...
        Findings: 1 note
        """
        counts = Counter(row.compute_dtype for row in self.layers if not row.is_container)
        layers = ", ".join(f"{n} in {dtype}" for dtype, n in counts.items())
        grave = [str(finding) for finding in self.findings if finding.severity != "note"]
        return "\n".join([self.title, f"Layers: {layers or 'none'}.", *self._sums(), self._found(), *grave])

    def notes(self) -> list:
        return [*self._sums(), "", self._found(), *map(str, self.findings)]

    def _found(self) -> str:
        counts = Counter(finding.severity for finding in self.findings)
        counted = ", ".join(f"{counts[name]} {name}{'s' * (counts[name] > 1)}" for name in SEVERITIES if counts[name])
        return f"Findings: {counted or 'none'}"

    def _sums(self) -> list:
        lines = []
        if self.flops is not None:
            all_flops = sum(self.flops.values())
            shapes = ", ".join(map(str, self.input_shapes))
            line = f"{_large(all_flops)} FLOPs in a forward pass on inputs {shapes}"
            line += f", {percent(self.half_share or 0.0)} in 16 bits."
            if self.open_size is not None:
                line += f" Open sizes were taken as {self.open_size}; `open_size` (`--open-size`) gives another."
            lines.append(line)
            lines.append(f"Casts between float dtypes: {self._casts(self.casts or {})}.")
        asked = [(row.path, None if row.float8 == "yes" else row.float8) for row in self.layers if row.float8]
        lines += float8_text(asked) if asked else []
        lines.append(f"Weights: {_by_dtype(sums_by_dtype(self.layers, 'weight_bytes'))}.")
        if "slots" in self.training_bytes:
            slots, gradients = (_by_dtype(self.training_bytes[name]) for name in ("slots", "gradients"))
            lines.append(f"Training holds beside them: {slots} of optimizer state, {gradients} of gradients.")
        lines += computed_again_text(self.computed_again)
        if self.flops is not None:
            lines.append(f"Outputs of layers: {_by_dtype(sums_by_dtype(self.layers, 'output_bytes'))}.")
        return lines + self._travel.lines()

    def _casts(self, casts: dict) -> str:
        if not casts:
            return "none"
        moved = sum(
            dtypes.bytes_of((n,), source) + dtypes.bytes_of((n,), target) for (source, target), (_, n) in casts.items()
        )
        others = sum(sum(sums_by_dtype(self.layers, name).values()) for name in ("weight_bytes", "output_bytes"))
        if moved < _MANY_CASTS * others:
            return "few, which cost little"
        kinds = [f"{n} {source} to {target}" for (source, target), (n, _) in sorted(casts.items())]
        return (
            f"{', '.join(kinds)}; they read and write {bytes_text(moved)}, beside {bytes_text(others)} of weights and "
            "outputs. That matters where steps are not compiled: XLA and `torch.compile` fuse most casts into what "
            "is around them"
        )

    def to_dict(self) -> dict:
        casts = self.casts and [
            {"from": source, "to": target, "casts": n, "elements": elements}
            for (source, target), (n, elements) in sorted(self.casts.items())
        ]
        return {
            "model": self.name,
            "backend": self.backend,
            "input_shapes": [list(shape) for shape in self.input_shapes],
            "open_size": self.open_size,
            "flops": self.flops,
            "half_share": self.half_share,
            "casts": [] if self.casts == {} else casts,
            "weight_bytes": sums_by_dtype(self.layers, "weight_bytes"),
            "training_bytes": self.training_bytes,
            "computed_again": [list(part) for part in self.computed_again],
            "output_bytes": sums_by_dtype(self.layers, "output_bytes"),
            "devices": self._travel.devices,
            "compiled_for": self._travel.compiled_for,
            "collectives": self.collectives,
            "layers": [row.to_dict() for row in self.layers],
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
        }

    def plot(self) -> Figure:
        """Returns a figure: a bar for each layer with FLOPs (without a trace: parameters), coloured by dtype."""
        from matplotlib.patches import Patch

        colours = {"float32": "tab:gray", "bfloat16": "tab:blue", "float16": "tab:green", "float64": "tab:red"}
        is_traced = bool(self.flops)
        bars = [(row.path, row.flops if is_traced else {row.compute_dtype: row.parameters}) for row in self.layers]
        bars = [(path, parts) for path, parts in bars if sum((parts or {}).values())]
        longest = sorted(bars, key=lambda bar: -sum(bar[1].values()))[:_BARS]
        bars = [bar for bar in bars if bar in longest]
        everything = sum(sum(parts.values()) for _, parts in bars) or 1
        figure = make_figure(figsize=(8, 1.4 + 0.3 * max(len(bars), 1)))
        axes = figure.subplots()
        for place, (_, parts) in enumerate(bars):
            left = 0.0
            for dtype, number in parts.items():
                width = 100 * number / everything
                axes.barh(place, width, left=left, color=colours.get(dtype, "tab:orange"))
                left += width
        axes.set_yticks(range(len(bars)), [path for path, _ in bars])
        axes.invert_yaxis()
        axes.set_xlabel("% of the FLOPs of a forward pass" if is_traced else "% of the parameters")
        shown = list(dict.fromkeys(dtype for _, parts in bars for dtype in parts))
        handles = [Patch(color=colours.get(dtype, "tab:orange"), label=dtype) for dtype in shown]
        if handles:
            axes.legend(handles=handles, loc="best")
        half = "" if self.half_share is None else f": {percent(self.half_share)} of the FLOPs in 16 bits"
        axes.set_title(self.name + half)
        return figure


def _large(number: int) -> str:
    for unit, name in _UNITS:
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return f"{number:,}"


def _by_dtype(sizes) -> str:
    return ", ".join(f"{bytes_text(n)} {dtype}" for dtype, n in sizes.items()) or "none"
