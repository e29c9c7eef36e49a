"""Changes that callbacks make to a model for one `fit`, taken back when that `fit` ends in whatever way.

Keras calls no `on_train_end` where an exception ends a `fit` (Ctrl-C is one), and tells no callback otherwise. A
prepared model sees the end of its own `fit`. Of any other model the next `fit` takes away what is left.
"""

import functools
from collections.abc import Callable

from mpkeras import _keras, _replaced

# On the model, with which it goes: the functions in it hold the model.
_RECORD = "_mpkeras_for_one_fit"


class _Record:
    """The functions that end what was begun, the oldest first. No list: Keras looks into lists when it saves."""

    def __init__(self):
        self.ends: list[Callable] = []


def begin(model, end: Callable):
    """Lets `end`, a function without arguments that calls `ended`, be called when the `fit` of `model` has ended.

    A callback that sees the end, where nothing is raised, calls it too.
    """
    record = vars(model).setdefault(_RECORD, _Record())
    record.ends.append(end)
    _replaced.replace(model, "fit", _ending_fit(model, model.fit), kind="callback")


def ended(model, end: Callable):
    """Notes that `end` was called; does nothing where that is known."""
    ends = begun(model)
    if end not in ends:
        return
    vars(model)[_RECORD].ends.remove(end)
    if len(ends) == 1:
        del vars(model)[_RECORD]
        _replaced.restore(model, "fit", kind="callback")


def begun(model) -> list[Callable]:
    """Returns what is to be ended, the oldest first."""
    record = vars(model).get(_RECORD)
    return [] if record is None else list(record.ends)


def end_all(model, but=()):
    """Ends what was begun for a `fit` of `model`, the newest first; but for the functions `but`."""
    for end in reversed(begun(model)):
        if end not in but:
            end()


def _ending_fit(model, fit):
    @functools.wraps(fit)
    def end_and_fit(*args, **kwargs):
        # A callback may call `fit` of the model that it is called by.
        if not _keras.is_in_fit(model):
            end_all(model)
        return fit(*args, **kwargs)

    return end_and_fit
