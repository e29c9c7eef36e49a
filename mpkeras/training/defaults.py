"""The answers of a backend that has nothing of its own: no strategy owns models, and Keras draws from variables."""

import contextlib
import itertools

import keras
import numpy as np
from keras import ops


def check_scope(model, variables):
    """Variables belong to no scope here."""


def is_distributed(model) -> bool:
    """Models belong to no strategy here."""
    return False


def in_replica_context() -> bool:
    """No code runs on one replica alone here."""
    return False


def replicas(model=None) -> int:
    """JAX sees one batch, not parts of it; each process of torch averages for itself."""
    return 1


def variable_scope(model):
    """Variables belong to no scope here."""
    return contextlib.nullcontext()


def check_is_outermost(data):
    """A step may run inside another program here."""


def ensure_built(model, own_step, data):
    """Keras builds the model before the train step here."""


def build_before_trace(model, data):
    """Keras' `fit` builds all before its first step here."""


def has_rows(data) -> bool:
    """Returns whether a batch has rows; of several ranks, each asks for itself only whether it can compute."""
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    shape = getattr(leaves[0], "shape", None) if leaves else None
    return not shape or shape[0] != 0


def native_states(model) -> list:
    """There are no variables beside Keras'."""
    return []


def first_batch(model, data):
    """Returns the first batch that a train function is given, and what to give it in the place of `data`."""
    first = next(data)
    return first, itertools.chain([first], data)


def of_its_own(structure):
    """Returns a structure of tensors that no `call` which is given it writes into: there are no others here."""
    return structure


def track_random_states(model):
    """`state_dict` carries the random generators here."""


def global_random_states() -> dict:
    """Keras draws from variables."""
    return {}


def set_global_random_states(states: dict):
    """Keras draws from variables."""


def runs_on_host() -> bool:
    """Whether Python runs the step now, and traces no program of it."""
    return True


def can_be_read(variable) -> bool:
    """Whether `variable` holds a value that can be read now."""
    return True


def are_of_this_program(tensors) -> bool:
    """Whether what is computed here can be computed of `tensors`."""
    return True


class HeldState:
    """The state of a model that `fit` holds between two steps: here all of it is in the variables.

    Args:
        model: The model that is trained.
        arguments: A list of what the train function is given before its data.
    """

    def __init__(self, model, arguments):
        self._model = model

    def arguments(self) -> list:
        """Returns what the train function is given before its data."""
        return []

    def after(self, result) -> tuple:
        """Returns the logs in what a train function returned, and the state that is held then."""
        return result, self

    def returned(self, logs):
        """Returns what the train function returns with these logs and this state."""
        return logs

    def read(self, variable) -> list:
        """Returns copies of the value of `variable` as NumPy arrays, one for each of its copies on replicas."""
        return [np.array(ops.convert_to_numpy(variable.value))]

    def write(self, variable, values):
        """Gives each copy of `variable` its value; all of them the same where there is one."""
        variable.assign(values[0])

    def number(self, variable):
        """Returns the value of a variable of shape `()` as a Python number."""
        return self.read(variable)[0].item()
