"""`convert`: the file of a model in, the same model in the dtypes of a policy out, and a report of it."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import keras

from mpkeras.conversion.apply import apply_policy
from mpkeras.policies.registry import get_policy
from mpkeras.seams import ConvertedLayer, ModelView, RuleNames, check_switch, checked_path, dtypes, end_in_float32
from mpkeras.tools.export import files
from mpkeras.tools.shared.report import Figure, Report, make_figure

_NAMES_SHOWN = 4


def convert(source, out, policy, *, format: str | None = None, imports=(), force: bool = False) -> "ConversionReport":
    """Writes the model in a file once more, in the dtypes of a policy, and returns what was done.

    The layers are those that `mpkeras.apply_policy` makes of it; the weights are the same float32 numbers. Under
    `"bfloat16"` they are rounded to the nearest, once, but those of layers that stay in float32: the file is half as
    large, and predicts what the one under `"mixed_bfloat16"` does, which rounds them when it computes. The written
    model holds no optimizer, loss or metrics, so that it loads where mpkeras is not installed; to train it,
    compile it again.

    Args:
        source: A `.keras` or `.h5` file.
        out: Where the result goes: a `.keras`, `.onnx` or `.tflite` file, or a directory for a SavedModel.
        policy: A policy with float32 or bfloat16 variables, or its name. From bfloat16 variables `"float32"` is the
            way back, with the values that they have.
        format: `"keras"`, `"savedmodel"`, `"onnx"` or `"tflite"`; by default what `out` ends in.
        imports: Names of modules that define the model's own classes and functions.
        force: Whether an output that exists is replaced.

    Returns:
        A report: `str()` is a table, `.to_dict()` what JSON can hold, `.plot()` a matplotlib figure.

    Raises:
        ValueError: If an argument does not fit, the file cannot be read, or Keras cannot write the format. A
            file at `out` is then as before.
        TypeError: If `source` or `out` is no path, or another argument is of a wrong type.

    Example:

    >>> from mpkeras.export.convert import convert
    >>> keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)]).save("model.keras")
    >>> report = convert("model.keras", "served.keras", "mixed_bfloat16")
    >>> report.layers_by_dtype()
    {'bfloat16': 1, 'float32': 1}
    >>> keras.saving.load_model("served.keras").layers[0].compute_dtype
    'bfloat16'
    """
    # The checks that need no model come first: loading may take minutes.
    source = checked_path("source", source, "Pass the `.keras` or `.h5` file of a model.")
    out = checked_path("out", out, "Pass the file to write, or the directory of a SavedModel.")
    check_switch("force", force, "Leave it out to keep what is there.")
    chosen = files.choose(out, format)
    custom_objects = files.import_modules(imports)
    policy = get_policy(policy)
    if policy.variable_dtype not in ("float32", dtypes.SMALL_DTYPE):
        raise ValueError(
            "Expected a policy with float32 or bfloat16 variables: no file is made for float64, and the range of "
            f"float16 is too small for weights that are trained on. Received: policy {policy.name!r}. Use "
            "'mixed_float16', 'mixed_bfloat16', 'float32' or, for a file half as large, 'bfloat16'."
        )
    files.check(chosen, policy)
    files.check_place(out, chosen, force)
    model = files.load(source, custom_objects)
    was_compiled = files.is_compiled(source)
    apply_policy(model, policy)
    # As all formats can hold them.
    end_in_float32(model, in_file=True)
    source_bytes = source.stat().st_size  # now: `out` may be the same file
    files.write(model, out, chosen)
    return ConversionReport(model, policy, source, source_bytes, out, chosen.name, was_compiled)


class LayerDtype(NamedTuple):
    """What one layer computes in, and why."""

    path: str
    class_name: str
    compute_dtype: str
    reason: str


def _layer_dtypes(model, policy) -> list[LayerDtype]:
    """Returns what each layer of a converted model computes in; inputs and models, which compute nothing, left out."""
    rules = ModelView(model).rules_met(policy.keep_float32)
    dtypes = []
    for row in ModelView(model).plan(policy):
        layer, reason = row.layer, _reason(row, policy, row.rule in rules)
        if not isinstance(layer, (keras.Model, keras.layers.InputLayer)):
            dtypes.append(LayerDtype(ConvertedLayer(layer).path, type(layer).__name__, layer.compute_dtype, reason))
    return dtypes


def _reason(row, policy, is_by_rule: bool) -> str:
    if row.layer.compute_dtype == policy.compute_dtype:
        return f"policy {policy.name}"
    if ConvertedLayer(row.layer).is_output_cast:
        return "float32 outputs"
    if row.rule is None:
        return "as it was in the file"
    if row.rule in (RuleNames.STATE, RuleNames.REMAT):
        return row.reason
    return f"rule {row.rule}" if is_by_rule else f"no {policy.compute_dtype} kernel for {row.rule} here"


class ConversionReport(Report):
    """What `convert` returns.

    Attributes:
        layers: List of `LayerDtype`.
        parameters_by_dtype: `{dtype: number}` of the weights, in the dtypes that they are stored in.
        inputs, outputs: Dtypes of what the model takes and returns; `None` for a subclassed model, where its
            `call` decides.
        needs_mpkeras: Names of what in a `.keras` file only loads where mpkeras is installed.

    Example:

    >>> from mpkeras.export.convert import convert
    >>> inputs = keras.Input((3,))
    >>> hidden = keras.layers.Dense(4, name="hidden")(inputs)
    >>> keras.Model(inputs, keras.layers.Dense(2)(hidden)).save("model.keras")
    >>> report = convert("model.keras", "model.keras", "mixed_float16", force=True)
    >>> [(layer.path, layer.compute_dtype) for layer in report.layers if layer.path == "hidden"]
    [('hidden', 'float16')]
    >>> report.layers_by_dtype()["float16"]
    1
    """

    def __init__(self, model, policy, source: Path, source_bytes: int, out: Path, format: str, was_compiled: bool):
        self.title = f"{source} under {policy.name}"
        self.policy = policy.name
        self.compute_dtype = policy.compute_dtype
        self.layers = _layer_dtypes(model, policy)
        self.parameters_by_dtype: Counter = Counter()
        for weight in model.weights:
            self.parameters_by_dtype[weight.dtype] += math.prod(weight.shape)
        self.parameters = self.parameters_by_dtype.total()
        graph = ModelView(model).graph
        self.inputs = None if graph is None else [tensor.dtype for tensor in graph.inputs]
        self.outputs = None if graph is None else [tensor.dtype for tensor in graph.outputs]
        self.source, self.source_bytes = source, source_bytes
        self.out, self.out_bytes = out, files.size_of(out)
        self.format = format
        self.was_compiled = was_compiled
        # Its file holds each of its layers, with or without shapes.
        self._is_sequential = isinstance(model, keras.Sequential)
        self.needs_mpkeras = sorted(_names_of_mpkeras(json.loads(model.to_json()))) if format == "keras" else []
        self.backend = keras.backend.backend()

    def layers_by_dtype(self) -> dict:
        """Returns the number of layers by what they compute in."""
        return dict(Counter(layer.compute_dtype for layer in self.layers))

    def table(self) -> tuple[list, list]:
        groups: dict = {}
        for layer in self.layers:
            groups.setdefault((layer.compute_dtype, layer.reason), []).append(layer.path)
        # The policy's own dtype first, its exceptions below.
        ordered = sorted(groups.items(), key=lambda item: (item[0][0] != self.compute_dtype, -len(item[1])))
        rows = [[dtype, str(len(paths)), reason, _shown(paths)] for (dtype, reason), paths in ordered]
        return ["Computes in", "Layers", "Because of", "Which"], rows

    def notes(self) -> list:
        size = f"{_readable(self.source_bytes)} before, {_readable(self.out_bytes)} now"
        parameters = " and ".join(f"{n:,} in {dtype}" for dtype, n in self.parameters_by_dtype.most_common())
        counted = parameters.replace(" in", " parameters in", 1) or "no parameters"
        lines = [f"Written to {self.out} ({self.format}): {counted}, {size}."]
        if self.inputs is None:
            lines.append("Inputs and outputs are what the `call` of the model makes of them.")
            if self.format == "keras" and not self._is_sequential:
                lines.append(
                    "Layers that its class makes without a dtype have the global policy of the program that loads the "
                    f'file, float32 as a rule: call `mpkeras.apply_policy(model, "{self.policy}")` there.'
                )
        else:
            lines.append(f"Inputs are {_joined(self.inputs)}, outputs {_joined(self.outputs)}.")
        if self.was_compiled:
            lines.append("Its optimizer, loss and metrics are not in the result: to train it, compile it again.")
        if self.needs_mpkeras:
            lines.append(f"Loads only where mpkeras is installed, because of: {', '.join(self.needs_mpkeras)}.")
        if self.format == "onnx" and self.compute_dtype in dtypes.SIXTEEN_BIT_DTYPES:
            lines.append(
                "Keras promises ONNX for float32 models. Try what you will run it with: on a CPU "
                "ONNX Runtime 1.31 loads no bfloat16 models, and only some in float16. Or use `--policy float32`."
            )
        return lines

    def to_dict(self) -> dict:
        return {
            "source": str(self.source),
            "source_bytes": self.source_bytes,
            "out": str(self.out),
            "out_bytes": self.out_bytes,
            "format": self.format,
            "policy": self.policy,
            "backend": self.backend,
            "keras": keras.__version__,
            "parameters": self.parameters,
            "parameters_by_dtype": dict(self.parameters_by_dtype),
            "inputs": self.inputs,
            "outputs": self.outputs,
            "layers_by_dtype": self.layers_by_dtype(),
            "layers": [layer._asdict() for layer in self.layers],
            "was_compiled": self.was_compiled,
            "needs_mpkeras": self.needs_mpkeras,
        }

    def plot(self) -> Figure:
        """Returns a figure: a bar for each dtype, as long as it has layers."""
        counts = self.layers_by_dtype()
        figure = make_figure(figsize=(6, 1.2 + 0.5 * len(counts)))
        axes = figure.subplots()
        axes.bar_label(axes.barh(list(counts), list(counts.values())))
        axes.set(title=self.title, xlabel="layers")
        return figure


def _names_of_mpkeras(config) -> set:
    """Returns the classes of mpkeras in what `to_json` of a model says."""
    if isinstance(config, list):
        return set().union(*map(_names_of_mpkeras, config))
    if not isinstance(config, dict):
        return set()
    names = set().union(*map(_names_of_mpkeras, config.values()))
    ours = (str(config.get(key)).partition(mark)[0] for key, mark in (("registered_name", ">"), ("module", ".")))
    return names | {config["class_name"]} if "mpkeras" in ours else names


def _shown(paths) -> str:
    more = len(paths) - _NAMES_SHOWN
    return ", ".join(paths[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _joined(names) -> str:
    return ", ".join(dict.fromkeys(names))


def _readable(size: int) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB"
