"""Rematerialization: which parts of a model the backward pass computes again, and what is put there for it."""

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import NamedTuple

import keras

from mpkeras import _keras
from mpkeras._replaced import replace, restore
from mpkeras.conversion.again import is_computed_again
from mpkeras.conversion.segments import (
    Segments,
    calls_between,
    end_before_last_weights,
    ends_behind,
    ends_of_blocks,
)
from mpkeras.policies.rules import first_match, unmatched_text

# The part of the active backend: only that may be imported.
_backend = importlib.import_module(f"mpkeras.conversion._{keras.backend.backend()}")
# Layers whose output is a product with weights, or comes from a loop of them: a convolution has a `kernel_size`.
_MULTIPLYING = (
    keras.layers.RNN,
    keras.layers.Dense,
    keras.layers.EinsumDense,
    keras.layers.MultiHeadAttention,
    keras.layers.GroupQueryAttention,
)
# Layers with products beside those with weights, as large as a sequence squared or as long as it: to compute them again
# for a whole model at once takes the memory that was to be saved.
_SCORING = (
    keras.layers.MultiHeadAttention,
    keras.layers.GroupQueryAttention,
    keras.layers.Attention,
    keras.layers.AdditiveAttention,
    keras.layers.RNN,
)


class Parts(NamedTuple):
    """The parts of a model that are computed again.

    Attributes:
        ends: `{id of a graph: numbers of its calls}`: behind each of them its graph is cut, and what leaves is kept.
        layers: Layers that are computed again from what they are given.
        keeps_products: Whether products with weights are kept inside of these parts.
    """

    ends: dict[int, set[int]]
    layers: list
    keeps_products: bool


NOTHING = Parts({}, [], False)


def repeated_parts(survey, remat) -> Parts:
    """Returns what of a model is computed again under a policy with this `remat`.

    Where none is found in a model that is not built yet, there is none until it is.

    Raises:
        ValueError: If no blocks are found, or a rule names no layer.
    """
    if remat is None:
        return NOTHING
    try:
        return _parts(survey, remat)
    except ValueError:
        if survey.model.built and all(layer.built for layer in survey.layers):
            raise
        return NOTHING


def check_parts(survey, remat):
    """Raises `ValueError` as `repeated_parts`, and where the backend is known to refuse one of the parts in a step."""
    parts = repeated_parts(survey, remat)
    for layer in parts.layers:
        _backend.check_again([layer])
    for calls in _calls_of_parts(survey, parts):
        layers = [call.operation for call in calls if isinstance(call.operation, keras.layers.Layer)]
        _backend.check_again([inner for layer in layers for inner in survey.within(layer)])


def named_parts(survey, remat) -> list[tuple[str, str]]:
    """Returns the paths of the first and the last layer of each part that is computed again, as `repeated_parts`."""
    parts = repeated_parts(survey, remat)
    named = [(layer.path, layer.path) for layer in parts.layers]
    for calls in _calls_of_parts(survey, parts):
        # Operations of `keras.ops` have no path, and Keras gives none to a layer without a `build` (Dropout, ReLU).
        names = [getattr(call.operation, "path", None) or call.operation.name for call in calls]
        named.append((names[0], names[-1]))
    return named


def _calls_of_parts(survey, parts: Parts):
    """Yields the calls of each part of a graph that is computed again."""
    for graph in _graphs(survey):
        # The last part of a graph keeps everything.
        yield from calls_between(graph, parts.ends.get(id(graph), ()))[:-1]


def _parts(survey, remat) -> Parts:
    if isinstance(remat, str):
        products = remat == "products"
        if products and not _backend.CAN_KEEP_PRODUCTS:
            return Parts(_behind_products(survey), [], False)
        ends, layers = _blocks(survey)
        if products and _backend.JOINS_OPERATIONS and not any(isinstance(layer, _SCORING) for layer in survey.layers):
            # Between products there is nothing but what a compiler joins to one pass: cut once, behind the last block.
            ends = {key: {max(numbers)} for key, numbers in ends.items()}
            if not ends and not layers:
                ends = _cut_once(survey)
        if not ends and not layers:
            raise ValueError(
                "Expected a model with repeated blocks: layers of one class that hold others, or parts of a graph that "
                f"are alike. Received: model '{survey.model.name}', of class {type(survey.model).__name__}, in which "
                "none were found. Name the layers whose outputs are kept: remat=['path:REGEX', layer, ...]."
            )
        return Parts(ends, layers, products)
    layers = _named(survey, remat)
    if not layers:
        raise ValueError(
            f"Expected `remat` to name layers of model '{survey.model.name}', whose outputs are kept. Received: "
            f"remat={remat!r}, which matches none (a cell is part of its RNN). Look at `layer.path`, or use "
            "remat='blocks'."
        )
    in_graphs = {id(layer) for graph in _graphs(survey) for layer in _keras.calls_in(graph)}
    return Parts(
        _ends(survey, lambda graph: ends_behind(graph, layers)), [x for x in layers if id(x) not in in_graphs], False
    )


def _named(survey, rules) -> list:
    in_loops = _in_loops(survey)
    candidates = [layer for layer in survey.layers if id(layer) not in in_loops]
    return [layer for layer in candidates if any(first_match((rule,), layer) is not None for rule in rules)]


def unmatched_parts(survey, remat) -> list[str]:
    """Returns a sentence for each rule in `remat` that names no layer of a built model, as `rules.unmatched` does."""
    rules = () if remat is None or isinstance(remat, str) else remat
    return [unmatched_text(survey, rule, "remat") for rule in rules if not _named(survey, (rule,))]


def _graphs(survey) -> list:
    graphs = [_keras.graph_of(layer) for layer in survey.layers]
    return list({id(graph): graph for graph in graphs if graph is not None}.values())


def _ends(survey, ends_in: Callable) -> dict:
    """Returns `{id of a graph: ends_in(graph)}`, without graphs in which there are none."""
    ends = {id(graph): ends_in(graph) for graph in _graphs(survey)}
    return {key: numbers for key, numbers in ends.items() if numbers}


def _cut_once(survey) -> dict:
    """Returns where graphs without blocks are cut before their last product; not those inside of one that is cut."""
    ends: dict = {}
    inside: set = set()
    for layer in survey.layers:
        graph = _keras.graph_of(layer)
        numbers = set() if graph is None or id(layer) in inside else end_before_last_weights(graph)
        if numbers:
            ends[id(graph)] = numbers
            inside |= {id(inner) for inner in survey.within(layer)}
    return ends


def _behind_products(survey) -> dict:
    layers = []
    for layer in survey.layers:
        inside = survey.within(layer)
        # A block of the user's or a wrapper, whose product is inside, too. The graph of a model is cut in itself.
        multiplies = any(isinstance(x, _MULTIPLYING) or hasattr(x, "kernel_size") for x in inside)
        if multiplies and all(_keras.graph_of(x) is None for x in inside):
            layers.append(layer)
    ends = _ends(survey, lambda graph: ends_behind(graph, layers))
    if not ends:
        raise ValueError(
            "Expected a Functional or Sequential model for remat='products' on TensorFlow, which cannot keep what is "
            f"inside a layer. Received: model '{survey.model.name}', of class {type(survey.model).__name__}. Use "
            "remat='blocks'."
        )
    return ends


def _blocks(survey) -> tuple[dict, list]:
    """Returns where graphs are cut, and which layers are computed again, for `remat="blocks"`: neither, or one."""
    layers = repeated_layers(survey)
    if layers:
        return {}, layers
    return _ends(survey, ends_of_blocks), []


def repeated_layers(survey) -> list:
    """Returns the layers that are blocks: two or more of one class in one layer, which hold layers with weights."""
    layers: dict = {}
    within = _in_loops(survey)
    # Outer layers first.
    for parent in survey.layers:
        groups: dict = {}
        for layer in _children(survey, parent):
            if id(layer) not in within and _is_block(survey, layer):
                groups.setdefault(type(layer), []).append(layer)
        for group in groups.values():
            if len(group) > 1:
                layers |= {id(layer): layer for layer in group}
                within |= {id(inner) for layer in group for inner in survey.within(layer)}
    return list(layers.values())


def _in_loops(survey) -> set:
    """Returns ids of the layers that an RNN runs at each of its steps: the loop is computed again as a whole."""
    return {id(x) for layer in survey.layers if isinstance(layer, keras.layers.RNN) for x in survey.within(layer)[1:]}


def _children(survey, parent) -> list:
    return parent.layers if isinstance(parent, keras.Model) else survey.direct(parent)


def _is_block(survey, layer) -> bool:
    # The layers in an attention layer or an RNN of Keras are its own affair; a model within a model is a block.
    if _keras.is_of_keras(type(layer)) and not isinstance(layer, keras.Model):
        return False
    return any(inner.weights or not inner.built for inner in survey.within(layer)[1:])


def place(survey, parts: Parts):
    """Lets `parts` of a model be computed again, and no others any more."""
    again = functools.partial(_backend.compute_again, keeps_products=parts.keeps_products)
    repeated = {id(layer) for layer in parts.layers}
    for layer in survey.layers:
        restore(layer, "call", kind="again")
        if id(layer) in repeated:
            _compute_layer_again(layer, again)
    for graph in _graphs(survey):
        restore(graph, _keras.RUN_GRAPH, kind="again")
        if id(graph) in parts.ends:
            _run_in_segments(graph, parts.ends[id(graph)], again, survey)


@contextlib.contextmanager
def computed_once(survey, remat):
    """Context manager: nothing of a model under a policy with this `remat` is computed again.

    For a look at what the layers read and return: out of a part that is computed again nothing else can be carried.
    """
    if remat is None:
        yield
        return
    place(survey, NOTHING)
    try:
        yield
    finally:
        place(survey, repeated_parts(survey, remat))


def _compute_layer_again(layer, again: Callable):
    call = layer.call

    @functools.wraps(call)
    def call_again(*args, **kwargs):
        leaves = keras.tree.flatten((args, kwargs))
        is_tensor = [keras.ops.is_tensor(leaf) for leaf in leaves]
        if not is_computed_again(leaves):
            return call(*args, **kwargs)

        def run(tensors):
            tensors_given = iter(tensors)
            filled = [next(tensors_given) if flag else leaf for leaf, flag in zip(leaves, is_tensor, strict=True)]
            inner_args, inner_kwargs = keras.tree.pack_sequence_as((args, kwargs), filled)
            outputs = call(*inner_args, **inner_kwargs)
            if not structure:
                # Without the tensors: torch keeps this function for as long as they are there.
                structure.append(keras.tree.map_structure(lambda leaf: 0, outputs))
            return keras.tree.flatten(outputs)

        structure: list = []
        tensors = [leaf for leaf, flag in zip(leaves, is_tensor, strict=True) if flag]
        outputs = again(run, tensors, [layer])
        return keras.tree.pack_sequence_as(structure[0], outputs)

    replace(layer, "call", call_again, kind="again")


def _run_in_segments(graph, ends, again: Callable, survey):
    stock = getattr(graph, _keras.RUN_GRAPH)
    segments = Segments(graph, ends, survey.within)

    @functools.wraps(stock)
    def run_in_segments(inputs, *args, **kwargs):
        flat = keras.tree.flatten(inputs)
        # Shapes and dtypes are computed by the same method.
        if not is_computed_again(flat) or not all(map(keras.ops.is_tensor, flat)):
            return stock(inputs, *args, **kwargs)
        return segments.run(flat, again, *args, **kwargs)

    replace(graph, _keras.RUN_GRAPH, run_in_segments, kind="again")
