"""Weights that a layer writes in its forward pass: what they were before, for a skipped step to put back."""

import contextlib

from mpkeras._replaced import replaced_on_all


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

    with replaced_on_all(variables, "assign", watching):
        yield kept
