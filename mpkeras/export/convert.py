"""`convert`: the file of a model in, the same model in the dtypes of a policy out."""

from pathlib import Path

from mpkeras.conversion.apply import apply_policy, end_in_float32_layers
from mpkeras.conversion.plan import layers_of
from mpkeras.export import formats, loading
from mpkeras.export.report import ConversionReport
from mpkeras.policies.dtypes import SMALL_DTYPE
from mpkeras.policies.policy import Policy
from mpkeras.policies.registry import get_policy
from mpkeras.policies.rules import set_layer_policy


def convert(source, out, policy, *, format: str | None = None, imports=(), force: bool = False) -> ConversionReport:
    """Writes the model in a file once more, in the dtypes of a policy, and returns what was done.

    The layers are those that `mpkeras.apply_policy` makes of it; the weights are the same float32 numbers. Under
    `"bfloat16"` they are rounded to the nearest, once, but those of layers that stay in float32: the file is half as
    large, and predicts what the one under `"mixed_bfloat16"` does, which rounds them when it computes. What is written
    holds no optimizer, loss or metrics, so that it loads where mpkeras is not installed; to train it,
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
        ValueError: If an argument does not fit, the file cannot be read, or Keras cannot write the format. What
            was at `out` is then as before.

    Example:

    >>> from mpkeras.export.convert import convert
    >>> keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Softmax()]).save("model.keras")
    >>> report = convert("model.keras", "served.keras", "mixed_bfloat16")
    >>> report.layers_by_dtype()
    {'bfloat16': 1, 'float32': 1}
    >>> keras.saving.load_model("served.keras").layers[0].compute_dtype
    'bfloat16'
    """
    # Whatever can be known without the model comes first: loading may take minutes.
    source, out = Path(source), Path(out)
    chosen = formats.choose(out, format)
    custom_objects = loading.import_modules(imports)
    policy = get_policy(policy)
    if policy.variable_dtype not in ("float32", SMALL_DTYPE):
        raise ValueError(
            "Expected a policy with float32 or bfloat16 variables: the range of float16 is too small for weights that "
            f"are trained on. Received: policy {policy.name!r}. Use 'mixed_float16', 'mixed_bfloat16', 'float32' or, "
            "for a file half as large, 'bfloat16'."
        )
    formats.check(chosen, policy)
    formats.check_place(out, chosen, force)
    model = loading.load(source, custom_objects)
    was_compiled = loading.is_compiled(source)
    apply_policy(model, policy)
    end_in_float32_layers(model)
    _give_stock_policies(model)
    source_bytes = source.stat().st_size  # now: `out` may be the same file
    formats.write(model, out, chosen)
    return ConversionReport(
        model,
        policy,
        source=source,
        source_bytes=source_bytes,
        out=out,
        out_bytes=formats.size_of(out),
        format=chosen.name,
        was_compiled=was_compiled,
    )


def _give_stock_policies(model):
    """Exchanges `Policy` objects that the file brought for stock ones: the result then loads without mpkeras."""
    for layer in layers_of(model):
        policy = layer.dtype_policy
        if isinstance(policy, Policy) and policy.stock() is not None:
            set_layer_policy(layer, policy.stock())
