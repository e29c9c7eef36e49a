"""Layers that hand numbers of the data on as they are, to layers that read them as names or must see them whole."""

from typing import NamedTuple

import keras

from mpkeras import _keras
from mpkeras._replaced import value_below
from mpkeras.policies.heads import has_own_arithmetic, has_own_call
from mpkeras.policies.rules import DEFAULT_RULES, FOR_THE_DATA, default_rules, layers_to_keep, written
from mpkeras.policies.survey import Survey

# They move or pick numbers, and compute nothing with them. Where Keras has several names for a class it is one class.
MOVING = (
    keras.layers.Concatenate,
    keras.layers.Cropping1D,
    keras.layers.Cropping2D,
    keras.layers.Cropping3D,
    keras.layers.Flatten,
    keras.layers.GlobalMaxPooling1D,
    keras.layers.GlobalMaxPooling2D,
    keras.layers.GlobalMaxPooling3D,
    keras.layers.Identity,
    keras.layers.Masking,
    keras.layers.MaxPooling1D,
    keras.layers.MaxPooling2D,
    keras.layers.MaxPooling3D,
    keras.layers.Maximum,
    keras.layers.Minimum,
    keras.layers.Permute,
    keras.layers.RepeatVector,
    keras.layers.Reshape,
    keras.layers.UpSampling1D,
    keras.layers.UpSampling3D,
    keras.layers.ZeroPadding1D,
    keras.layers.ZeroPadding2D,
    keras.layers.ZeroPadding3D,
)
# Operations of `keras.ops` of which the same holds.
_MOVING_OPERATIONS = frozenset(
    "BroadcastTo Cast Concatenate Copy ExpandDims Flip GetItem Identity Moveaxis Pad Ravel Repeat Reshape Roll Rot90 "
    "Split Squeeze Stack StopGradient Swapaxes Take Tile Transpose Unstack".split()
)
# Their inputs were computed by a layer with weights in most models, or are weighed by them.
_OF_NO_RAW_DATA = ("Softmax",)
# Nothing is taken away from what these add up: where it was computed from the data, to round it loses no more than
# that of any activation does.
_ADDING_UP = (
    "ActivityRegularization",
    *(rule for rule, _ in DEFAULT_RULES if rule.startswith(("Average", "AdaptiveAverage", "GlobalAverage"))),
)
# Of the older versions of Keras not all have each.
_GIVEN_THE_DATA = tuple(getattr(keras.layers, rule) for rule, _ in FOR_THE_DATA if hasattr(keras.layers, rule))


def only_moves(layer) -> bool:
    """Whether a stock layer returns numbers that it was given, and no others but zeros."""
    if isinstance(layer, keras.layers.TimeDistributed):
        return only_moves(layer.layer)
    if isinstance(layer, keras.layers.Activation):
        return layer.activation is keras.activations.linear
    return isinstance(layer, MOVING)


def operation_only_moves(operation) -> bool:
    """Whether an operation in a graph, which is no layer, does the same."""
    return type(operation).__name__ in _MOVING_OPERATIONS


def reads_names(layer) -> bool:
    """Whether `layer` takes numbers for names, and so casts none on the way in: an `Embedding`, or one of a user's."""
    if isinstance(layer, keras.layers.TimeDistributed):
        return reads_names(layer.layer)
    if isinstance(layer, keras.layers.Embedding):
        return True
    is_stock = _keras.is_of_keras(type(layer))
    # Conversions take the cast of layers that read none away, too.
    return not is_stock and not isinstance(layer, keras.Model) and not value_below(layer, "autocast")


def has_own_mask(layer) -> bool:
    """Whether `layer`, with a `call` of its own, makes a mask by its own method, which may compare what it is given."""
    return has_own_call(layer) and not _keras.is_of_keras(type(layer).compute_mask)


def may_hand_on_data(survey, heads) -> set:
    """Returns the `id`s of layers with a `call` of their own that may hand on data: only a call tells.

    They run layers which read names or the data as it comes, as those of the `heads` may with a `call` of their own, or
    nothing but heads; or are themselves given nothing but data in a graph.
    """
    own = [layer for layer in survey.layers if has_own_call(layer)]
    if not own:
        return set()
    readers = {
        id(layer)
        for layer in survey.layers
        if isinstance(layer, _GIVEN_THE_DATA) or reads_names(layer) or has_own_mask(layer)
    }
    readers.update(id(layer) for layer in own if layer in heads)
    around_readers = {id(layer) for layer in own if not readers.isdisjoint(map(id, survey.within(layer)[1:]))}
    around_heads = {id(layer) for layer in own if _only_wraps(survey, layer, heads)}
    return around_readers | around_heads | _walked(survey, {}).given_data


def _only_wraps(survey, layer, heads) -> bool:
    """Whether all that is inside `layer` are layers of the `heads`, wrapped or not."""
    inside = survey.within(layer)[1:]
    return bool(inside) and all(inner in heads for inner in inside if len(survey.within(inner)) == 1)


_WHAT_IS_LOST = "2049 would be 2048 in float16, 257 would be 256 in bfloat16"
# Ways from an input to an end. Names may be computed without weights, from other numbers, too; what is moved, with
# others or without, is as it was; and what is computed without weights from the data alone is still raw.
_NAMES, _MOVED, _ALONE = "names", "moved", "alone"


class _End(NamedTuple):
    """A call in a graph whose inputs are to arrive whole.

    Attributes:
        name: The class of the layer, or the name of the operation.
        what: A clause: who needs them, and for what.
        way: How numbers of the data may have come there, `_NAMES`, `_MOVED` or `_ALONE`.
        needs_all: Whether nothing is gained unless all of its inputs arrive whole.
        is_own: Whether it is a layer with arithmetic of its user's.
    """

    name: str
    what: str
    way: str
    needs_all: bool = False
    is_own: bool = False


class _Step(NamedTuple):
    """One step back in a graph.

    Attributes:
        layer: The layer or operation that handed a tensor on, or `None`.
        reads: The tensors that it was given, each with the calls that lead there; none for an input of the outermost
            model.
    """

    layer: keras.Operation | None
    reads: list[tuple]


def handing_on(model, policy) -> dict:
    """Returns `{id: (layer, class name, reason)}` of layers that stay in float32 for the data that they hand on.

    A layer between an input of a Functional or Sequential model and one that reads names (`Embedding`), that turns
    numbers into whole ones or compares them, that normalizes (`LayerNormalization`), or that a rule keeps in float32
    for the data that it gets, would round that data first; so it would before an operation, which casts nothing. It
    stays in float32 if it only moves numbers, or computes with nothing but the data, without weights of its own, as a
    `Dropout` does; before one that reads names also if it computes with other numbers, too. So does a `Subtract` of
    nothing but the data: what is left of 3001.25 - 3000 is lost in 16 bits; and so does arithmetic of the user's own
    with nothing but the data, without weights or layers in it, as in a `Lambda`: the sine of a time step, too.

    Args:
        model: A `keras.Model` of any kind, or a layer, or a `Survey` of it.
        policy: The `Policy` with the rules.
    """
    survey = Survey.of(model)
    return _walked(survey, _by_rule(survey, policy)).found


def _walked(survey, by_rule) -> "_Walk":
    """Returns a walk through all graphs of a model; `by_rule` is what `_by_rule` returned for it."""
    graphs = [layer for layer in survey.layers if _keras.graph_of(layer) is not None]
    walk = _Walk(by_rule)
    inner = {id(layer) for graph in graphs for layer in survey.within(graph)[1:]}
    # Outer graphs first: what an inner one is given is known there. Calls inside a layer of the user's are its affair.
    for graph in sorted(graphs, key=lambda graph: id(graph) in inner):
        if id(graph) not in walk.seen:
            walk.look_at(graph, ())
    return walk


def _by_rule(survey, policy) -> dict:
    """Returns `{id: rule}` of the layers that a rule keeps in float32 for the sake of what they are given."""
    by_default = {rule for rule, _ in DEFAULT_RULES if hasattr(keras.layers, rule)} - set(_OF_NO_RAW_DATA)
    own_rules = {written(rule) for rule in policy.keep_float32} - set(default_rules())
    return {
        id(layer): rule for layer, rule in layers_to_keep(survey, policy.keep_float32) if rule in by_default | own_rules
    }


class _Walk:
    """Walks back through a graph, and the graphs in it, from each end to the inputs of the outermost one.

    A place in a graph is known by the calls of models that lead to it: a model may be called in several places.
    """

    def __init__(self, by_rule):
        self.found: dict = {}
        # The `id`s of layers with arithmetic of their user's that are given nothing but data, and stay in 16 bits.
        self.given_data: set[int] = set()
        # The `id`s of the models that were looked at.
        self.seen: set[int] = set()
        self._by_rule = by_rule
        # What was found behind each tensor that was asked for, and the `id`s of those that were noted.
        self._steps: dict = {}
        self._noted: set[int] = set()

    def look_at(self, model, calls):
        self.seen.add(id(model))
        for node in _keras.nodes_of(_keras.graph_of(model)):
            layer = node.operation
            if _graph_run_by(layer) is not None:
                self.look_at(_model_run_by(layer), (*calls, node))
                continue
            for end in self._ends(node):
                reaches = [self._reached(tensor, calls, end) is not None for tensor in node.input_tensors]
                if not (all(reaches) if end.needs_all else any(reaches)):
                    continue
                for tensor in node.input_tensors:
                    self._keep_between(tensor, calls, end)
                if end.is_own and not _computes_alone(layer):
                    self.given_data.add(id(layer))
                elif end.is_own:
                    reason = (
                        "it computes with the data alone, by arithmetic of its user's, which may tell close numbers"
                    )
                    self.found.setdefault(id(layer), (layer, end.name, f"{reason}: {_WHAT_IS_LOST}"))
                elif end.way == _NAMES:
                    self._keep(layer, end)

    def _ends(self, node) -> list[_End]:
        layer = node.operation
        name = type(layer).__name__
        if isinstance(layer, keras.layers.Layer) and reads_names(layer):
            return [_End(name, f"layer '{layer.name}' looks up rows by them", _NAMES)]
        if id(layer) in self._by_rule:
            rule, what = self._by_rule[id(layer)], f"layer '{layer.name}' stays in float32 to see them whole"
            return [_End(rule, what, way) for way in ((_MOVED,) if rule in _ADDING_UP else (_MOVED, _ALONE))]
        if isinstance(layer, keras.layers.LayerNormalization):
            # In any dtype it casts nothing on the way in, and centers in float32.
            return [_End(name, f"layer '{layer.name}' normalizes them", way) for way in (_MOVED, _ALONE)]
        if _keras.is_difference(layer):
            # An operand that was computed in 16 bits is rounded anyway.
            return [_End(name, f"'{layer.name}' takes their difference", _NAMES, needs_all=True)]
        takes_floats = any(map(_is_float, node.input_tensors))
        if takes_floats and not any(map(_is_float, node.outputs)):
            return [_End(name, f"'{layer.name}' makes whole numbers of them, or compares them", _NAMES)]
        # Integers are not cast on the way in.
        is_own = takes_floats and isinstance(layer, keras.layers.Layer) and has_own_arithmetic(layer)
        if is_own or (not isinstance(layer, keras.layers.Layer) and not operation_only_moves(layer)):
            what = f"'{layer.name}' computes with them as they are"
            return [_End(name, what, _ALONE, needs_all=True, is_own=is_own)]
        return []

    def _reached(self, tensor, calls, end) -> _Step | None:
        """Returns the step behind a tensor that holds numbers of the data which nothing has weighed, else `None`."""
        key = (id(tensor), tuple(map(id, calls)), end.way)
        if key not in self._steps:
            step = self._step_back(tensor, calls, end)
            if step is not None and step.reads:
                reaches = [self._reached(read, around, end) is not None for read, around in step.reads]
                if not (all(reaches) if end.way == _ALONE else any(reaches)):
                    step = None
            self._steps[key] = step
        return self._steps[key]

    def _keep_between(self, tensor, calls, end):
        """Notes the layers that handed on what a tensor holds of the data, on each path."""
        step = self._reached(tensor, calls, end)
        if step is None or id(step) in self._noted:
            return
        self._noted.add(id(step))
        for read, around in step.reads:
            self._keep_between(read, around, end)
        if step.layer is not None:
            self._keep(step.layer, end)

    def _step_back(self, tensor, calls, end) -> _Step | None:
        """Returns what handed a tensor on; `None` where its numbers are no more those of the data."""
        layer, node_index = _keras.made_by(tensor)
        if isinstance(layer, keras.layers.InputLayer):
            if not calls:
                return _Step(None, [])
            *around, call = calls
            inputs = keras.tree.flatten(_keras.input_structure(_graph_run_by(call.operation)))
            tensors_by_input = dict(zip(map(id, inputs), call.input_tensors, strict=False))
            given = tensors_by_input.get(id(tensor))
            if given is None:
                return None
            is_wrapped = _model_run_by(call.operation) is not call.operation
            return _Step(call.operation if is_wrapped else None, [(given, tuple(around))])
        node = _keras.node_of(layer, node_index)
        graph = _graph_run_by(layer)
        if graph is not None:
            outputs = dict(zip(map(id, node.outputs), keras.tree.flatten(_keras.output_structure(graph)), strict=True))
            return _Step(None, [(outputs[id(tensor)], (*calls, node))])
        reads = [(read, calls) for read in node.input_tensors]
        is_passed = not isinstance(layer, keras.layers.Layer) or _passes(layer, end)
        return _Step(layer, reads) if reads and is_passed else None

    def _keep(self, layer, end):
        if _graph_run_by(layer) is not None:
            # `TimeDistributed` casts what it hands on. The layers of a model in it cast for themselves.
            layers = [layer]
        elif isinstance(layer, keras.layers.TimeDistributed):
            # It casts what it hands on, and the layer in it computes in the dtype of this one.
            layers = _keras.flatten_layers(layer, include_self=True)
        else:
            layers = [layer] if isinstance(layer, keras.layers.Layer) and not layer.weights else []
        for inner in layers:
            reason = f"it hands numbers on and {end.what}: {_WHAT_IS_LOST}"
            self.found.setdefault(id(inner), (inner, end.name, reason))


def _model_run_by(operation):
    """Returns the layer whose `call` an operation of a graph runs: that in a `TimeDistributed`, else itself."""
    while isinstance(operation, keras.layers.TimeDistributed):
        operation = operation.layer
    return operation


def _graph_run_by(operation):
    return _keras.graph_of(_model_run_by(operation))


def _passes(layer, end) -> bool:
    """Whether what a layer returns are still numbers of the data."""
    if end.way == _MOVED or only_moves(layer):
        return only_moves(layer)
    # Matrices are multiplied in 16 bits.
    holds_others = isinstance(layer, keras.layers.Attention) or _keras.direct_sublayers(layer)
    return not layer.weights and not (end.way == _ALONE and holds_others)


def _computes_alone(layer) -> bool:
    """Whether `layer` computes without weights, and without layers inside."""
    return not layer.weights and not _keras.direct_sublayers(layer)


def _is_float(tensor) -> bool:
    return "float" in keras.backend.standardize_dtype(tensor.dtype)
