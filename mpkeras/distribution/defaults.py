"""The answers of a backend on which no program says what travels, and no `keras.distribution` splits variables."""


def check_program(travel, is_compiled: bool):
    """No program says here in which dtypes numbers travel."""


def with_dtypes(run, travel, model):
    """Returns `run`: sums, and what travels, have their dtypes from elsewhere."""
    return run


def split_slots(slots, weights):
    """Leaves the state of optimizers where it is."""
    # AutoGraph, which meets it in a `tf.function` of the user's, warns of a function without a statement.
    return None


def layout_of_number():
    """Returns `None`: a number has no layout."""
    return None
