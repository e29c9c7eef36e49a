"""State that a forward pass writes and Keras does not list as non-trainable: for a skipped step to put back."""

import contextlib

from mpkeras import _keras_private
from mpkeras.step_notes import is_updating


def unlisted_states(model) -> list:
    """Returns the states of stateful recurrent layers: variables that no list of Keras' holds."""
    states = [
        state
        for layer in _keras_private.flatten_layers(model, include_self=True)
        if getattr(layer, "stateful", False)
        for state in _keras_private.recurrent_states(layer)
    ]
    # Most models have none, and torch asks at every step: only then is it worth to list all variables.
    listed = {id(variable) for variable in model.variables} if states else ()
    return [state for state in states if id(state) not in listed]


@contextlib.contextmanager
def watched_weights(model, old_value):
    """Within this context remembers what a trainable variable was before a layer assigned to it.

    SpectralNormalization writes its normalized kernel in every forward pass of training. To keep the old
    values of all weights instead would cost a copy of the model.

    Args:
        model: Its trainable variables are watched. Their `assign` is covered on the instance.
        old_value: Function from a variable to a copy of its value.

    Yields:
        List of `(variable, copy)`, filled as layers write.
    """
    kept, seen = [], set()

    def watching(variable):
        def assign(value):
            # The optimizer's own writes (after a constraint) are skipped or not, never put back.
            if id(variable) not in seen and not is_updating():
                seen.add(id(variable))
                kept.append((variable, old_value(variable)))
            return type(variable).assign(variable, value)

        return assign

    covered = model.trainable_variables
    for variable in covered:
        variable.__dict__["assign"] = watching(variable)
    try:
        yield kept
    finally:
        for variable in covered:
            variable.__dict__.pop("assign", None)
