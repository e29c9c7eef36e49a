"""The batches of the last call of a model's train function, kept for whoever wants to look at them again."""

import collections
import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable

import keras


@dataclasses.dataclass(frozen=True)
class Execution:
    """One call of a train function.

    Attributes:
        step: Of its last batch in the epoch, counted from 0.
        logs: What it returned, as tensors that may still be computed.
        read: Returns the batches.
    """

    step: int
    logs: dict
    read: Callable[[], list]

    @functools.cached_property
    def batches(self) -> list:
        """List of what it trained on; empty under a `tf.distribute` strategy with several replicas."""
        return self.read()


class KeptBatches:
    """Keeps what `fit` trains on, a few executions long: references, no copies.

    `fit` asks `model.train_function` anew on every step; there a function stands that reads ahead the batches of one
    execution and hands them on.

    Args:
        around_step: Where given, the steps of an execution run one by one, each in this context manager: it is called
            with the number of the step, the batch and, on JAX, the state that the step is given, and yields a function
            that takes what the step returned.

    Attributes:
        executions: Those that nobody has taken from here yet, the oldest first; no more than two.
        begin: The step with which the next execution begins.
    """

    def __init__(self, around_step: Callable | None = None):
        self.executions: collections.deque[Execution] = collections.deque(maxlen=2)
        self.begin = 0
        self._around_step = around_step

    def attach(self, model):
        """Puts itself in front of the train function that `model` has now, unless it is there."""
        function = model.train_function
        attached = _attached(function)
        if function is None or self in attached:
            return
        steps = model.steps_per_execution
        backend = keras.backend.backend()

        run_several = None
        one_by_one = any(kept._around_step is not None for kept in (self, *attached))
        if backend == "tensorflow" and steps > 1 and not model.run_eagerly and not one_by_one:
            run_several = importlib.import_module("mpkeras.callbacks._tensorflow").SeveralSteps(function, steps)

        @functools.wraps(function)
        def train_function(*args):
            *state, data = args
            batches: list = []
            if backend == "torch":
                # A list of one batch, already read.
                batches = list(data)
            elif run_several is not None and _is_read_by_next(data) and not _is_of_python(data):
                # Of batches that are in Python already Keras would call a graph for each.
                logs, number, read = run_several(data)
                self._add(number, logs, read)
                return logs
            elif _is_read_by_next(data):
                batches = list(itertools.islice(data, steps))
                if not batches:
                    # As Keras' own functions do at the end of the data.
                    raise StopIteration
                data = iter(batches)
            if self._around_step is not None and batches:
                result = self._one_by_one(self._around_step, function, state, batches)
            else:
                result = function(*state, data)
            # On JAX the new state comes back, too.
            logs = result[0] if isinstance(result, tuple) else result
            self._add(max(len(batches), 1), logs, lambda: batches)
            return result

        vars(train_function).update(mpkeras_kept_batches=self, mpkeras_own_function=function)
        model.train_function = train_function

    def _one_by_one(self, around_step, function, state, batches):
        for i, batch in enumerate(batches):
            with around_step(self.begin + i, batch, state) as take:
                # On torch a list of one batch, as Keras hands it over.
                result = function(*state, [batch] if keras.backend.backend() == "torch" else iter([batch]))
                take(result)
            state = list(result[1:]) if isinstance(result, tuple) else state
        return result

    def _add(self, number: int, logs, read):
        self.executions.append(Execution(self.begin + number - 1, logs, read))

    def detach(self, model):
        """Puts the model's own train function back, and forgets the batches."""
        function = model.train_function
        if getattr(function, "mpkeras_kept_batches", None) is self:
            model.train_function = function.mpkeras_own_function
        self.executions.clear()


def _attached(function) -> list:
    """Returns the `KeptBatches` that stand in front of a train function, the outermost first."""
    found = []
    while function is not None:
        found.append(getattr(function, "mpkeras_kept_batches", None))
        function = getattr(function, "mpkeras_own_function", None)
    return [kept for kept in found if kept is not None]


def _is_of_python(data) -> bool:
    """Whether the batches were read already, by another `KeptBatches` in front of this one."""
    return type(data).__name__ == "list_iterator"


def _is_read_by_next(data) -> bool:
    return not type(data).__name__.startswith("Distributed")
