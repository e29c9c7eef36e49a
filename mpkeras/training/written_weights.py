"""State that a forward pass writes and Keras does not list as non-trainable: for a skipped step to put back."""

import contextlib

from mpkeras import _keras


def unlisted_states(model) -> list:
    """Returns the states of stateful recurrent layers: variables that no list of Keras' holds."""
    states = [
        state
        for layer in _keras.flatten_layers(model, include_self=True)
        if getattr(layer, "stateful", False)
        for state in _keras.recurrent_states(layer)
    ]
    # Most models have none, and torch asks at every step: only then is it worth to list all variables.
    listed = {id(variable) for variable in model.variables} if states else ()
    return [state for state in states if id(state) not in listed]


@contextlib.contextmanager
def watched_weights(variables, optimizers, old_value):
    """Within this context remembers what a weight was before a layer assigned to it.

    SpectralNormalization writes its normalized kernel in every forward pass of training, a target network follows
    another one. To keep the old values of all weights instead would cost a copy of the model.

    Args:
        variables: Their `assign` is covered on the instance, one cover over the other where a step trains a part
            of the model by a guarded step of its own.
        optimizers: Those whose updates are no writes of a layer.
        old_value: Function from a variable to a copy of its value.

    Yields:
        List of `(variable, copy)`, filled as layers write.
    """
    kept, seen = [], set()

    def watching(variable, assign_below):
        def assign(value):
            # The optimizer's own writes (after a constraint) are skipped or not, never put back.
            is_updating = any(optimizer.facts.is_updating for optimizer in optimizers)
            if id(variable) not in seen and not is_updating:
                seen.add(id(variable))
                kept.append((variable, old_value(variable)))
            return type(variable).assign(variable, value) if assign_below is None else assign_below(value)

        return assign

    below = [variable.__dict__.get("assign") for variable in variables]
    covers = [watching(*pair) for pair in zip(variables, below, strict=True)]
    for variable, cover in zip(variables, covers, strict=True):
        variable.__dict__["assign"] = cover
    try:
        yield kept
    finally:
        for variable, cover, assign_below in zip(variables, covers, below, strict=True):
            if variable.__dict__.get("assign") is not cover:
                # Someone else's by now.
                continue
            if assign_below is None:
                del variable.__dict__["assign"]
            else:
                variable.__dict__["assign"] = assign_below
