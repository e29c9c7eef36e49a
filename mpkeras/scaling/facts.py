"""The facts of a step: what an optimizer knows of the one that is under way, from `scale_loss` to its end."""

import contextlib
import dataclasses
import warnings

import keras
from keras import ops

if keras.backend.backend() == "tensorflow":
    from mpkeras.devices._tensorflow import replica
else:

    def replica() -> int:
        """Returns the number of the replica that this code runs on: elsewhere a step has one."""
        return 0


# How the logs call what `gradient_statistics` returns.
GRADIENT_LOG_NAMES = ("grad_norm", "zero_grad_fraction")

# Where a loss is scaled in a step that carries the variables of its optimizer, in words for messages.
STATELESS_SCOPE = (
    "`keras.StatelessScope(list(zip(optimizer.variables, optimizer_variables)))`, with the `optimizer_variables` that "
    "`stateless_apply` takes"
)


@dataclasses.dataclass
class StepFacts:
    """The facts of one step of one optimizer, on one replica. On JAX the flags are values of the traced step."""

    # Set by whoever runs the step, and the same until its end. `is_nested`: within another guarded step.
    is_guarded: bool = False
    is_nested: bool = False
    # `True`, or a bool scalar tensor: a step on a batch without rows is skipped, whatever it computes.
    batch_has_rows: object = True
    # Whether the step wants `gradient_statistics`; `apply` puts them there.
    wants_statistics: bool = False
    statistics: tuple | None = None
    # Whether `apply` notes in the optimizer's `step_outcome` what it did.
    wants_outcome: bool = False
    # Whether the inner optimizer is at work, and not a layer.
    is_updating: bool = False
    # The facts of all optimizers of the step, and whether this one has scaled a loss in it.
    of_step: list = dataclasses.field(default_factory=list, repr=False, compare=False)
    has_scaled: bool = False

    # Set by `scale_loss` and its kin, for the next `apply`. Of several losses that are scaled before it, as under one
    # persistent tape, each may have an update of its own.
    losses_without_update: int = 0
    loss_flags: list = dataclasses.field(default_factory=list)
    grads_are_unscaled: bool = False
    # The traces in which a loss was scaled and no gradients applied: such a function, once compiled, scales a loss
    # at each call without Python seeing it, and its gradients may be applied anywhere.
    scaling_traces: list = dataclasses.field(default_factory=list)

    def note_scaled_loss(self, traces: list):
        """Notes a scaled loss. `traces` has what this code is traced into, the innermost first; `[]` in eager code."""
        self.losses_without_update += 1
        self.has_scaled = True
        self.grads_are_unscaled = False
        self.scaling_traces += [trace for trace in traces[:1] if trace not in self.scaling_traces]

    def end_update(self, traces: list):
        """Forgets what was of one `apply`, made in `traces`; unscaled gradients stay so for the next one."""
        # A loss that is scaled in the same trace is one of this very step.
        self.scaling_traces = [trace for trace in self.scaling_traces if trace not in traces]
        self.losses_without_update = max(0, self.losses_without_update - 1)
        # In a loop of the user's own, losses without an update of their own are those of summed gradients.
        if not (self.is_guarded and self.losses_without_update):
            self.loss_flags = []


class FactsOfReplicas:
    """The facts of an optimizer's present step, by replica and in whatever thread.

    TensorFlow traces each replica of a `MirroredStrategy` in a thread of its own, and a loop may unscale in one thread
    and apply in another. A copy or a pickle of an optimizer has none: they may hold tensors of a graph.
    """

    def __init__(self):
        self._facts: dict = {}
        self.warned_of_unscaled_loss = False

    def __reduce__(self):
        return FactsOfReplicas, ()

    @property
    def here(self) -> StepFacts:
        return self._facts.setdefault(replica(), StepFacts())

    @here.setter
    def here(self, facts: StepFacts):
        self._facts[replica()] = facts


@contextlib.contextmanager
def opened_step(optimizers, *, batch_has_rows=True, wants_statistics: bool = False, wants_outcome: bool = False):
    """Context manager around a step that mpkeras runs. Yields its facts, one for each of `optimizers`.

    They end with the step, and with an error in it. A step within a step (a part of the model is trained by a guarded
    step of its own) has facts of its own, after which those of the step around hold again.
    """
    if isinstance(batch_has_rows, bool):
        # Where the shape says it, whoever runs the step has acted on it.
        batch_has_rows = True
    around = [optimizer.facts for optimizer in optimizers]
    opened = [
        StepFacts(
            is_guarded=True,
            is_nested=outer.is_guarded,
            batch_has_rows=batch_has_rows,
            wants_statistics=wants_statistics,
            wants_outcome=wants_outcome,
            scaling_traces=outer.scaling_traces,
        )
        for outer in around
    ]
    for optimizer, facts in zip(optimizers, opened, strict=True):
        optimizer.facts, facts.of_step = facts, opened
    try:
        yield opened
    finally:
        for optimizer, facts, outer in zip(optimizers, opened, around, strict=True):
            optimizer.facts = outer if outer.is_guarded else StepFacts(scaling_traces=facts.scaling_traces)


@contextlib.contextmanager
def updating(optimizer):
    """Marks what runs in it as an update of weights by `optimizer`."""
    facts = optimizer.facts
    facts.is_updating = True
    try:
        yield
    finally:
        facts.is_updating = False


@contextlib.contextmanager
def ended_update(optimizer, traces: list):
    """Context manager around `apply`, made in `traces`. Yields a copy of the facts of `optimizer`, and ends its own."""
    facts = optimizer.facts
    try:
        yield dataclasses.replace(facts)
    finally:
        facts.end_update(traces)


def check_loss_was_scaled(optimizer, facts: StepFacts, *, is_stateless=False):
    """Warns, once for an optimizer, where the loss was not scaled since its last step.

    Its gradients are taken as scaled all the same, as in Keras. In a guarded step it is certain that they are not:
    `facts` says so afterwards.

    Args:
        optimizer: The optimizer that is about to take a step.
        facts: What it knows of that step.
        is_stateless: Whether the step carries the optimizer's variables as values, as `stateless_apply` does.
    """
    if facts.losses_without_update or facts.scaling_traces or facts.grads_are_unscaled or optimizer.scale_is_one:
        return
    facts.grads_are_unscaled = facts.is_guarded
    # Two optimizers may train the layers of one model, with one loss.
    scaled_by_others = [] if facts.has_scaled else [other for other in facts.of_step if other.has_scaled]
    if any(other.grads_are_unscaled for other in scaled_by_others):
        return
    if not optimizer.facts_of_replicas.warned_of_unscaled_loss:
        optimizer.facts_of_replicas.warned_of_unscaled_loss = True
        consequence = (
            "its gradients are taken as unscaled, and small ones are lost in float16"
            if facts.is_guarded
            else "its gradients are divided by the loss scale all the same"
        )
        if scaled_by_others:
            remedy = (
                "If they are of the loss that another optimizer of this step has scaled, hand all of its gradients "
                "through the other one's `get_unscaled_gradients`, and apply what that returns. Else compute"
            )
        elif facts.has_scaled:
            remedy = (
                "If they are of a loss that was scaled before that step, hand all of its gradients through "
                "`get_unscaled_gradients` at once, and apply what that returns in parts. Else compute"
            )
        else:
            remedy = "Compute"
        # Outside of the scope a compiled step would go by the scale that there was when it was traced.
        where = f", in {STATELESS_SCOPE}" if is_stateless else ""
        warnings.warn(
            f"`{optimizer.name}.apply` was called, but the loss was not scaled since the last step: {consequence}. "
            f"{remedy} the gradients of `optimizer.scale_loss(loss)`{where}.",
            stacklevel=3,
        )


def gradient_statistics(grads, loss_scale) -> tuple:
    """Returns the global norm of the unscaled gradients and the share of their elements that are zero.

    Of a sparse gradient only the rows that are there count.

    Args:
        grads: List of scaled gradients; `None` entries are left out.
        loss_scale: The scale they are multiplied by, float32 of shape `()`; `None` if they are unscaled.

    Returns:
        Two float32 scalars of shape `()`.
    """
    values = [_real(_dense(grad)) for grad in grads if grad is not None]
    size = sum(ops.cast(ops.size(value), "float32") for value in values)
    zeros = sum(ops.sum(ops.cast(ops.equal(value, 0.0), "float32")) for value in values)
    if loss_scale is not None:
        # Before they are squared: at a scale of 2^15 the squares would overflow float32 early.
        values = [value / loss_scale for value in values]
    norm = ops.sqrt(sum(ops.sum(ops.square(value)) for value in values))
    return norm, zeros / size


def _real(values):
    """Returns the values as float32, complex ones as their absolute values."""
    is_complex = "complex" in keras.backend.standardize_dtype(values.dtype)
    return ops.cast(ops.absolute(values) if is_complex else values, "float32")


def _dense(grad):
    if hasattr(grad, "dense_shape"):  # tf.IndexedSlices
        return grad.values
    if hasattr(grad, "nse"):  # a sparse array of JAX
        return grad.data
    return grad.to_dense() if getattr(grad, "is_sparse", False) else grad
