"""What the tests of float32 layers share."""

import keras
import numpy as np
import pytest

from tests.conversion.derivatives import derivatives


@pytest.fixture
def gradient():
    """Returns a function: the gradient of a scalar function of one float32 array, as an array."""
    return lambda function, x: keras.ops.convert_to_numpy(derivatives(function, np.asarray(x, "float32"))[0])


@pytest.fixture
def dtype_of():
    return lambda tensor: keras.backend.standardize_dtype(tensor.dtype)


@pytest.fixture
def numbers():
    """Returns a function: a tensor of any dtype and backend as a float32 array."""
    return lambda tensor: keras.ops.convert_to_numpy(keras.ops.cast(tensor, "float32"))
