"""The batches of the last call of a model's train function, kept for whoever wants to look at them again."""

import collections
import dataclasses
import functools
import itertools

import keras


@dataclasses.dataclass(frozen=True)
class Execution:
    """One call of a train function.

    Attributes:
        step: Of its last batch in the epoch, counted from 0.
        batches: List of what it trained on; empty under a `tf.distribute` strategy with several replicas.
        logs: What it returned, as tensors that may still be computed.
    """

    step: int
    batches: list
    logs: dict


class KeptBatches:
    """Keeps what `fit` trains on, a few executions long: references, no copies.

    `fit` asks `model.train_function` anew on every step; there a function stands that reads ahead the batches of one
    execution and hands them on.

    Attributes:
        executions: Those that nobody has taken from here yet, the oldest first; no more than two.
        begin: The step with which the next execution begins.
    """

    def __init__(self):
        self.executions: collections.deque[Execution] = collections.deque(maxlen=2)
        self.begin = 0

    def attach(self, model):
        """Puts itself in front of the train function that `model` has now, unless it is there."""
        function = model.train_function
        if function is None or getattr(function, "mpkeras_kept_batches", None) is self:
            return
        steps = model.steps_per_execution
        backend = keras.backend.backend()

        @functools.wraps(function)
        def train_function(*args):
            *state, data = args
            batches = None
            if backend == "torch":
                # A list of one batch, already read.
                batches = list(data)
            elif _is_read_by_next(data):
                batches = list(itertools.islice(data, steps))
                if not batches:
                    # As Keras' own functions do at the end of the data.
                    raise StopIteration
                data = iter(batches)
            result = function(*state, data)
            # On JAX the new state comes back, too.
            logs = result[0] if isinstance(result, tuple) else result
            end = self.begin + len(batches or [0]) - 1
            self.executions.append(Execution(end, batches or [], logs))
            return result

        vars(train_function).update(mpkeras_kept_batches=self, mpkeras_own_function=function)
        model.train_function = train_function

    def detach(self, model):
        """Puts the model's own train function back, and forgets the batches."""
        function = model.train_function
        if getattr(function, "mpkeras_kept_batches", None) is self:
            model.train_function = function.mpkeras_own_function
        self.executions.clear()


def _is_read_by_next(data) -> bool:
    return not type(data).__name__.startswith("Distributed")
