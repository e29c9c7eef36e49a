"""Functions around the `call` of layers, for the length of a context."""

import contextlib

import keras

from mpkeras.policies.rules import is_quantized

# They call the layer in them step by step, in loops of the backend: what that returns is no output of its own, and
# nothing can be carried out of there.
STEPPING = (keras.layers.RNN, keras.layers.TimeDistributed)
_MISSING = object()


@contextlib.contextmanager
def wrapped_calls(layers, wrap):
    """Within this context each layer computes by `wrap(layer)`, which finds what was before it by `call_of`."""
    before = []
    try:
        for layer in layers:
            name = _name_of_call(layer)
            before.append((layer, name, vars(layer).get(name, _MISSING)))
            # On the instance, and not by `setattr`, which Keras and torch both watch.
            vars(layer)[name] = wrap(layer)
        yield
    finally:
        for layer, name, call in before:
            if call is _MISSING:
                vars(layer).pop(name, None)
            else:
                vars(layer)[name] = call


def call_of(layer):
    """Returns the method by which `layer` computes: a quantized one has another than `call`."""
    return getattr(layer, _name_of_call(layer))


def _name_of_call(layer) -> str:
    return "quantized_call" if is_quantized(layer) else "call"
