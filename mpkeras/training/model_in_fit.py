"""A model while `fit` trains it, as callbacks see it that look at its steps."""

from mpkeras import _keras
from mpkeras.training import for_one_fit, guard, retake, training_backend
from mpkeras.training.inventory import moving_variables
from mpkeras.training.validations import not_finite


class ModelInFit:
    """A model in `fit`. Holds nothing but the model: each answer is of now."""

    def __init__(self, model):
        self.model = model

    @property
    def guard(self):
        """The `Guard` around its train step, or `None`."""
        return guard.guard_of(self.model)

    @property
    def optimizers(self) -> list:
        """Its optimizers that check for finite steps; warns where there is none."""
        return guard.scaling_optimizers(self.model)

    @property
    def replicas(self) -> int:
        """How many replicas average their losses together."""
        return training_backend.replicas(self.model)

    @property
    def is_in_fit(self) -> bool:
        """Whether `fit` runs now."""
        return _keras.is_in_fit(self.model)

    @property
    def seen_batch_size(self) -> int | None:
        """The examples in a full batch of the guarded step; `None` where none was seen, or replicas share it."""
        return guard.seen_batch_size(self.model)

    def add_logs(self, *, gradients: bool):
        """Lets the guarded step report loss scale and skipped steps among its logs, and the norm of the gradients."""
        guard.add_logs(self.model, gradients=gradients)

    def trace_again(self):
        """Lets the next step be traced anew, after what it computes has changed."""
        guard.trace_again(self.model)

    def begin(self, leave):
        """Lets `leave`, a function without arguments that calls `ended`, be called when this `fit` has ended."""
        for_one_fit.begin(self.model, leave)

    def ended(self, leave):
        """Notes that `leave` was called."""
        for_one_fit.ended(self.model, leave)

    def moving_variables(self, optimizers) -> list:
        """Returns the variables that a skipped step changes, and those that count updates: single numbers."""
        return moving_variables(optimizers, self.model.metrics)

    def held_state(self, arguments):
        """Returns the `HeldState` between two steps, by what the train function is given before its data."""
        return training_backend.HeldState(self.model, arguments)

    def held_by_variables(self, state=None):
        """Context manager: on JAX the variables hold `state`, which `fit` hands on, instead of their own values."""
        return _keras.held_by_variables(self.model, state)

    @staticmethod
    def takes_batches_again(function) -> bool:
        """Whether a train function may take a batch again, and so is to be given one at a time."""
        return retake.takes_batches_again(function)

    @staticmethod
    def not_finite(logs) -> list:
        """Returns the names of the logs whose values are not finite."""
        return not_finite(logs)
