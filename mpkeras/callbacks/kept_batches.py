"""The batches of the last call of a model's train function, kept for whoever wants to look at them again."""

import functools
import itertools

import keras


class KeptBatches:
    """Keeps what `fit` trains on, one execution long: references, no copies.

    `fit` asks `model.train_function` anew on every step; there a function stands that reads ahead the batches of one
    execution and hands them on. Under a `tf.distribute` strategy with several replicas nothing is kept.
    """

    def __init__(self):
        self.batches = []

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
            if backend == "torch":
                # A list of one batch, already read.
                self.batches = list(data)
                return function(*args)
            if not _is_read_by_next(data):
                self.batches = []
                return function(*args)
            self.batches = list(itertools.islice(data, steps))
            if not self.batches:
                # As Keras' own functions do at the end of the data.
                raise StopIteration
            return function(*state, iter(self.batches))

        vars(train_function).update(mpkeras_kept_batches=self, mpkeras_own_function=function)
        model.train_function = train_function

    def detach(self, model):
        """Puts the model's own train function back, and forgets the batches."""
        function = model.train_function
        if getattr(function, "mpkeras_kept_batches", None) is self:
            model.train_function = function.mpkeras_own_function
        self.batches = []


def _is_read_by_next(data) -> bool:
    return not type(data).__name__.startswith("Distributed")
