"""Products in float8: which layers have them, and the `call` that computes them.

Operands are rounded to e4m3 and gradients to e5m2, each tensor after a multiplication by a power of two that brings its
largest value to the top of the range (Micikevicius et al. 2022, "FP8 Formats for Deep Learning", arXiv:2209.05433). The
products are summed in float32 and returned in bfloat16. A power of two changes no bit but those of the exponent: the
rounding to float8 is the only one, so every backend and device gets the same operands. Outside training each row of the
inputs has a power of its own: a bad row of a batch spoils no other.
"""

import collections
import functools
import importlib
import math
import re
from typing import NamedTuple

import keras
from keras import ops

from mpkeras import _keras
from mpkeras._replaced import replace, replaced_attributes, restore
from mpkeras.conversion.float8_rounding import GRADIENT_DTYPE, OPERAND_DTYPE, factor_by_history, passing_on
from mpkeras.policies.heads import has_own_call
from mpkeras.policies.rules import first_match, is_quantized
from mpkeras.policies.survey import Survey

# The layers that multiply their inputs with a kernel in a way that may be done in float8. Keras gives a float8 state to
# these classes alone, to none of their subclasses.
_MULTIPLYING = (keras.layers.Dense, keras.layers.EinsumDense)
# Units for products in float8 take sizes that are multiples of it.
_MULTIPLE = 16
# Rules of `keep_16_bits` that go by the place of a layer, and name none.
ENDS = ("first", "last")
# On a `call` of ours, to be known again: the name of the change.
_MARK = "_mpkeras_product"
# What Keras' `quantize("float8")` gives a `Dense` or `EinsumDense`: for each operand by what it is divided, and the
# largest magnitudes of past steps.
STATE = tuple(f"{name}_{of}" for name in ("inputs", "kernel", "outputs_grad") for of in ("scale", "amax_history"))
# Names of the changes to a layer, keys of `conversion.changes.CHANGES`. "Given" state is ours to take back; a layer
# that its user quantized, or that was loaded so, has its "own". Where a layer with state does not multiply in float8,
# it is "kept": the optimizer may be built on it.
CURRENT, GIVEN, OWN, KEPT = (
    "products in float8",
    "products in float8 by given state",
    "products in float8 by own state",
    "float8 state kept",
)

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
    kept: dict = {}
    for rule in policy.keep_16_bits:
        for layer in ends[rule] if rule in ends else _named(survey, layers, rule):
            kept.setdefault(id(layer), rule)
    repeated = _run_several_times(survey) if policy.float8 == "delayed" else {}
    found = {}
    for layer in layers:
        if has_product(layer):
            reason = _reason_against(layer, kept.get(id(layer)), dtypes[id(layer)], policy.float8)
            found[id(layer)] = repeated.get(id(layer)) if reason is None else reason
    return found


def changes_in_float8(layers, float8: str, reasons) -> dict:
    """Returns `{id: name}` of the change that each layer with a product is given, by what `reasons_against` returns."""
    found = {}
    for layer in layers:
        if reasons.get(id(layer), "") is None:
            found[id(layer)] = CURRENT if float8 == "current" else OWN if is_quantized(layer) else GIVEN
        elif float8 == "delayed" and layer.quantization_mode == "float8" and type(layer) in _MULTIPLYING:
            found[id(layer)] = KEPT
    return found


def _run_several_times(survey) -> dict:
    """Returns `{id: reason}` of layers whose gradients are sums over several calls: their next state would be a sum."""
    found: dict = {}
    for layer in survey.layers:
        graph = _keras.graph_of(layer)
        calls: dict = collections.Counter() if graph is None else _keras.calls_in(graph)
        loops = isinstance(layer, (keras.layers.RNN, keras.layers.TimeDistributed, keras.layers.Bidirectional))
        for inner, times in calls.items():
            if times > 1:
                reason = f"it is run {times} times in a step, and its state is for one"
                found |= {id(each): reason for each in _keras.flatten_layers(inner, include_self=True)}
        for inner in survey.within(layer)[1:] if loops else ():
            found[id(inner)] = f"{type(layer).__name__} runs it several times in a step, and its state is for one"
    return found


def _in_order(survey) -> list:
    """Returns each layer of `model` once, in the order in which they run; without a graph, in that of attributes."""
    found: dict = {}

    def walk(layer):
        found.setdefault(id(layer), layer)
        for inner in layer.layers if isinstance(layer, keras.Model) else survey.direct(layer):
            if id(inner) not in found:
                walk(inner)

    walk(survey.model)
    # What a model holds beside its graph.
    for layer in survey.layers:
        found.setdefault(id(layer), layer)
    return list(found.values())


def _has_weights_to_multiply(survey, layer) -> bool:
    """Whether `layer` is a convolution or an embedding: it may be the first or the last of a model."""
    return isinstance(layer, keras.layers.Embedding) or (hasattr(layer, "kernel_size") and not survey.direct(layer))


def _named(survey, layers, rule) -> list:
    """Returns the layers that `rule` names, and those in them."""
    named = [layer for layer in layers if first_match((rule,), layer) is not None]
    return [inner for layer in named for inner in survey.within(layer)]


def _reason_against(layer, rule, dtype, float8) -> str | None:
    # A layer that Keras quantized to float8 itself goes on with its state.
    if is_quantized(layer) and (float8, layer.quantization_mode) != ("delayed", "float8"):
        return f"it is quantized ({layer.quantization_mode})"
    if float8 == "delayed" and type(layer) not in _MULTIPLYING:
        return f"Keras gives no float8 state to a {type(layer).__name__}"
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
    if not in_two or any(len(set(array)) < len(array) for array in arrays) or "..." in kernel:
        return None
    rows, columns = (tuple(label for label in outputs if label in array) for array in (inputs, kernel))
    summed = tuple(label for label in kernel if label in inputs)
    return Labels(inputs, kernel, outputs, rows, summed, columns) if summed and columns else None


def multiply_in_float8(layer, change: str = CURRENT):
    """Computes the product of a `Dense` or `EinsumDense`, and those of its derivative, in float8.

    Args:
        layer: The layer. A change that needs a state finds it there, at the latest when the layer is built.
        change: `CURRENT`, `GIVEN`, `OWN` or `KEPT`.
    """
    labels = labels_of(layer)
    # The one that Keras runs of a layer with state.
    attribute = "call" if change == CURRENT else "quantized_call"
    if labels is None or change == _change_of(layer, attribute):
        return
    restore(layer, attribute, kind="layer")
    call = layer.call

    @functools.wraps(call)
    def call_in_float8(inputs, training=None):
        state = [] if change == CURRENT else [_read(getattr(layer, name)) for name in STATE]
        # Read once: with LoRA it is a product. The layer may not have been built when its call was replaced.
        kernel = layer.kernel
        # It may have moved to float32 since.
        if change == KEPT or layer.compute_dtype != "bfloat16" or _misfit(labels, kernel.shape) is not None:
            return passing_on(call(inputs, training=training), state)
        product = functools.partial(_backend.float8_product, training=training not in (None, False), state=state)
        outputs = einsum_by_matrices(labels, ops.cast(inputs, layer.compute_dtype), kernel, product)
        if layer.bias is not None:
            outputs = ops.add(outputs, layer.bias)
        return outputs if layer.activation is None else layer.activation(outputs)

    mark_product(call_in_float8, change)
    replace(layer, attribute, call_in_float8, kind="layer")


def _read(variable):
    # `ops.convert_to_tensor` hands a variable on as it is on TensorFlow.
    return ops.reshape(variable, variable.shape)


def float8_state(layer) -> dict | None:
    """Returns `{name: variable}`, what Keras' float8 keeps in `layer`; `None` if it keeps nothing."""
    found = {name: vars(layer)[name] for name in STATE if name in vars(layer)}
    return found if type(layer) in _MULTIPLYING and len(found) == len(STATE) else None


def float8_factors(layer) -> list | None:
    """Returns what the inputs, the kernel and the gradient are multiplied by in the next step, as floats.

    `None` where each is scaled by itself.
    """
    state = [_read(variable) for variable in (float8_state(layer) or {}).values()]
    if not state or float8_change(layer) not in (GIVEN, OWN):
        return None
    dtypes = (OPERAND_DTYPE, OPERAND_DTYPE, GRADIENT_DTYPE)
    return [float(factor_by_history(state[2 * i : 2 * i + 2], dtype)[0]) for i, dtype in enumerate(dtypes)]


def mark_product(call, change: str):
    """Marks what takes the place of the `call` of a layer, to be known again by the name of the change."""
    vars(call)[_MARK] = change


def product_change(layer) -> str | None:
    """Returns which of the changes to its product is in force on `layer`: one of these, another's, or none."""
    return _change_of(layer, "call") or _change_of(layer, "quantized_call")


def _change_of(layer, attribute: str) -> str | None:
    names = [getattr(entry.given, _MARK, None) for entry in replaced_attributes(layer) if entry.name == attribute]
    return next((name for name in names if name is not None), None)


def float8_change(layer) -> str | None:
    """Returns which of the changes is in force on `layer`: `CURRENT`, `GIVEN`, `OWN`, `KEPT`, or none."""
    change = product_change(layer)
    return change if change in (CURRENT, GIVEN, OWN, KEPT) else None


def multiplies_in_float8(layer) -> bool:
    """Whether a product of `layer` is in float8, by `multiply_in_float8`, and it computes in what that was made for."""
    return layer.compute_dtype == "bfloat16" and float8_change(layer) in (CURRENT, GIVEN, OWN)


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


def _transposed(tensor, before, after):
    return tensor if before == after else ops.transpose(tensor, [before.index(name) for name in after])
