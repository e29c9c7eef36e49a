"""Functions around the `call` of layers, for the length of a context."""

import contextlib

import keras

# They call the layer in them step by step, in loops of the backend: what that returns is no output of its own, and
# nothing can be carried out of there.
STEPPING = (keras.layers.RNN, keras.layers.TimeDistributed)
_MISSING = object()


@contextlib.contextmanager
def wrapped_calls(layers, wrap):
    """Within this context each layer's `call` is `wrap(layer)`, which finds the one before it as `layer.call`."""
    before = []
    try:
        for layer in layers:
            before.append((layer, vars(layer).get("call", _MISSING)))
            # On the instance, and not by `setattr`, which Keras and torch both watch.
            vars(layer)["call"] = wrap(layer)
        yield
    finally:
        for layer, call in before:
            if call is _MISSING:
                vars(layer).pop("call", None)
            else:
                vars(layer)["call"] = call
