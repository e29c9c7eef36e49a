"""A model that computes in float32 for a moment, to be compared with what it is."""

import contextlib

import keras

from mpkeras.conversion.plan import layers_of
from mpkeras.conversion.undo import recorded
from mpkeras.policies.rules import bound_layers, set_layer_policy


@contextlib.contextmanager
def in_float32(model, but=()):
    """Context manager: all layers of `model` compute in float32, those whose `id` is in `but` as they did."""
    put_back = recorded(model)
    try:
        bound = bound_layers(model, "float32")
        for layer in layers_of(model):
            if id(layer) not in bound and id(layer) not in but:
                set_layer_policy(layer, keras.DTypePolicy("float32"))
        yield
    finally:
        put_back()
