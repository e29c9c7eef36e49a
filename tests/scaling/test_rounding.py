"""Stochastic rounding: the mean is the value, the bits are the same everywhere, nothing finite is lost."""

import keras
import numpy as np
import pytest

from mpkeras.scaling.small_state import random_words, stochastic_round

DRAWS = 100_000
LARGEST = 0x7F7F


def float32_of(*bits):
    return np.array(bits, np.uint32).view(np.float32)


def rounded(values, seed=3, step=11, variable=5, draw=1):
    """Returns the bits of the bfloat16 values, as NumPy's uint16."""
    values = keras.ops.convert_to_tensor(np.asarray(values, np.float32))
    step = keras.ops.convert_to_tensor(np.int32(step))
    result = stochastic_round(values, seed=seed, step=step, variable=variable, draw=draw)
    assert keras.backend.standardize_dtype(result.dtype) == "bfloat16"
    return keras.ops.convert_to_numpy(result).view(np.uint16)


def words(shape, seed=3, step=11, variable=5, draw=1):
    result = random_words(shape, seed, keras.ops.convert_to_tensor(np.int32(step)), variable, draw)
    return keras.ops.convert_to_numpy(result).astype(np.int64).astype(np.uint32)


@pytest.mark.parametrize(
    "bits",
    [
        0x3F804000,  # a quarter above 1
        0x3F808000,  # half-way above 1, where the nearest is always the even one
        0x3F800083,  # 1 and an update of 1/500 of a step
        0xC12ABCDE,  # negative
        0x3F7FC000,  # below a power of two, whose neighbours are of two sizes
        0x0DA24260,  # 1e-30
        0x000A5F31,  # subnormal
        0x80001234,  # between -0 and the smallest subnormal number
        0x7F7E7FFF,  # next to the largest
    ],
)
def test_up_as_often_as_the_value_lies_towards_it(bits):
    found = rounded(np.full(DRAWS, float32_of(bits)[0]))
    lower, share = bits >> 16, (bits & 0xFFFF) / 2**16
    assert set(found.tolist()) <= {lower, lower + 1}
    # Draws of probability `share`, three standard deviations.
    assert abs(np.mean(found == lower + 1) - share) < 3 * np.sqrt(share * (1 - share) / DRAWS)


@pytest.mark.parametrize("bits", [0x3F800000, 0xBF810000, 0x00000000, 0x80000000, 0x00010000, 0x80800000, 0x7F7F0000])
def test_what_bfloat16_holds_stays(bits):
    assert set(rounded(np.full(4096, float32_of(bits)[0])).tolist()) == {bits >> 16}


def test_finite_stays_finite_and_the_rest_passes():
    found = rounded(np.repeat(float32_of(0x7F7FFFFF, 0xFF7FFFFF, 0x7F7F8000, 0x7F800000, 0xFF800000), 999))
    expected = [LARGEST, 0x8000 | LARGEST, LARGEST, 0x7F80, 0xFF80]
    np.testing.assert_array_equal(found.reshape(5, 999), np.repeat(expected, 999).reshape(5, 999))
    # NaNs whose mark is in the half that is cut off, or that an addition would carry over.
    found = rounded(np.repeat(float32_of(0x7FC00000, 0x7F800001, 0xFF80FFFF, 0x7FFFFFFF, 0xFFFFFFFF), 999))
    assert np.all((found & 0x7FFF) > 0x7F80)


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "jax")
def test_xla_rounds_what_it_computes_in_the_same_program_alike():
    """Among it what overflows there, and products next to the largest numbers: no rewriting of XLA may move them."""
    factors = np.repeat(float32_of(0x7F7FFFFF, 0xFF7F8000, 0x7F800000, 0x7F800001, 0x3F804000), 500)
    others = np.tile(np.float32([1.0, -1.0, 2.0, 0.5, 1 - 2**-24]), 500)
    step = keras.ops.convert_to_tensor(np.int32(11))

    def product_rounded(factors, others, step):
        return stochastic_round(factors * others, seed=3, step=step, variable=5, draw=1)

    if keras.backend.backend() == "jax":
        import jax

        compiled = jax.jit(product_rounded)
    else:
        import tensorflow as tf

        compiled = tf.function(product_rounded, jit_compile=True)
    found = compiled(*map(keras.ops.convert_to_tensor, (factors, others)), step)
    found = keras.ops.convert_to_numpy(found).view(np.uint16)
    with np.errstate(over="ignore", invalid="ignore"):
        products = factors * others
    np.testing.assert_array_equal((found & 0x7FFF) > 0x7F80, np.isnan(products))
    is_number = ~np.isnan(products)
    np.testing.assert_array_equal(found[is_number], rounded(products)[is_number])


def test_the_hash_is_lowbias32_of_the_position():
    """The same bits on every backend: against the published function, with Python's integers."""

    def mixed(word):
        word = (word ^ word >> 16) * 0x7FEB352D % 2**32
        word = (word ^ word >> 15) * 0x846CA68B % 2**32
        return word ^ word >> 16

    key = mixed(3)
    for part in (11, 5, 1):
        key = mixed((key + part) % 2**32)
    expected = [mixed((key + position) % 2**32) for position in range(24)]
    np.testing.assert_array_equal(words((2, 3, 4)).ravel(), expected)
    np.testing.assert_array_equal(words((24,)), expected)
    assert words(()).shape == ()
    # Of the words the upper halves are the noise.
    values = float32_of(*[0x3F804000] * 24).reshape(2, 3, 4)
    carried = [0x3F80 + ((word >> 16) + 0x4000 >= 2**16) for word in expected]
    np.testing.assert_array_equal(rounded(values).ravel(), carried)


def test_bits_are_even_and_know_nothing_of_each_other():
    count = 2**17
    reference = words((count,))
    others = {
        "next step": words((count,), step=12),
        "next variable": words((count,), variable=6),
        "next draw": words((count,), draw=2),
        "another seed": words((count,), seed=4),
        "next element": np.roll(reference, 1),
        "next row of 1000": np.roll(reference, 1000),
    }
    bits = np.unpackbits(reference.view(np.uint8)).reshape(count, 32).astype(float)
    # 32 shares, of which one in 15,000 runs would leave five standard deviations.
    assert np.all(np.abs(bits.mean(axis=0) - 0.5) < 5 * 0.5 / np.sqrt(count))
    for name, other in others.items():
        upper, other_upper = (np.asarray(word >> 16, float) for word in (reference, other))
        correlation = np.corrcoef(upper, other_upper)[0, 1]
        assert abs(correlation) < 5 / np.sqrt(count), name
        agreeing = 1 - np.unpackbits((reference ^ other).view(np.uint8)).reshape(count, 32).astype(float)
        assert np.all(np.abs(agreeing.mean(axis=0) - 0.5) < 5 * 0.5 / np.sqrt(count)), name
