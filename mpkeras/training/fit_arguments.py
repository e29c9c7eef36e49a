"""The arguments of a model's `fit`, `evaluate` or `predict`, which may be the user's own, the callbacks above all."""

import contextlib
import inspect

import keras


def _place_of(argument: str, function, name: str):
    """Returns `(position, may be by place)` of an argument of a user's or Keras' `fit`, `evaluate` or `predict`."""
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if argument not in parameters and takes_any:
        # A function of the user's that hands on what it is given.
        parameters = inspect.signature(getattr(keras.Model, name).__get__(object())).parameters
    if argument not in parameters:
        return None, False
    is_by_place = parameters[argument].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    return list(parameters).index(argument), is_by_place


def argument_in(argument: str, function, name: str, args, kwargs):
    """Returns what `fit`, `evaluate` or `predict` is given as an argument, such as `callbacks`; `None` for nothing."""
    position, may_be_by_place = _place_of(argument, function, name)
    is_by_place = position is not None and position < len(args) and may_be_by_place
    return args[position] if is_by_place else kwargs.get(argument)


def flat(callbacks) -> list:
    """Returns the callbacks in a list, a nested list or the container of `fit`."""
    is_container = isinstance(callbacks, keras.callbacks.CallbackList)
    listed = callbacks.callbacks if is_container else keras.tree.flatten(callbacks)
    return [callback for callback in listed if callback is not None]


@contextlib.contextmanager
def with_callback(callback, unless, function, name: str, args, kwargs):
    """Yields the arguments of `function` with `callback` among the callbacks, as the last.

    Args:
        unless: A class. With a callback of this class the arguments stay as they are.
        function, name: A model's `fit` or `evaluate`, and which of them it is.
    """
    position, may_be_by_place = _place_of("callbacks", function, name)
    if position is None:
        yield args, kwargs
        return
    callbacks = argument_in("callbacks", function, name, args, kwargs)
    present = flat(callbacks)
    with_it = [*present, callback]
    if any(isinstance(other, unless) for other in present):
        yield args, kwargs
    elif isinstance(callbacks, keras.callbacks.CallbackList):
        callback.set_model(callbacks.model)
        callbacks.callbacks.append(callback)
        try:
            yield args, kwargs
        finally:
            callbacks.callbacks.remove(callback)
    elif position < len(args) and may_be_by_place:
        yield (*args[:position], with_it, *args[position + 1 :]), kwargs
    else:
        yield args, {**kwargs, "callbacks": with_it}
