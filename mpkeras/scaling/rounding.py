"""Stochastic rounding of float32 to bfloat16, by a hash: the same on every backend and device."""

import math

import numpy as np
from keras import ops

from mpkeras.devices import backend_module

_devices = backend_module()
_WORD = _devices.WORD
# bfloat16 keeps the upper 16 bits of a float32 number. The largest finite one: one step up is infinity.
_LARGEST = float.fromhex("0x1.fep127")


def stochastic_round(values, *, seed: int, step, variable: int, draw: int = 0):
    """Returns `values` in bfloat16, each rounded up or down with the probability of its distance.

    A value between two neighbouring bfloat16 numbers becomes the upper one as often as it lies towards it, so its mean
    is the value itself. Values that bfloat16 holds stay as they are, infinities and NaN among them. Those beyond its
    largest finite number (3.39e38) become that number: what was finite stays finite.

    The random bits are a hash of where a value stands: no state is kept, and the same step rounds the same way in
    another process, on another backend, on each replica and on however many shards.

    Args:
        values: float32 tensor of a known shape.
        seed: Integer, the same for all steps of an optimizer.
        step: Integer scalar, shape `()`: the number of the update.
        variable: Number of the variable that the values are for.
        draw: How many roundings there were for this variable in this step before.

    Returns:
        A bfloat16 tensor of the shape of `values`.

    Example:

    >>> values = keras.ops.full((4096,), 1.001)  # Its neighbours in bfloat16 are 1 and 1.0078125.
    >>> rounded = stochastic_round(values, seed=1, step=7, variable=0)
    >>> sorted(set(keras.ops.convert_to_numpy(keras.ops.cast(rounded, "float32")).tolist()))
    [1.0, 1.0078125]

    References:
        Gupta et al., 2015, https://arxiv.org/abs/1502.02551; for bfloat16 weights Zamirai et al., 2021,
        https://arxiv.org/abs/2010.06192. The hash is `lowbias32` of https://nullprogram.com/blog/2018/07/31.
    """
    noise = _upper_bits(random_words(values.shape, seed, step, variable, draw))
    # Of a NaN the bits that tell it from infinity may all be among those cut off, but not of one that is a sum; and no
    # number as large as these changes when 1 is added.
    kept = _devices.words(values + 1.0)
    # Compared as numbers and chosen once: what is tested here is most of what rounding costs beside the hash.
    return _devices.upper_halves(ops.where(ops.less(ops.abs(values), _LARGEST), _devices.words(values) + noise, kept))


def random_words(shape, seed: int, step, variable: int, draw: int = 0):
    """Returns one pseudo-random word of 32 bits for each element: a hash of its position and of the arguments.

    Args:
        shape: The shape, without unknown dimensions.
        seed, step, variable, draw: As for `stochastic_round`.
    """
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


def _upper_bits(words):
    return _shifted(words, 16)


def _shifted(words, places: int):
    """Shifts to the right and fills with zeros, also where words have a sign."""
    shifted = ops.right_shift(words, _word(places))
    return shifted if _WORD == "uint32" else shifted & _word(2 ** (32 - places) - 1)


def _word(number: int):
    """Returns a constant of 32 bits; of larger numbers the lower ones."""
    return ops.convert_to_tensor(np.array(number & 0xFFFFFFFF, np.uint32).astype(_WORD))
