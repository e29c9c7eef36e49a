"""Small state: an optimizer that computes in float32 on variables stored in bfloat16, and rounds stochastically."""

import collections
import contextlib
import copy
import math

import keras
import numpy as np
from keras import ops

from mpkeras import _keras
from mpkeras._replaced import replaced, replaced_on_all
from mpkeras.devices import backend_module
from mpkeras.policies.dtypes import SMALL_DTYPE

# The same for every optimizer, so that all ranks of a training round alike, and nothing has to be stored.
_SEED = 0
# bfloat16 keeps the upper 16 bits of a float32 number. The largest finite one: one step up is infinity.
_LARGEST = float.fromhex("0x1.fep127")

_devices = backend_module()
_WORD = _devices.WORD


def is_small(variable) -> bool:
    """Whether `variable` is stored in bfloat16, so that what it is assigned has to be rounded."""
    return _keras.stored_dtype(variable) == SMALL_DTYPE


def widened(values):
    """Returns `values`, in float32 where they are bfloat16."""
    return _devices.widened(values) if keras.backend.standardize_dtype(values.dtype) == SMALL_DTYPE else values


def parts_of(inner_optimizer) -> list:
    """Returns an optimizer, and those that it holds: of a `MultiOptimizer`, or of a user's own around another."""
    parts = [inner_optimizer]
    for part in parts:
        for value in vars(part).values():
            # Of a list the first element tells: an optimizer has many lists of variables, and is asked at each step.
            has_parts = isinstance(value, list | tuple) and isinstance(
                next(iter(value), None), keras.optimizers.Optimizer
            )
            for held in value if has_parts else [value]:
                if isinstance(held, keras.optimizers.Optimizer) and held not in parts:
                    parts.append(held)
    return parts


@contextlib.contextmanager
def replaced_methods(inner_optimizer, methods_of):
    """Within this context an optimizer, and each of its parts, has the methods `methods_of(part)`, by name."""
    with contextlib.ExitStack() as stack:
        for part in parts_of(inner_optimizer):
            for name, method in methods_of(part).items():
                stack.enter_context(replaced(part, name, method, kind="update"))
        yield


def shapes_of_slots(weights) -> set[tuple]:
    """Returns the shapes of state that may be stored in 16 bits: those of weights, and of factors, which lack an axis.

    State in others, as counters and a history of losses are, takes next to no memory, single numbers among them.
    """
    shapes = {tuple(weight.shape) for weight in weights}
    shapes |= {shape[:axis] + shape[axis + 1 :] for shape in shapes for axis in range(len(shape))}
    return {shape for shape in shapes if math.prod(shape) > 1}


def slot_dtypes(inner_optimizer, slot_dtype: str, stored=None) -> list:
    """Returns `(variable, dtype)`: the dtypes that the float32 and bfloat16 state of an optimizer is to be stored in.

    Averages of the weights, and what has no shape of theirs, stay in float32; a copy of a weight is stored as that is,
    which would have its rounding.

    Args:
        inner_optimizer: A built Keras optimizer, not wrapped, or one of its parts.
        slot_dtype: That of the slots: a dtype, or `"auto"` for that of the weight.
        stored: `{id(weight): dtype}` of weights that are to be stored in another dtype than they are.
    """
    parts = parts_of(inner_optimizer)
    averages = {id(variable) for part in parts for variable in _keras.weight_averages(part)}
    copies = {id(variable) for part in parts for variable in _keras.copies_of_weights(part)}
    weights = _keras.optimizer_trainable_variables(inner_optimizer)
    weight_of = _keras.weights_of_slots(inner_optimizer.variables, weights)
    weight_of |= _keras.weights_of_factors(inner_optimizer)
    shapes = shapes_of_slots(weights)
    dtype_by_slot = []
    for variable in inner_optimizer.variables:
        if _keras.stored_dtype(variable) not in ("float32", SMALL_DTYPE):
            continue
        is_float32 = id(variable) in averages or tuple(variable.shape) not in shapes
        dtype = "float32" if is_float32 else "auto" if id(variable) in copies else slot_dtype
        if dtype == "auto":
            beside = weight_of.get(id(variable), variable)
            dtype = (stored or {}).get(id(beside)) or _keras.stored_dtype(beside)
        dtype_by_slot.append((variable, dtype))
    return dtype_by_slot


class Rounding:
    """How the assignments of one update of an optimizer are rounded.

    Args:
        variables: All variables that the optimizer may assign to, in an order that is always the same.
        step_count: The variable that counts its updates.

    Attributes:
        small: The variables that are stored in bfloat16.
    """

    def __init__(self, variables, step_count):
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
        """Within this context the small variables say that they are float32, and take float32 values."""
        # Keras' optimizers cast to `variable.dtype`, and `Variable.assign` casts to it, to the nearest.
        with replaced_on_all(self.small, _keras.STORED_DTYPE, lambda variable, dtype: "float32"):
            yield


class UpdateScope(keras.StatelessScope):
    """The scope in which an optimizer updates: small variables read as float32; what they are assigned is rounded.

    Where `is_applied` is given, an assignment takes effect only where it is true. Choosing at the assignment, not after
    the whole update, means that nothing needs the old values afterwards: XLA fuses it into the update, and keeps every
    donated buffer.

    New values stay in the scope: `read` returns them. Subclasses `write` them elsewhere.
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
    """Context manager in which `variables` are stored in another dtype; the state of `optimizers` then follows.

    Args:
        optimizers: Any Keras optimizers, wrapped or not, built or not: which weights do not decay is known before.
        variables: The `keras.Variable`s.
    """
    parts = [part for optimizer in optimizers for part in _parts_inside(optimizer)]
    known = [dict(zip(_keras.variable_keys(part, variables), variables, strict=True)) for part in parts]
    yield
    for part, variables_of_part in zip(parts, known, strict=True):
        _keras.know_variables_again(part, variables_of_part)
    for optimizer in optimizers:
        _store_slots(optimizer)


def follow_weights(optimizer):
    """Brings any optimizer in line with the weights it was built on, stored in another dtype while nobody told it."""
    if optimizer.built:
        for part in _parts_inside(optimizer):
            _keras.know_variables_again(part, _keras.known_variables(part))
    _store_slots(optimizer)


def _parts_inside(optimizer) -> list:
    return parts_of(getattr(optimizer, "inner_optimizer", optimizer))


def _store_slots(optimizer):
    # A plain Keras optimizer keeps no small state.
    if optimizer.built and hasattr(optimizer, "store_slots"):
        optimizer.store_slots()


def stochastic_round(values, *, seed: int, step, variable: int, draw: int = 0):
    """Returns `values` in bfloat16, each rounded up or down with the probability of its distance: the mean is exact.

    Values that bfloat16 holds stay as they are, infinities and NaN among them. Those beyond its largest finite number
    (3.39e38) become that number: what was finite stays finite.

    The random bits are a hash of where a value stands: no state is kept, and the same step rounds the same way in
    another process, on another backend, on each replica and on however many shards.

    Args:
        values: float32 tensor of a known shape.
        seed: The same for all steps of an optimizer.
        step: Integer scalar, shape `()`: the number of the update.
        variable: Number of the variable that the values are for.
        draw: How many roundings there were for this variable in this step before.

    References:
        Gupta et al., 2015, https://arxiv.org/abs/1502.02551; for bfloat16 weights Zamirai et al., 2021,
        https://arxiv.org/abs/2010.06192. The hash is `lowbias32` of https://nullprogram.com/blog/2018/07/31.
    """
    noise = _shifted(random_words(values.shape, seed, step, variable, draw), 16)
    # Of a NaN the bits that tell it from infinity may all be among those cut off, but not of one that is a sum; and no
    # number as large as these changes when 1 is added.
    words = _devices.words(values + 1.0)
    # Compared as numbers and chosen once: what is tested here is most of what rounding costs beside the hash.
    return _devices.upper_halves(ops.where(ops.less(ops.abs(values), _LARGEST), _devices.words(values) + noise, words))


def random_words(shape, seed: int, step, variable: int, draw: int = 0):
    """Returns one pseudo-random word of 32 bits for each element: a hash of its position and of the arguments."""
    key = _mixed(_word(seed))
    for part in (ops.cast(step, _WORD), _word(variable), _word(draw)):
        key = _mixed(key + part)
    return _mixed(_positions(tuple(shape), key))


def _positions(shape: tuple, first):
    """Returns the number of each element, in rows as NumPy counts from `first` on; modulo 2**32."""
    # From a word that is computed: TensorFlow keeps what depends on the shape alone as a constant of that size.
    positions = first
    for axis, size in enumerate(shape):
        # A sum over the axes, not a reshaped range: a compiler that shards the variable shards this as it does.
        along = ops.cast(ops.arange(size, dtype="int32"), _WORD) * _word(math.prod(shape[axis + 1 :]))
        positions = positions + ops.reshape(along, (size,) + (1,) * (len(shape) - axis - 1))
    return positions


def _mixed(words):
    """A permutation of the words in which each bit depends on all others."""
    words = (words ^ _shifted(words, 16)) * _word(0x7FEB352D)
    words = (words ^ _shifted(words, 15)) * _word(0x846CA68B)
    return words ^ _shifted(words, 16)


def _shifted(words, places: int):
    """Shifts to the right and fills with zeros, also where words have a sign."""
    shifted = ops.right_shift(words, _word(places))
    return shifted if _WORD == "uint32" else shifted & _word(2 ** (32 - places) - 1)


def _word(number: int):
    """Returns a constant of 32 bits; of larger numbers the lower ones."""
    return ops.convert_to_tensor(np.array(number & 0xFFFFFFFF, np.uint32).astype(_WORD))
