"""A model, looked at once: its layers, which of them each one holds itself, and which make the outputs."""

import functools

from mpkeras import _keras
from mpkeras.policies.heads import Heads, heads_of


class Survey:
    """The layers of a model or a layer as they are now. A decision looks here, and does not ask the model again.

    A survey is renewed where the model is built or grows.

    Attributes:
        model: The model or layer that was looked at.
        layers: All layers in it, each once, the model itself first.
    """

    def __init__(self, model):
        self.model = model
        self.layers = _keras.flatten_layers(model, include_self=True)

    @classmethod
    def of(cls, model) -> "Survey":
        """Returns `model` itself where it is a `Survey` already."""
        return model if isinstance(model, Survey) else cls(model)

    @functools.cached_property
    def heads(self) -> Heads:
        """What `heads_of` returns for the model."""
        return heads_of(self.model)

    # On request: a step of training asks for the layers alone.
    @functools.cached_property
    def _direct(self) -> dict:
        return {id(layer): _keras.direct_sublayers(layer) for layer in self.layers}

    def direct(self, layer) -> list:
        """Returns the layers that `layer` holds itself, not those below them."""
        return self._direct[id(layer)]

    def within(self, layer) -> list:
        """Returns `layer` and all layers below it, each once."""
        inside, waiting = {id(layer): layer}, [layer]
        while waiting:
            for inner in self.direct(waiting.pop()):
                if id(inner) not in inside:
                    inside[id(inner)] = inner
                    waiting.append(inner)
        return list(inside.values())
