"""Products in float8: which layers have them, and the `call` that computes them.

Operands are rounded to e4m3 and gradients to e5m2, each tensor after a multiplication by a power of two that brings its
largest value to the top of the range (Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv:2209.05433). The
products are summed in float32 and returned in bfloat16. A power of two changes no bit but those of the exponent: the
rounding to float8 is the only one, so every backend and device gets the same operands. Outside training each row of the
inputs has a power of its own: a bad row of a batch spoils no other.
"""

import functools
import importlib
import math
import re
from typing import NamedTuple

import keras
from keras import ops

from mpkeras._replaced import replace, replaced_attributes, restore
from mpkeras.policies.heads import has_own_call
from mpkeras.policies.rules import first_match, is_quantized
from mpkeras.policies.survey import Survey

# The layers that multiply their inputs with a kernel in a way that may be done in float8.
_MULTIPLYING = (keras.layers.Dense, keras.layers.EinsumDense)
# Units for products in float8 take sizes that are multiples of it.
_MULTIPLE = 16
# Rules of `keep_16_bits` that go by the place of a layer, and name none.
ENDS = ("first", "last")
# On a `call` of ours, to be known again: the name of the change.
_MARK = "_mpkeras_product"
# The name of the change, a key of `conversion.changes.CHANGES`.
IN_FLOAT8 = "products in float8"

# The part of the active backend: only that may be imported.
_backend = importlib.import_module(f"mpkeras.conversion._{keras.backend.backend()}")


class Labels(NamedTuple):
    """The axes of an `einsum` that is one product of two matrices, by their labels; `"..."` stands for several."""

    # Of each array, in its order.
    inputs: tuple
    kernel: tuple
    outputs: tuple
    rows: tuple  # of inputs and outputs
    summed: tuple  # of inputs and kernel
    columns: tuple  # of kernel and outputs


def has_product(layer) -> bool:
    """Whether `layer` multiplies its inputs with a kernel in a way that may be done in float8."""
    return isinstance(layer, _MULTIPLYING)


def reasons_against(model, policy, dtypes) -> dict:
    """Returns `{id: reason}` of the layers of `model` with a product: why it is not in float8, `None` where it is.

    Args:
        policy: A `Policy` with `float8`.
        dtypes: `{id: dtype}`: what each layer computes in.
    """
    survey = Survey.of(model)
    layers = _in_order(survey)
    multiplying = [layer for layer in layers if has_product(layer) or _has_weights_to_multiply(survey, layer)]
    ends = dict(zip(ENDS, (multiplying[:1], multiplying[-1:]), strict=True))
    reason_by_rule: dict = {}
    for rule in policy.keep_16_bits:
        for layer in ends[rule] if rule in ends else _named(survey, layers, rule):
            reason_by_rule.setdefault(id(layer), rule)
    return {
        id(layer): _reason_against(layer, reason_by_rule.get(id(layer)), dtypes[id(layer)])
        for layer in layers
        if has_product(layer)
    }


def _in_order(survey) -> list:
    """Returns each layer of `model` once, in the order in which they run; without a graph, in that of attributes."""
    layers: dict = {}

    def walk(layer):
        layers.setdefault(id(layer), layer)
        for inner in layer.layers if isinstance(layer, keras.Model) else survey.direct(layer):
            if id(inner) not in layers:
                walk(inner)

    walk(survey.model)
    # What a model holds beside its graph.
    for layer in survey.layers:
        layers.setdefault(id(layer), layer)
    return list(layers.values())


def _has_weights_to_multiply(survey, layer) -> bool:
    """Whether `layer` is a convolution or an embedding: it may be the first or the last of a model."""
    return isinstance(layer, keras.layers.Embedding) or (hasattr(layer, "kernel_size") and not survey.direct(layer))


def _named(survey, layers, rule) -> list:
    """Returns the layers that `rule` names, and those in them."""
    named = [layer for layer in layers if first_match((rule,), layer) is not None]
    return [inner for layer in named for inner in survey.within(layer)]


def _reason_against(layer, rule, dtype) -> str | None:
    if is_quantized(layer):
        return f"it is quantized ({layer.quantization_mode})"
    if dtype != "bfloat16":
        return f"it computes in {dtype}"
    if rule is not None:
        return f"the rule {rule!r} keeps it in 16 bits"
    if has_own_call(layer):
        return f"{type(layer).__name__} has a `call` of its own"
    labels = labels_of(layer)
    if labels is None:
        return f"its equation {layer.equation!r} is not one product of two matrices"
    return _misfit(labels, layer.kernel.shape) if layer.built else None


def _misfit(labels: Labels, shape) -> str | None:
    """Returns what of a kernel of this shape does not fit; `None` if nothing does."""
    sizes = dict(zip(labels.kernel, shape, strict=True))
    rows, columns = (math.prod(sizes[label] for label in side) for side in (labels.summed, labels.columns))
    if rows % _MULTIPLE or columns % _MULTIPLE:
        return f"its kernel is a matrix of {rows} x {columns}, not both multiples of {_MULTIPLE}"
    return None


def labels_of(layer) -> Labels | None:
    """Returns the axes of the product of a `Dense` or `EinsumDense`; `None` where it is no product of two matrices."""
    equation = getattr(layer, "equation", "...x,xy->...y")
    texts = re.split(",|->", equation.replace(" ", ""))
    arrays = inputs, kernel, outputs = [tuple(re.findall(r"\.\.\.|.", text)) for text in texts]
    in_two = all(sum(label in array for array in arrays) == 2 for label in {*inputs, *kernel, *outputs})
    if not in_two or any(len(set(array)) < len(array) for array in arrays):
        return None
    rows, columns = (tuple(label for label in outputs if label in array) for array in (inputs, kernel))
    summed = tuple(label for label in kernel if label in inputs)
    return Labels(inputs, kernel, outputs, rows, summed, columns) if summed and columns else None


def multiply_in_float8(layer):
    """Computes the product of a `Dense` or `EinsumDense`, and those of its derivative, in float8."""
    labels = labels_of(layer)
    if labels is None or product_change(layer) == IN_FLOAT8:
        return
    restore(layer, "call", kind="layer")
    call = layer.call

    @functools.wraps(call)
    def call_in_float8(inputs, training=None):
        # Read once: with LoRA it is a product. The layer may not have been built when its call was replaced.
        kernel = layer.kernel
        # It may have moved to float32 since.
        if layer.compute_dtype != "bfloat16" or _misfit(labels, kernel.shape) is not None:
            return call(inputs, training=training)
        product = functools.partial(_backend.float8_product, training=training not in (None, False))
        outputs = einsum_by_matrices(labels, ops.cast(inputs, layer.compute_dtype), kernel, product)
        if layer.bias is not None:
            outputs = ops.add(outputs, layer.bias)
        return outputs if layer.activation is None else layer.activation(outputs)

    mark_product(call_in_float8, IN_FLOAT8)
    replace(layer, "call", call_in_float8, kind="layer")


def mark_product(call, change: str):
    """Marks what takes the place of the `call` of a layer, to be known again by the name of the change."""
    vars(call)[_MARK] = change


def product_change(layer) -> str | None:
    """Returns which of the changes to its product is in force on `layer`: `IN_FLOAT8`, another's, or none."""
    names = [getattr(entry.given, _MARK, None) for entry in replaced_attributes(layer) if entry.name == "call"]
    return next((name for name in names if name is not None), None)


def multiplies_in_float8(layer) -> bool:
    """Whether a product of `layer` is in float8, by `multiply_in_float8`, and it computes in what that was made for."""
    return layer.compute_dtype == "bfloat16" and product_change(layer) == IN_FLOAT8


def einsum_by_matrices(labels: Labels, inputs, kernel, product):
    """Returns the `einsum` of two tensors, computed as `product(matrix, matrix)`."""
    several = tuple(f"{i}" for i in range(len(inputs.shape) - len(labels.inputs) + 1))

    def axes(names):
        return [axis for name in names for axis in (several if name == "..." else (name,))]

    of_inputs, of_kernel, of_outputs = axes(labels.inputs), axes(labels.kernel), axes(labels.outputs)
    rows, summed, columns = axes(labels.rows), axes(labels.summed), axes(labels.columns)
    sizes = dict(zip(of_inputs, ops.shape(inputs), strict=True)) | dict(zip(of_kernel, kernel.shape, strict=True))
    length = math.prod(sizes[name] for name in summed)
    matrix = ops.reshape(_transposed(inputs, of_inputs, [*rows, *summed]), (-1, length))
    kernel = ops.reshape(_transposed(kernel, of_kernel, [*summed, *columns]), (length, -1))
    outputs = ops.reshape(product(matrix, kernel), [sizes[name] for name in (*rows, *columns)])
    return _transposed(outputs, [*rows, *columns], of_outputs)


def _transposed(tensor, axes_before, axes_after):
    return (
        tensor if axes_before == axes_after else ops.transpose(tensor, [axes_before.index(name) for name in axes_after])
    )
