"""A look at the first batch, at a few later ones, and at data in memory, for what 16 bits would lose in silence."""

import contextlib

import keras

from mpkeras import _keras
from mpkeras.training import training_backend
from mpkeras.training.large_data import may_be_too_large, warn_of_large_data, warn_of_large_rows
from mpkeras.training.lost_outputs import may_lose_outputs, warn_of_lost_outputs
from mpkeras.training.whole_numbers import arrays_in_memory, may_round, warn_of_rounded_rows, warn_of_rounding


@contextlib.contextmanager
def looking_at_arrays(model, x, batch_size):
    """Context manager around `fit` or `evaluate` of `model`: data in memory is looked at, all rows of it.

    A model that is built by its first step is looked at afterwards.

    Args:
        model: The model.
        x: Arrays of as many rows; anything else, such as a dataset, is not looked at.
        batch_size: The rows of a batch, `None` for Keras' 32.
    """
    arrays = arrays_in_memory(x)
    # Of another batch size Keras says what is wrong with it.
    size = batch_size if isinstance(batch_size, int) and batch_size > 0 else 32

    def look_at_arrays():
        warn_of_rounded_rows(model, x, arrays, size)
        warn_of_large_rows(model, x, arrays, size)
        warn_of_lost_outputs(model, keras.tree.pack_sequence_as(x, [array[:size] for array in arrays]))

    looks_later = bool(arrays) and not _keras.is_built(model)
    if arrays and not looks_later:
        look_at_arrays()
    yield
    if looks_later:
        look_at_arrays()


def is_looked_at(number: int) -> bool:
    """Whether the data of a training is looked at in its batch of this number, the first being 1: each power of two.

    Numbers that grow from batch to batch (ids in order, time steps, days) are so seen before as much data has passed
    again, and the looks at a long training stay few.
    """
    return not number & (number - 1)


def looking_at_batch(model, function, number: int, again: bool):
    """Returns a train function of `model` that looks at its next batch for `look`, then runs `function`.

    The model may be built by the first step alone: then the batch is looked at behind the step.

    Args:
        model: The model.
        function: Its train function.
        number: The number of the batch, the first being 1.
        again: As in `look`.
    """
    is_due = True

    def train_function(*args):
        nonlocal is_due
        if not is_due:
            return function(*args)
        is_due = False
        if model.train_function is train_function:
            model.train_function = function
        was_built = _keras.is_built(model)
        is_first = number == 1 and (may_lose_outputs(model) or may_be_too_large(model))
        if was_built and not may_round(model) and not is_first:
            return function(*args)
        *state, data = args
        batch, data = training_backend.first_batch(model, data)
        if batch is None:
            return function(*state, data)
        x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
        if was_built:
            look(model, x, number, again, *state)
        result = function(*state, data)
        if not was_built:
            look(model, x, number, again, *(result[1:] if isinstance(result, tuple) else ()))
        return result

    # It is in front for one step, and of the function behind it others ask whether it takes batches again.
    marks = ("mpkeras_hides_logs", "mpkeras_first_steps")
    vars(train_function).update({mark: vars(function)[mark] for mark in marks if mark in vars(function)})
    return train_function


def look(model, x, number: int, again: bool, state=None):
    """Warns, once of each layer, of what 16 bits would lose of a batch in silence.

    Of the first batch that is whole numbers, numbers beyond float16, and what a few rows become in layers; of later
    ones whole numbers alone.

    Args:
        model: The model, which has been built, or run; one that is on several devices is not looked at.
        x: The arguments of the model.
        number: The number of the batch, the first being 1.
        again: Whether whole numbers are followed through the model also where such numbers of earlier batches were.
        state: The state that `fit` on JAX holds beside the model, if it does.
    """
    # Behind the four groups of `fit`'s state a callback may hand on numbers of its own.
    with _keras.held_by_variables(model, None if state is None else state[:4]):
        warn_of_rounding(model, x, again)
        if number == 1:
            warn_of_large_data(model, x)
            warn_of_lost_outputs(model, x)
