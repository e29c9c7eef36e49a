"""What a whole model computes in 16 bits between its layers, beside the same in float32."""

import contextlib
import functools
from collections.abc import Iterator
from typing import NamedTuple

import keras

from mpkeras import _keras
from mpkeras._replaced import replaced
from mpkeras.conversion.converted_layer import ConvertedLayer
from mpkeras.conversion.exact_inputs import operation_only_moves
from mpkeras.conversion.plan import layers_of
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES, widen
from mpkeras.policies.heads import has_own_call
from mpkeras.training import training_backend
from mpkeras.training.differences import lost_share


def computes_between_layers(model) -> bool:
    """Whether `model` is one that computes in 16 bits in a `call` of its user's own, or in operations of its graph."""
    if not isinstance(model, keras.Model) or model.compute_dtype not in SIXTEEN_BIT_DTYPES:
        return False
    graph = _keras.graph_of(model)
    return has_own_call(model) or (graph is not None and any(map(_may_lose, _keras.calls_in_order(graph))))


def _may_lose(call) -> bool:
    """Whether a call in a graph is of an operation that may lose more than by rounding once, as a sum of two does."""
    operation = call.operation
    is_layer = isinstance(operation, keras.layers.Layer)
    return not is_layer and not operation_only_moves(operation) and type(operation).__name__ != "Add"


class Stretch(NamedTuple):
    """The tensors that a model has computed between two calls of layers, and for what, as a predicate of the model."""

    purpose: str
    tensors: object


class BetweenLayers:
    """The arithmetic between the layers of a model in one run: that of its `call`, and of operations in its graph.

    Behind the `call` of the model it runs once more, in float32, where each layer returns again what it had returned.
    So both runs compute with the same numbers between any two layers, however far rounding leads in a deep model.
    """

    def __init__(self, model):
        self.model = model
        # Of the first run of the present call, by the calls of layers that the model itself makes.
        self._stretches: list[Stretch] = []
        self._results: list = []
        # The results of layers and the arguments of the model: of no interest where they are handed on.
        self._handed_on: dict = {}
        # How many calls of layers are around the present one; `None` where the `call` of the model does not run.
        self._depth: int | None = None
        # Of the run in float32.
        self._again: list[Stretch] | None = None
        # The purpose of what was lost, and how far that is off.
        self.lost: tuple[str, float] | None = None

    def observers(self) -> Iterator:
        """Yields the context managers in which the model is compared."""
        for layer in layers_of(self.model):
            if layer is not self.model:
                yield replaced(layer, "call", self._noted(layer), kind="observed")
        yield replaced(self.model, "call", self._compared(), kind="observed")

    def _noted(self, layer):
        call, purpose = layer.call, f"gives to layer '{_keras.path_of(layer)}'"

        @functools.wraps(call)
        def noted(*args, **kwargs):
            if self._depth is None or _keras.in_symbolic_scope():
                return call(*args, **kwargs)
            if self._again is not None:
                self._again.append(Stretch(purpose, (args, kwargs)))
                results = training_backend.of_its_own(self._results[len(self._again) - 1])
                return keras.tree.map_structure(widen, results)
            given = None if self._depth else training_backend.of_its_own(self._computed((args, kwargs)))
            self._depth += 1
            try:
                results = call(*args, **kwargs)
            finally:
                self._depth -= 1
            if not self._depth:
                self._stretches.append(Stretch(purpose, given))
                self._results.append(training_backend.of_its_own(results))
                self._hand_on(results)
            return results

        return noted

    def _hand_on(self, tensors):
        self._handed_on |= {id(tensor): tensor for tensor in keras.tree.flatten(tensors)}

    def _computed(self, tensors):
        """Returns `tensors` with `None` for those that were handed on as they are."""
        return keras.tree.map_structure(lambda tensor: None if id(tensor) in self._handed_on else tensor, tensors)

    def _compared(self):
        call = self.model.call

        @functools.wraps(call)
        def compared(*args, **kwargs):
            if self._depth is not None or _keras.in_symbolic_scope():
                return call(*args, **kwargs)
            self._depth, self._stretches, self._results = 0, [], []
            self._hand_on((args, kwargs))
            given = training_backend.of_its_own((args, kwargs))
            states = ConvertedLayer(self.model).states
            try:
                with ConvertedLayer(self.model).noting_added_losses() as added:
                    outputs = call(*args, **kwargs)
                self._stretches += _at_the_end(self._computed(outputs), added)
                # A call that cannot compute in float32, or runs another way each time, has no reference.
                with contextlib.suppress(Exception):
                    self._compare(given, states)
            finally:
                self._depth = self._again = None
            return outputs

        return compared

    def _compare(self, given, states):
        if self.lost is not None or not any(map(_has_tensors, self._stretches)):
            return
        references = self._in_float32(given, states)
        for number, (stretch, reference) in enumerate(zip(self._stretches, references, strict=True)):

            def again(number=number, stretch=stretch):
                return _computed_in(stretch, self._in_float32(given, states)[number])

            share = lost_share(_computed_in(stretch, stretch), _computed_in(stretch, reference), again)
            if share is not None:
                self.lost = stretch.purpose, share
                return

    def _in_float32(self, given, states) -> list[Stretch]:
        self._again = []
        args, kwargs = training_backend.of_its_own(given)
        model = ConvertedLayer(self.model)
        with model.noting_added_losses() as added:
            outputs = model.outputs_in_float32(args, kwargs, in_inference=True, states=states)
        return [*self._again, *_at_the_end(outputs, added)]


def _at_the_end(outputs, added_losses) -> list[Stretch]:
    return [Stretch("returns", outputs), Stretch("adds to the losses", added_losses)]


def _has_tensors(stretch) -> bool:
    return any(map(keras.ops.is_tensor, keras.tree.flatten(stretch.tensors)))


def _computed_in(stretch, reference) -> list:
    """Returns the tensors of `reference`, a run of the same, that were not handed on as they are in `stretch`."""
    if stretch.purpose != reference.purpose:
        raise ValueError("Expected the calls of the layers in the same order.")
    pairs = zip(keras.tree.flatten(stretch.tensors), keras.tree.flatten(reference.tensors), strict=True)
    return [tensor for computed, tensor in pairs if computed is not None]
