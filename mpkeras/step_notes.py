"""What Python sees of a step between `scale_loss` and `apply`, kept by thread and optimizer."""

import threading
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


# By thread, as TensorFlow traces each replica of a `MirroredStrategy` in a thread of its own; outside the
# optimizer, as a thread-local attribute could be neither copied nor pickled.
_notes = threading.local()


def step_notes(optimizer) -> StepNotes:
    """Returns the notes of `optimizer` in this thread."""
    if not hasattr(_notes, "by_optimizer"):
        _notes.by_optimizer = weakref.WeakKeyDictionary()
    return _notes.by_optimizer.setdefault(optimizer, StepNotes())
