"""The arithmetic on scalars is that of `keras.ops`, in value and dtype, whichever functions do it."""

import keras
import numpy as np
import pytest
from keras import ops

from mpkeras.policies.loss_scaling import scalars

# Elsewhere they are `keras.ops` themselves.
pytestmark = pytest.mark.backends("torch")
FLOATS = (0.0, 1.5, -2.0, 2.0**24, float("inf"), float("-inf"), float("nan"))
INTEGERS = (0, 1, 7)


def tensor(value):
    return ops.convert_to_tensor(value, {bool: "bool", int: "int32", float: "float32"}[type(value)])


def assert_same(name, *arguments):
    found, expected = getattr(scalars, name)(*arguments), getattr(ops, name)(*arguments)
    assert keras.backend.standardize_dtype(found.dtype) == keras.backend.standardize_dtype(expected.dtype)
    np.testing.assert_array_equal(ops.convert_to_numpy(found), ops.convert_to_numpy(expected))
    assert found.shape == ()


@pytest.mark.parametrize("name", ["minimum", "maximum", "greater_equal"])
@pytest.mark.parametrize("values", [FLOATS, INTEGERS], ids=["float32", "int32"])
def test_two_numbers(name, values):
    for x1 in values:
        for x2 in values:
            assert_same(name, tensor(x1), tensor(x2))
            assert_same(name, tensor(x1), x2)


@pytest.mark.parametrize("condition", [True, False])
def test_where(condition):
    for x1, x2 in [(1.5, float("nan")), (float("inf"), 2.0), (3, 0)]:
        for arguments in ((tensor(x1), tensor(x2)), (tensor(x1), x2), (x1, tensor(x2))):
            assert_same("where", tensor(condition), *arguments)
            # As a rule is called in an interpreter.
            assert_same("where", condition, *arguments)


def test_flags_and_single_operands():
    for x1 in (True, False):
        for name in ("logical_and", "logical_or"):
            for x2 in (tensor(True), tensor(False)):
                assert_same(name, tensor(x1), x2)
                assert_same(name, x1, x2)
        assert_same("logical_not", tensor(x1))
        assert_same("logical_not", x1)
    for value in (True, 3, 2.5):
        assert_same("zeros_like", tensor(value))


def test_several_in_one():
    for values in ([1.5, -2.0], [3, 0, 7], [True]):
        found, expected = (module.stack([tensor(value) for value in values]) for module in (scalars, ops))
        assert keras.backend.standardize_dtype(found.dtype) == keras.backend.standardize_dtype(expected.dtype)
        np.testing.assert_array_equal(ops.convert_to_numpy(found), values)
