"""Heads: the layers that make the outputs of a model, with those behind them that only pass their numbers on."""

import collections
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import keras

from mpkeras import _keras
from mpkeras._replaced import value_below
from mpkeras.policies.reach import Reach

# The rule for them: it goes by the place of a layer in its model, and names no class.
OUTPUTS = "outputs"
# Weights from which the product of a head is worth 16 bits: the head of a vocabulary. In float32 that of GPT-2-small
# would lengthen the shortest step that an H100 can take from 14.2 to 18.0 ms, that of ResNet-50 by 0.05%.
_LARGE = 2**22
# Keras 3.10 does not have it.
_REVERSIBLE = (keras.layers.ReversibleEmbedding,) if hasattr(keras.layers, "ReversibleEmbedding") else ()
# Keras' layers that may be one. A convolution or a recurrent layer at the end of a model is a small share of it.
_OF_VOCABULARIES = (keras.layers.Dense, keras.layers.EinsumDense, *_REVERSIBLE)
# In a `Flow`: what the traced call was given.
GIVEN = "given"
# Keras casts nothing on their way in. They compute in float32, and round what they return to the dtype of their input.
_ROUNDING_AS_THEIR_INPUT = (keras.layers.LayerNormalization, keras.layers.GroupNormalization)
# Methods that train and evaluate with a batch, and others that may compute with more than what the model returns.
_STEPS = ("train_step", "test_step")
_BESIDE_STEPS = ("predict_step", "compute_loss", "compute_metrics")
# They call the layers in them in loops of the backend, out of which no tensor can be carried.
STEPPING = (keras.layers.RNN, keras.layers.TimeDistributed)
# The module of all of Keras' activations.
_ACTIVATIONS = keras.activations.relu.__module__.rpartition(".")[0]


class Heads(NamedTuple):
    """The layers that make the outputs of a model.

    Attributes:
        layers: The layers that are known to.
        unknown: Layers, or the model itself, that return an output from a `call` of their user's: which of the layers
            inside makes it, only a call tells.
        reading: Layers in 16 bits whose `call` makes it with variables, too, behind layers inside in float32: it reads
            them in float32.
        widened: Layers in 16 bits whose results meet those of heads in the arithmetic of a `call`: they return float32.
    """

    layers: Sequence = ()
    unknown: Sequence = ()
    reading: Sequence = ()
    widened: Sequence = ()


NO_HEADS = Heads()


def heads_of(model) -> Heads:
    """Returns the layers that make the outputs of `model`, looked up in its graph; nothing is run.

    An output is followed back through what has no weights (a reshape, an activation, a sum), up to and including the
    layer that multiplies: rounding there could not be undone behind it. Of several such layers behind one output (a
    sum, a concatenation), those count that lead to outputs alone. A normalization that rounds to the dtype of its input
    is a head, and leads on to what makes that. A model inside that returns an output is looked into. The outputs of
    `parts_used_by` count, too: a step of the user's own computes with them.
    """
    search = _Search(model)
    if isinstance(model, keras.Model):
        search.end_at(model)
        if computes_with_parts(model):
            search.end_at_parts(model)
    return search.heads()


def heads_in_flow(layer, flow) -> Heads:
    """Returns the layers inside `layer` that make what its call returns, as `heads_of` does; `flow` is a `Flow`."""
    search = _Search(layer)

    def leads_on(call) -> bool:
        made_by = flow.marked.get(call)
        return made_by is None or (isinstance(made_by, keras.layers.Layer) and search.end_at(made_by))

    follow_back(flow.outputs, flow.given_to, leads_on, flow.passes_on)
    return search.heads()


def used_behind_layers(flow) -> list:
    """Returns what the arithmetic of a call makes outputs of, as `flow` marks it: layers, variables, and `GIVEN`.

    No layer that multiplies is between them and an output.
    """
    makers, _ = _made_by(flow.outputs, flow.given_to, flow.passes_on)
    return [flow.marked[call] for call in makers]


class _Search:
    """Goes from outputs back to the layers that make them."""

    def __init__(self, whole):
        self._whole = whole
        self._layers: dict = {}
        self._unknown: dict = {}

    def heads(self) -> Heads:
        return Heads(list(self._layers.values()), list(self._unknown.values()))

    def end_at(self, layer) -> bool:
        """Notes the layers that make what `layer` returns; returns whether what it is given makes it, too."""
        if isinstance(layer, keras.layers.InputLayer):
            return False
        if isinstance(layer, keras.Model) and not has_own_call(layer):
            return self._end_at_model(layer)
        # What a whole model passes on, its layers make.
        passes_on = layer is not self._whole and passes_numbers_on(layer)
        if has_own_call(layer) and _keras.direct_sublayers(layer) and not passes_on:
            self._unknown[id(layer)] = layer
            return False
        self._layers[id(layer)] = layer
        if isinstance(layer, keras.layers.TimeDistributed):
            self.end_at(layer.layer)
        return passes_on

    def _end_at_model(self, model) -> bool:
        graph = _keras.graph_of(model)
        if graph is not None:
            return self.follow(keras.tree.flatten(_keras.output_structure(graph)))
        if isinstance(model, keras.Sequential):
            # Its graph is made when it is built.
            return all(self._leads_on(layer) for layer in reversed(model.layers))
        self.end_at_parts(model)
        return False

    def _leads_on(self, layer) -> bool:
        """Notes a layer of a graph; returns whether what it is given is followed."""
        passes_on = self.end_at(layer)
        return passes_on or rounds_as_its_input(layer)

    def end_at_parts(self, model):
        for part in parts_used_by(model):
            self.end_at(part)

    def follow(self, outputs) -> bool:
        """Follows symbolic tensors back; returns whether one leads to an input of their graph."""
        leads_to_input = False

        def made(tensors) -> list:
            return [(id(tensor), _keras.made_by(tensor)) for tensor in tensors]

        def leads_on(call) -> bool:
            nonlocal leads_to_input
            operation, _ = call
            leads_to_input |= isinstance(operation, keras.layers.InputLayer)
            return not isinstance(operation, keras.layers.Layer) or self._leads_on(operation)

        given_to = {call: made(tensors) for call, tensors in _keras.calls_behind(outputs).items()}

        def passes_on(call) -> bool:
            operation, _ = call
            # Layers around a model inside have made its inputs.
            is_given = isinstance(operation, keras.layers.InputLayer)
            return not isinstance(operation, keras.layers.Layer) or (not is_given and passes_numbers_on(operation))

        follow_back(made(outputs), given_to, leads_on, passes_on, lambda call: rounds_as_its_input(call[0]))
        return leads_to_input


class Flow(NamedTuple):
    """What the calls of layers and operations in a trace made of what. A tensor is `(name, call that made it)`.

    Attributes:
        outputs: The tensors that the trace returned.
        given_to: The tensors that each call was given, by call. A tensor from outside has a call that is not there.
        marked: Who made what a call returns, by call: a layer, a variable that was read, or `GIVEN`.
    """

    outputs: list
    given_to: dict
    marked: dict

    def passes_on(self, call) -> bool:
        """Whether a call makes no numbers but of those that it is given."""
        made_by = self.marked.get(call)
        return made_by is None or (isinstance(made_by, keras.layers.Layer) and passes_numbers_on(made_by))


def _made_by(outputs, given_to: Mapping, passes_on: Callable) -> tuple[list, list]:
    """Returns the calls that make the numbers of `outputs`, and those behind them that pass these on."""
    makers, passing, waiting, met = [], [], list(outputs), set()
    while waiting:
        _, call = waiting.pop()
        if call in met or call not in given_to:
            continue
        met.add(call)
        if passes_on(call):
            passing.append(call)
            waiting += given_to[call]
        else:
            makers.append(call)
    return makers, passing


def follow_back(
    outputs,
    given_to: Mapping,
    leads_on: Callable,
    passes_on: Callable,
    needs_all: Callable = lambda call: False,
):
    """Goes from `outputs` to the calls that made them, and on to those that made what a call was given.

    A tensor is followed where all of its uses on the way to outputs lead there through calls that are followed, or
    where it is all that an output is made of: a sum leads to each layer of a residual stream, and to none alone.

    Args:
        outputs, given_to: As in a `Flow`.
        leads_on: Function of a call, asked once for each that is met: whether what it was given is followed, too.
        passes_on: Function of a call: whether it makes no numbers but of those that it is given.
        needs_all: Function of a call: whether that is followed whatever else it is used for.
    """
    made_by = [_made_by([output], given_to, passes_on) for output in outputs]
    all_of_an_output = {call for makers, passing in made_by if len(makers) == 1 for call in passing}
    uses = collections.Counter(outputs)
    _, behind = _made_by(outputs, given_to, lambda call: True)
    for call in behind:
        uses.update(given_to[call])
    # How many uses of a tensor lead to outputs alone.
    reached = collections.Counter(outputs)
    waiting, met = list(outputs), set()
    while waiting:
        _, call = waiting.pop()
        if call in met or call not in given_to:
            continue
        met.add(call)
        if leads_on(call):
            follows_all = call in all_of_an_output or needs_all(call)
            reached.update({tensor: uses[tensor] for tensor in given_to[call]} if follows_all else given_to[call])
            waiting += [tensor for tensor in given_to[call] if reached[tensor] == uses[tensor]]


def is_large(layer) -> bool:
    """Whether a head is that of a vocabulary: so large that its product stays in 16 bits, and ends in float32."""
    if isinstance(layer, keras.layers.TimeDistributed):
        return is_large(layer.layer)
    may_be_of_vocabulary = isinstance(layer, _OF_VOCABULARIES) or has_own_call(layer)
    return may_be_of_vocabulary and is_large_together(layer.weights)


def is_large_together(variables) -> bool:
    """Whether `variables` have as many numbers as those of the head of a vocabulary."""
    return sum(math.prod(variable.shape) for variable in variables) >= _LARGE


def is_reversible_embedding(layer) -> bool:
    """Whether `layer` is an `Embedding` that multiplies by its table, too."""
    return isinstance(layer, _REVERSIBLE)


def passes_numbers_on(layer) -> bool:
    """Whether `layer` multiplies with no weights: what it is given makes what it returns."""
    if isinstance(layer, keras.layers.PReLU):
        return True
    makes_none = type(layer).build is keras.layers.Layer.build and not _keras.direct_sublayers(layer)
    return not layer.weights and (layer.built or makes_none)


def rounds_as_its_input(layer) -> bool:
    """Whether a layer that computes in float32 returns 16 bits all the same where it is given 16 bits."""
    # Conversions let Keras cast its inputs, and take that back.
    return isinstance(layer, _ROUNDING_AS_THEIR_INPUT) and not value_below(layer, "autocast")


def parts_used_by(model) -> list:
    """Returns what a model of which `computes_with_parts` is true computes with: models and other layers.

    All that it holds where it has no `call`. A `call` of the user's says which of its layers make an output: beside it
    parts are the layers that the code of a step or a loss names, and that of the `call` does not; and for a step of
    its own all models, which are seldom for the `call` alone. Beside a graph, too.
    """
    graph = _keras.graph_of(model)
    in_graph = () if graph is None else _keras.calls_in(graph)
    beside = [layer for layer in _keras.direct_sublayers(model) if layer not in in_graph]
    if lacks_call(model):
        return beside
    named = Reach(model, *own_methods(model, *_STEPS, *_BESIDE_STEPS))
    named_by_call = Reach(model) if has_own_call(model) else None
    kinds = keras.Model if named_by_call is None or has_own_step(model) else ()
    return [
        layer
        for layer in beside
        if isinstance(layer, kinds)
        or (named.holds(layer) and not (named_by_call is not None and named_by_call.holds(layer)))
    ]


def lacks_call(model) -> bool:
    """Whether the class of `model` has no `call`: only the models in it can be run, as those of many a GAN."""
    return type(model).call is keras.Model.call


def computes_with_parts(model) -> bool:
    """Whether a model has no `call`, or its user's own methods may compute with more than that returns."""
    return lacks_call(model) or bool(own_methods(model, *_STEPS, *_BESIDE_STEPS))


def has_own_call(layer) -> bool:
    """Whether the arithmetic of `layer` is the user's own."""
    return not _keras.is_of_keras(type(layer).call) or isinstance(layer, keras.layers.Lambda)


def casts_inside(layer) -> bool:
    """Whether a layer casts no inputs, so that its `call` casts what layers inside return, to the layer's own dtype."""
    is_own = has_own_call(layer) and not isinstance(layer, keras.Model)
    # Conversions take the cast of others away, and give it back.
    return is_own and not value_below(layer, "autocast") and bool(_keras.direct_sublayers(layer))


def names_with_layers_inside(layer) -> set:
    """Returns the names in the code of a user's own layer with layers inside, and none of another one.

    With "compute_dtype" among them the `call` may cast what these return to the layer's own dtype, with "dtype" to that
    of a tensor.
    """
    is_own = has_own_call(layer) and bool(_keras.direct_sublayers(layer))
    return Reach(layer).names if is_own else set()


def own_functions(layer) -> list[Callable]:
    """Returns the functions of the user's own, or of another library, that a stock layer applies as activations."""
    if has_own_call(layer):
        return []
    given = [value_below(layer, name) for name in ("activation", "recurrent_activation") if hasattr(layer, name)]
    functions = [called_by(function) for function in given if callable(function)]
    return [function for function in functions if not _is_of_keras(function)]


def called_by(function: Callable) -> Callable:
    """Returns the function that partial ones and decorators are around; another is returned as it is."""
    while isinstance(function, functools.partial) or hasattr(function, "__wrapped__"):
        function = function.func if isinstance(function, functools.partial) else function.__wrapped__
    return function


def _is_of_keras(activation) -> bool:
    is_layer = isinstance(activation, keras.layers.Layer)
    return is_layer or (getattr(activation, "__module__", None) or "").startswith(_ACTIVATIONS)


def with_own_code(layer) -> list:
    """Returns those of `layer` and the layers that it runs in loops which compute with code of their user's.

    It is in a `call` of their own, or in a function that they apply.
    """
    run = [layer, *(_keras.flatten_layers(layer) if isinstance(layer, STEPPING) else ())]
    return [part for part in run if has_own_call(part) or own_functions(part)]


def has_own_arithmetic(layer) -> bool:
    """Whether all arithmetic of `layer` is its user's, in a `call` of its own or in the function of an `Activation`."""
    return has_own_call(layer) or (isinstance(layer, keras.layers.Activation) and bool(own_functions(layer)))


def has_own_step(model) -> bool:
    """Whether the `train_step` or the `test_step` of a model is its user's own."""
    return bool(own_methods(model, *_STEPS))


def own_methods(model, *names: str) -> list[str]:
    """Returns those of the methods `names` of `keras.Model` that the class of `model` has of its own."""
    return [name for name in names if getattr(type(model), name) is not getattr(keras.Model, name)]
