"""What an optimizer knows of the step that is under way, between `scale_loss` and `apply`."""

import contextlib
import copy
import threading
import warnings
import weakref

import keras

if keras.backend.backend() == "tensorflow":
    from mpkeras.devices._tensorflow import replica
else:

    def replica() -> int:
        """Returns the number of the replica that this code runs on: elsewhere a step has one."""
        return 0


class StepNotes:
    """What was seen since the last `apply`: was the loss scaled, is it finite, are gradients unscaled."""

    def __init__(self):
        self.loss_was_scaled = False
        # The traces in which a loss was scaled and no gradients applied: such a function, once compiled, scales a loss
        # at each call without Python seeing it, and its gradients may be applied anywhere.
        self.scaling_traces = []
        self.grads_are_unscaled = False
        # Set by the guarded train step, which knows where a step begins.
        self.in_guarded_step = False
        self.loss_flags = []
        # `False`, or a bool tensor: a step on a batch without rows is skipped, whatever it computes.
        self.batch_has_rows = True
        # The scale of this step, where another optimizer may move it before `apply`.
        self.loss_scale = None
        # Where the guarded train step wants to show them: the norm of the gradients and the share of zeros.
        self.wants_statistics = False
        self.statistics = None

    def clear(self):
        """Forgets all that is of one step only, as when a guarded step begins and when it ends, in an error, too."""
        self.loss_was_scaled = False
        self.grads_are_unscaled = False
        self.in_guarded_step = False
        self.loss_flags = []
        self.batch_has_rows = True
        self.loss_scale = None
        self.wants_statistics = False

    def note_scaled_loss(self, traces: list):
        """Notes a scaled loss. `traces` are those that this code is part of, the innermost first."""
        self.loss_was_scaled = True
        self.grads_are_unscaled = False
        self.scaling_traces += [trace for trace in traces[:1] if trace not in self.scaling_traces]

    def forget_step(self, traces: list):
        """Ends the step that `traces` are the traces of: what holds for the next one as well stays."""
        # A loss that is scaled in the same trace is one of this very step.
        self.scaling_traces = [trace for trace in self.scaling_traces if trace not in traces]
        self.loss_was_scaled = False
        self.loss_flags = []
        self.loss_scale = None


# By optimizer and replica, in whatever thread: TensorFlow traces each replica of a `MirroredStrategy` in a thread of
# its own, and a loop may unscale in one thread and apply in another. Outside the optimizer, as it may be copied and
# pickled, and what is noted may be a tensor of a graph.
_notes: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()

# Whether this thread is in the update of an optimizer.
_updates = threading.local()


@contextlib.contextmanager
def updating():
    """Marks what runs in it, in this thread, as an update of weights by an optimizer."""
    _updates.depth = getattr(_updates, "depth", 0) + 1
    try:
        yield
    finally:
        _updates.depth -= 1


def is_updating() -> bool:
    """Whether an optimizer is at work in this thread, and not a layer."""
    return getattr(_updates, "depth", 0) > 0


def step_notes(optimizer) -> StepNotes:
    """Returns the notes of `optimizer` on this replica."""
    return _notes.setdefault(optimizer, {}).setdefault(replica(), StepNotes())


@contextlib.contextmanager
def forgotten_if_it_raises(optimizer, traces: list):
    """Context manager around the end of a step: one that raises leaves no notes for the next."""
    try:
        yield
    except Exception:
        step_notes(optimizer).forget_step(traces)
        raise


def take_notes(optimizer, traces: list) -> StepNotes:
    """Returns what is known of the step that `apply` is about to take, and starts the notes of the next one.

    Warns once for an optimizer when the loss was not scaled: the gradients are then taken as scaled all the
    same, as in Keras, except in a guarded step, where it is certain that they are not.

    Args:
        optimizer: The optimizer whose `apply` it is.
        traces: The traces that this code is part of, the innermost first; `[]` in eager code.
    """
    notes = step_notes(optimizer)
    taken = copy.copy(notes)
    if taken.batch_has_rows is not True:
        taken.loss_flags = [*taken.loss_flags, taken.batch_has_rows]
    notes.forget_step(traces)
    scaled = taken.loss_was_scaled or taken.scaling_traces or taken.grads_are_unscaled
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
