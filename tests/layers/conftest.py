"""What the tests of float32 layers share."""

import keras
import numpy as np
import pytest


@pytest.fixture
def gradient(backend):
    """Returns a function: the gradient of a scalar function of one float32 array, as an array."""

    def of(function, x):
        x = np.asarray(x, "float32")
        if backend == "tensorflow":
            import tensorflow as tf

            tensor = tf.constant(x)
            with tf.GradientTape() as tape:
                tape.watch(tensor)
                value = function(tensor)
            return tape.gradient(value, tensor).numpy()
        if backend == "jax":
            import jax

            return np.asarray(jax.grad(function)(jax.numpy.asarray(x)))
        import torch

        tensor = torch.tensor(x, requires_grad=True)
        function(tensor).backward()
        return tensor.grad.numpy()

    return of


@pytest.fixture
def dtype_of():
    return lambda tensor: keras.backend.standardize_dtype(tensor.dtype)


@pytest.fixture
def numbers():
    """Returns a function: a tensor of any dtype and backend as a float32 array."""
    return lambda tensor: keras.ops.convert_to_numpy(keras.ops.cast(tensor, "float32"))
