"""What Python sees of a step between `scale_loss` and `apply`, kept by thread and optimizer."""

import contextlib
import copy
import threading
import warnings
import weakref


class StepNotes:
    """What Python saw since the last `apply`: was the loss scaled, is it finite, are gradients unscaled."""

    def __init__(self):
        self.loss_was_scaled = False
        # A traced `scale_loss` runs again and again without Python seeing it.
        self.loss_was_scaled_in_trace = False
        self.grads_are_unscaled = False
        # Set by the guarded train step, which knows where a step begins.
        self.in_guarded_step = False
        self.loss_flags = []
        # The scale of this step, where another optimizer may move it before `apply`.
        self.loss_scale = None
        # Where the guarded train step wants to show them: the norm of the gradients and the share of zeros.
        self.wants_statistics = False
        self.statistics = None


# By thread, as TensorFlow traces each replica of a `MirroredStrategy` in a thread of its own; outside the
# optimizer, as a thread-local attribute could be neither copied nor pickled.
_notes = threading.local()


@contextlib.contextmanager
def updating():
    """Marks what runs in it, in this thread, as an update of weights by an optimizer."""
    _notes.updates = getattr(_notes, "updates", 0) + 1
    try:
        yield
    finally:
        _notes.updates -= 1


def is_updating() -> bool:
    """Whether an optimizer is at work in this thread, and not a layer."""
    return getattr(_notes, "updates", 0) > 0


def step_notes(optimizer) -> StepNotes:
    """Returns the notes of `optimizer` in this thread."""
    if not hasattr(_notes, "by_optimizer"):
        _notes.by_optimizer = weakref.WeakKeyDictionary()
    return _notes.by_optimizer.setdefault(optimizer, StepNotes())


def take_notes(optimizer) -> StepNotes:
    """Returns what is known of the step that `apply` is about to take, and starts the notes of the next one.

    Warns once for an optimizer when the loss was not scaled: the gradients are then taken as scaled all the
    same, as in Keras, except in a guarded step, where it is certain that they are not.
    """
    notes = step_notes(optimizer)
    taken = copy.copy(notes)
    notes.loss_was_scaled = False
    notes.loss_flags = []
    notes.loss_scale = None
    scaled = taken.loss_was_scaled or taken.loss_was_scaled_in_trace or taken.grads_are_unscaled
    if not scaled and not optimizer.scale_is_one:
        taken.grads_are_unscaled = taken.in_guarded_step
        if optimizer not in _warned:
            _warned.add(optimizer)
            _warn_unscaled_loss(optimizer, taken.in_guarded_step)
    return taken


_warned: weakref.WeakSet = weakref.WeakSet()


def _warn_unscaled_loss(optimizer, in_guarded_step: bool):
    consequence = (
        "its gradients are taken as unscaled, and small ones are lost in float16"
        if in_guarded_step
        else "its gradients are divided by the loss scale all the same"
    )
    warnings.warn(
        f"`{optimizer.name}.apply` was called, but the loss was not scaled since the last step: {consequence}. "
        "Compute the gradients of `optimizer.scale_loss(loss)`.",
        stacklevel=4,
    )
