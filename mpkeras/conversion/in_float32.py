"""A model that computes in float32 for a moment, to be compared with what it is."""

import contextlib

import keras

from mpkeras import _keras
from mpkeras.conversion.changes import CHANGES
from mpkeras.conversion.plan import layers_of
from mpkeras.conversion.undo import recorded
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES
from mpkeras.policies.rules import bound_layers, set_layer_policy


@contextlib.contextmanager
def in_float32(model, but=()):
    """Context manager: all layers of `model` compute in float32, those whose `id` is in `but` as they did.

    Each of those returns float32 to what runs it, but where that computes as it did, too: arithmetic of a layer around
    it, as of attention with dropout, cannot take both.
    """
    put_back = recorded(model)
    try:
        bound = bound_layers(model, "float32")
        layers = layers_of(model)
        kept = [layer for layer in layers if id(layer) in but]
        inside = {id(inner) for layer in kept for inner in _keras.flatten_layers(layer, include_self=False)}
        for layer in layers:
            if id(layer) not in bound and id(layer) not in but:
                set_layer_policy(layer, keras.DTypePolicy("float32"))
        for layer in kept:
            if layer.compute_dtype in SIXTEEN_BIT_DTYPES and id(layer) not in inside:
                CHANGES["outputs in float32"].install(layer)
        # Weights that are stored in bfloat16 are read in float32, too: a policy of Keras' cannot say so.
        with _keras.computing_in_float32():
            yield
    finally:
        put_back()
