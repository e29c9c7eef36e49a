"""`AuditReport`: the table, the sums and the figure of an audit."""

from mpkeras.insight.findings import SEVERITIES
from mpkeras.insight.layer_rows import rows_to_show, total
from mpkeras.insight.report import Report, make_figure, mebibytes, percent
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES, bytes_of

_UNITS = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"))
# Beyond it a figure is higher than any screen; the smallest are left out.
_BARS = 40
# Of the bytes of weights and outputs: what casts may read and write before it matters.
_MANY_CASTS = 0.1


class AuditReport(Report):
    """What `audit` returns.

    Attributes:
        layers: List of `LayerRow`, one for each layer.
        findings: List of `Finding`, the worst first.
        flops: `{dtype: FLOPs}` of a forward pass; `None` where it is not known.
        half_share: Share of the FLOPs in 16 bits, from 0 to 1; `None` where it is not known.
        casts: `{(source, target): (casts, elements)}` between float dtypes; `None` where it is not known.
        input_shapes: The shapes for which this was counted.
        open_size: What was taken for the sizes that the model leaves open besides that of the batch; `None` where it
            leaves none.

    Example:

    >>> report = mpkeras.audit(keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)]), batch_size=4)
    >>> report.flops, report.half_share, report.input_shapes
    ({'float32': 128}, 0.0, [(4, 8)])
    >>> report.to_dict()["weight_bytes"]
    {'float32': 72}
    """

    def __init__(self, name: str, backend: str, layers: list, findings: list, forward):
        self.title = f"Audit of '{name}' on the {backend} backend"
        self.name = name
        self.backend = backend
        self.layers = layers
        self.findings = findings
        self.input_shapes = forward.input_shapes
        self.open_size = forward.open_size
        self.flops: dict | None = None
        self.half_share: float | None = None
        self.casts: dict | None = None
        if forward.program is not None:
            self.flops = total(layers, "flops")
            all_flops = sum(self.flops.values())
            half = sum(self.flops.get(dtype, 0) for dtype in SIXTEEN_BIT_DTYPES)
            self.half_share = half / all_flops if all_flops else 0.0
            casts: dict = {}
            for cast in forward.program.casts:
                number, elements = casts.get((cast.source, cast.target), (0, 0))
                casts[cast.source, cast.target] = (number + 1, elements + cast.elements)
            self.casts = casts

    def table(self):
        header = ["Layer", "Class", "Computes in", "Variables", "Parameters", "FLOPs", "In 16 bits"]
        return header, [self._cells(row) for row in rows_to_show(self.layers)]

    def _cells(self, row) -> list:
        all_flops = sum((self.flops or {}).values())
        if self.flops is None:
            flops = half = "?"
        else:
            flops = percent(row.total_flops / all_flops) if row.total_flops else "-"
            half = percent(row.half_flops / row.total_flops) if row.total_flops else "-"
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
        dtypes = [row.compute_dtype for row in self.layers if not row.is_container]
        counts = [f"{dtypes.count(dtype)} in {dtype}" for dtype in dict.fromkeys(dtypes)]
        grave = [str(finding) for finding in self.findings if finding.severity != "note"]
        lines = [self.title, f"Layers: {', '.join(counts) or 'none'}.", *self._sums(), self._found(), *grave]
        return "\n".join(lines)

    def notes(self) -> list:
        return [*self._sums(), "", self._found(), *map(str, self.findings)]

    def _found(self) -> str:
        counts = {name: sum(finding.severity == name for finding in self.findings) for name in SEVERITIES}
        found = ", ".join(f"{n} {name}{'s' * (n > 1)}" for name, n in counts.items() if n)
        return f"Findings: {found or 'none'}"

    def _sums(self) -> list:
        lines = []
        if self.flops is not None:
            all_flops = sum(self.flops.values())
            shapes = ", ".join(map(str, self.input_shapes))
            line = f"{_large(all_flops)} FLOPs in a forward pass on inputs {shapes}"
            line += f", {percent(self.half_share or 0.0)} in 16 bits."
            if self.open_size is not None:
                line += f" Open sizes were taken as {self.open_size}; `open_size` gives another."
            lines.append(line)
            lines.append(f"Casts between float dtypes: {self._casts(self.casts or {})}.")
        lines.append(f"Weights: {_by_dtype(total(self.layers, 'weight_bytes'))}.")
        if self.flops is not None:
            lines.append(f"Outputs of layers: {_by_dtype(total(self.layers, 'output_bytes'))}.")
        return lines

    def _casts(self, casts: dict) -> str:
        if not casts:
            return "none"
        moved = sum(bytes_of((n,), source) + bytes_of((n,), target) for (source, target), (_, n) in casts.items())
        others = sum(sum(total(self.layers, name).values()) for name in ("weight_bytes", "output_bytes"))
        if moved < _MANY_CASTS * others:
            return "few, which cost little"
        kinds = [f"{n} {source} to {target}" for (source, target), (n, _) in sorted(casts.items())]
        return (
            f"{', '.join(kinds)}; they read and write {mebibytes(moved)}, beside {mebibytes(others)} of weights and "
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
            "weight_bytes": total(self.layers, "weight_bytes"),
            "output_bytes": total(self.layers, "output_bytes"),
            "layers": [row.to_dict() for row in self.layers],
            "findings": [
                {name: getattr(finding, name) for name in ("severity", "layer", "what", "remedy")}
                for finding in self.findings
            ],
        }

    def plot(self):
        """Returns a figure: a bar for each layer with FLOPs (without a trace: parameters), coloured by dtype."""
        from matplotlib.patches import Patch

        colours = {"float32": "tab:gray", "bfloat16": "tab:blue", "float16": "tab:green", "float64": "tab:red"}
        is_traced = bool(self.flops)
        bars = [(row.path, row.flops if is_traced else {row.compute_dtype: row.parameters}) for row in self.layers]
        bars = [(path, parts) for path, parts in bars if sum((parts or {}).values())]
        kept = sorted(bars, key=lambda bar: -sum(bar[1].values()))[:_BARS]
        bars = [bar for bar in bars if bar in kept]
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
        dtypes = list(dict.fromkeys(dtype for _, parts in bars for dtype in parts))
        handles = [Patch(color=colours.get(dtype, "tab:orange"), label=dtype) for dtype in dtypes]
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
    return ", ".join(f"{mebibytes(n)} {dtype}" for dtype, n in sizes.items()) or "none"
