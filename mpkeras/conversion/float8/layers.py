"""Products in float8: which layers have them, and the `call` that computes them.

Operands are rounded to e4m3 and gradients to e5m2, each tensor after a multiplication by a power of two that brings its
largest value to the top of the range (Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv:2209.05433). The
products are summed in float32 and returned in bfloat16. A power of two changes no bit but those of the exponent: the
rounding to float8 is the only one, so every backend and device gets the same operands.
"""

import functools
import importlib
import math
import re
from typing import NamedTuple

import keras
from keras import ops

from mpkeras import _keras
from mpkeras._replaced import is_replaced, replace, replaced_attributes
from mpkeras.policies.rules import first_match, has_own_call, is_quantized

# Units for products in float8 take sizes that are multiples of it.
MULTIPLE = 16
# Rules of `keep_16_bits` that go by the place of a layer.
_ENDS = ("first", "last")
# On a `call` of ours, to be known again.
_MARK = "_mpkeras_float8"

# The part of the active backend: only that may be imported.
_backend = importlib.import_module(f"mpkeras.conversion.float8._{keras.backend.backend()}")


class Labels(NamedTuple):
    """The axes of an `einsum` that is one product of two matrices, by their labels; `"..."` stands for several.

    Attributes:
        inputs, kernel, outputs: Those of each array, in its order.
        rows: Those of the inputs that the outputs have.
        summed: Those of the inputs and the kernel.
        columns: Those of the kernel that the outputs have.
    """

    inputs: tuple
    kernel: tuple
    outputs: tuple
    rows: tuple
    summed: tuple
    columns: tuple


def has_product(layer) -> bool:
    """Whether `layer` multiplies its inputs with a kernel in a way that may be done in float8."""
    return isinstance(layer, (keras.layers.Dense, keras.layers.EinsumDense))


def reasons_against(model, policy, dtypes) -> dict:
    """Returns `{id: reason}` of the layers of `model` with a product: why it is not in float8, `None` where it is.

    Args:
        model: A `keras.Model`, built or not.
        policy: A `Policy` with `float8`.
        dtypes: `{id: dtype}`: what each layer computes in.
    """
    layers = in_order(model)
    multiplying = [layer for layer in layers if has_product(layer) or _has_weights_to_multiply(layer)]
    ends = dict(zip(_ENDS, (multiplying[:1], multiplying[-1:]), strict=True))
    kept: dict = {}
    for rule in policy.keep_16_bits:
        for layer in ends[rule] if rule in ends else _named(layers, rule):
            kept.setdefault(id(layer), rule)
    found = {}
    for layer in layers:
        if has_product(layer):
            found[id(layer)] = _reason_against(layer, kept.get(id(layer)), dtypes[id(layer)])
    return found


def named_layers(rules) -> tuple:
    """Returns the rules that name layers, without those that go by their place."""
    return tuple(rule for rule in rules if rule not in _ENDS)


def in_order(model) -> list:
    """Returns the layers of `model`, each once, those of a layer behind it, in the order in which they are run.

    A graph knows that order; in a layer with a `call` of its own it is taken to be that of its attributes.
    """
    found: dict = {}

    def walk(layer):
        found.setdefault(id(layer), layer)
        for inner in layer.layers if isinstance(layer, keras.Model) else _keras.direct_sublayers(layer):
            if id(inner) not in found:
                walk(inner)

    walk(model)
    # What a model holds beside its graph.
    for layer in _keras.flatten_layers(model, include_self=True):
        found.setdefault(id(layer), layer)
    return list(found.values())


def _has_weights_to_multiply(layer) -> bool:
    """Whether `layer` is a convolution or an embedding: it may be the first or the last of a model."""
    return isinstance(layer, keras.layers.Embedding) or (
        hasattr(layer, "kernel_size") and not _keras.direct_sublayers(layer)
    )


def _named(layers, rule) -> list:
    """Returns the layers that `rule` names, and those in them."""
    found = []
    for layer in layers:
        if first_match((rule,), layer) is not None:
            found += _keras.flatten_layers(layer, include_self=True)
    return found


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
    if rows % MULTIPLE or columns % MULTIPLE:
        return f"its kernel is a matrix of {rows} x {columns}, not both multiples of {MULTIPLE}"
    return None


def labels_of(layer) -> Labels | None:
    """Returns the axes of the product of a `Dense` or `EinsumDense`; `None` where it is no product of two matrices."""
    return _split(getattr(layer, "equation", "...x,xy->...y"))


def _split(equation: str) -> Labels | None:
    texts = re.split(",|->", equation.replace(" ", ""))
    arrays = inputs, kernel, outputs = [tuple(re.findall(r"\.\.\.|.", text)) for text in texts]
    in_two = all(sum(label in array for array in arrays) == 2 for label in {*inputs, *kernel, *outputs})
    if not in_two or any(len(set(array)) < len(array) for array in arrays) or "..." in kernel:
        return None
    rows, columns = (tuple(label for label in outputs if label in array) for array in (inputs, kernel))
    summed = tuple(label for label in kernel if label in inputs)
    return Labels(inputs, kernel, outputs, rows, summed, columns) if summed and columns else None


def multiply_in_float8(layer):
    """Lets a `Dense` or `EinsumDense` compute its product, and those of its derivative, in float8."""
    labels = labels_of(layer)
    if labels is None or is_replaced(layer, "call", "layer"):
        return
    call = layer.call

    @functools.wraps(call)
    def call_in_float8(inputs, training=None):
        # It may have moved to float32 since.
        if layer.compute_dtype != "bfloat16":
            return call(inputs, training=training)
        # Read once: with LoRA it is a product. The layer may not have been built when its call was replaced.
        kernel = layer.kernel
        if _misfit(labels, kernel.shape) is not None:
            return call(inputs, training=training)
        outputs = _einsum(labels, ops.cast(inputs, layer.compute_dtype), kernel, training)
        if layer.bias is not None:
            outputs = ops.add(outputs, layer.bias)
        return outputs if layer.activation is None else layer.activation(outputs)

    vars(call_in_float8)[_MARK] = True
    replace(layer, "call", call_in_float8, kind="layer")


def multiplies_in_float8(layer) -> bool:
    """Whether `multiply_in_float8` is in force, and the layer computes in what it was made for."""
    calls = [entry.given for entry in replaced_attributes(layer) if entry.name == "call"]
    return layer.compute_dtype == "bfloat16" and any(hasattr(call, _MARK) for call in calls)


def _einsum(labels: Labels, inputs, kernel, training):
    """Returns the `einsum` of bfloat16 tensors, computed as a product of two float8 matrices."""
    several = tuple(f"{i}" for i in range(len(inputs.shape) - len(labels.inputs) + 1))

    def axes(names):
        return [axis for name in names for axis in (several if name == "..." else (name,))]

    of_inputs, of_kernel, of_outputs = axes(labels.inputs), axes(labels.kernel), axes(labels.outputs)
    rows, summed, columns = axes(labels.rows), axes(labels.summed), axes(labels.columns)
    sizes = dict(zip(of_inputs, ops.shape(inputs), strict=True)) | dict(zip(of_kernel, kernel.shape, strict=True))
    length = math.prod(sizes[name] for name in summed)
    matrix = ops.reshape(_transposed(inputs, of_inputs, [*rows, *summed]), (-1, length))
    kernel = ops.reshape(_transposed(kernel, of_kernel, [*summed, *columns]), (length, -1))
    outputs = _backend.float8_product(matrix, kernel, training not in (None, False))
    outputs = ops.reshape(outputs, [sizes[name] for name in (*rows, *columns)])
    return _transposed(outputs, [*rows, *columns], of_outputs)


def _transposed(tensor, before, after):
    return tensor if before == after else ops.transpose(tensor, [before.index(name) for name in after])
