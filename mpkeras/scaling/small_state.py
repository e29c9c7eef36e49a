"""Small state: an optimizer that computes in float32 on variables that are stored in bfloat16."""

import collections
import contextlib
import copy

import keras
from keras import ops

from mpkeras import _keras
from mpkeras._replaced import replaced_on_all
from mpkeras.devices import backend_module
from mpkeras.policies.dtypes import SMALL_DTYPE
from mpkeras.scaling.rounding import stochastic_round

# The same for every optimizer, so that all ranks of a training round alike, and nothing has to be stored.
_SEED = 0

_devices = backend_module()


def is_small(variable) -> bool:
    """Whether what is assigned to `variable` has to be rounded: it is stored in bfloat16."""
    return _keras.stored_dtype(variable) == SMALL_DTYPE


def widened(values):
    """Returns `values`, in float32 where they are bfloat16."""
    return _devices.widened(values) if keras.backend.standardize_dtype(values.dtype) == SMALL_DTYPE else values


def parts_of(inner_optimizer) -> list:
    """Returns an optimizer, and those that it is made of, as Keras' `MultiOptimizer` is."""
    return [inner_optimizer, *getattr(inner_optimizer, "optimizers", [])]


def slot_dtypes(inner_optimizer, slot_dtype: str, stored=None) -> list:
    """Returns `(variable, dtype)` of what a built optimizer, or one of its parts, keeps in float32 or bfloat16.

    Slots are to be stored in `slot_dtype`; averages of the weights and single numbers in float32.

    Args:
        inner_optimizer: A Keras optimizer, not wrapped.
        slot_dtype: `"auto"`, for the dtype of the weight that a slot is kept beside, or a dtype.
        stored: `{id(weight): dtype}` of weights that are to be stored in another dtype than they are.
    """
    averages = {id(variable) for variable in _keras.weight_averages(inner_optimizer)}
    weights = _keras.optimizer_trainable_variables(inner_optimizer)
    found = []
    for variable in inner_optimizer.variables:
        if _keras.stored_dtype(variable) not in ("float32", SMALL_DTYPE):
            continue
        is_single = id(variable) in averages or len(variable.shape) == 0
        dtype = "float32" if is_single else slot_dtype
        if dtype == "auto":
            weight = _keras.weight_of_slot(variable, weights)
            beside = variable if weight is None else weight
            dtype = (stored or {}).get(id(beside)) or _keras.stored_dtype(beside)
        found.append((variable, dtype))
    return found


class Rounding:
    """How the assignments of one update of an optimizer are rounded.

    Attributes:
        small: The variables that are stored in bfloat16.
    """

    def __init__(self, variables, step_count):
        """Begins an update.

        Args:
            variables: All variables that the optimizer may assign to, in an order that is always the same.
            step_count: The variable that counts its updates.
        """
        self._numbers = {id(variable): number for number, variable in enumerate(variables) if is_small(variable)}
        self.small = [variable for variable in variables if id(variable) in self._numbers]
        self._step_count = step_count
        # How often each variable was assigned to: weight decay and the update are two roundings.
        self.draws: collections.Counter = collections.Counter()

    def covers(self, variable) -> bool:
        return id(variable) in self._numbers

    def begun_again(self):
        """Returns the same rounding for another thread or graph, from here on."""
        again = copy.copy(self)
        again.draws = self.draws.copy()
        return again

    def rounded(self, variable, values):
        """Returns the bfloat16 values that `variable` is assigned, from float32 ones."""
        number = self._numbers[id(variable)]
        draw = self.draws[number]
        self.draws[number] += 1
        step = _keras.unscoped_value(self._step_count)
        return stochastic_round(ops.cast(values, "float32"), seed=_SEED, step=step, variable=number, draw=draw)

    @contextlib.contextmanager
    def variables_as_float32(self):
        """Within this context the small variables say that they are float32, and take float32 values.

        Keras' optimizers cast to `variable.dtype`, and `Variable.assign` casts to it, to the nearest.
        """
        with replaced_on_all(self.small, _keras.STORED_DTYPE, lambda variable, dtype: "float32"):
            yield


class UpdateScope(keras.StatelessScope):
    """The scope in which an optimizer updates: decides what becomes of each of its assignments.

    Within it small variables read as float32; what they are assigned is rounded. Where `is_applied` is given, an
    assignment takes effect only where it is true. Choosing at the assignment, not after the whole update, means that
    nothing needs the old values afterwards: XLA fuses it into the update, and keeps every donated buffer.

    New values stay in the scope: `read` returns them. Subclasses `write` them elsewhere.

    Args:
        rounding: A `Rounding`.
        is_applied: bool scalar, shape `()`, or `None`.
        state_mapping: Pairs of a variable and its value, as for `keras.StatelessScope`.
    """

    def __init__(self, rounding: Rounding, is_applied=None, state_mapping=()):
        super().__init__(state_mapping=state_mapping)
        self.rounding = rounding
        self.is_applied = is_applied

    def read(self, variable):
        """Returns the value of `variable`, as it is stored."""
        value = self.state_mapping.get(id(variable))
        return _keras.stored_value(variable) if value is None else value

    def write(self, variable, value):
        """Stores a new value, of the dtype that `variable` is stored in."""
        self.state_mapping[id(variable)] = value

    def get_current_value(self, variable):
        value = self.read(variable)
        return widened(value) if self.rounding.covers(variable) else value

    def add_update(self, update):
        variable, value = update
        if self.is_applied is not None:
            # Before it is rounded: the old value is one that bfloat16 holds, and stays as it is.
            value = ops.where(self.is_applied, value, self.get_current_value(variable))
        if self.rounding.covers(variable):
            value = self.rounding.rounded(variable, value)
        self.write(variable, value)


@contextlib.contextmanager
def following(optimizers, variables):
    """Context manager: `variables` are stored in another dtype within it, and then the state of `optimizers` follows.

    Built or not: which weights do not decay is known before.

    Args:
        optimizers: Any Keras optimizers, wrapped or not.
        variables: The `keras.Variable`s.
    """
    parts = [part for optimizer in optimizers for part in parts_of(getattr(optimizer, "inner_optimizer", optimizer))]
    known = [dict(zip(_keras.variable_keys(part, variables), variables, strict=True)) for part in parts]
    yield
    for part, variables_of_part in zip(parts, known, strict=True):
        _keras.know_variables_again(part, variables_of_part)
    for optimizer in optimizers:
        if optimizer.built and hasattr(optimizer, "store_slots"):
            optimizer.store_slots()


def follow_weights(optimizer):
    """Brings an optimizer in line with the weights it was built on, stored in another dtype while nobody told it.

    Args:
        optimizer: Any Keras optimizer, wrapped or not, built or not.
    """
    if not optimizer.built:
        return
    for part in parts_of(getattr(optimizer, "inner_optimizer", optimizer)):
        _keras.know_variables_again(part, _keras.known_variables(part))
    if hasattr(optimizer, "store_slots"):
        optimizer.store_slots()
