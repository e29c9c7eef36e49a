import keras
import numpy as np
import pytest

from mpkeras.scaling.gradient_statistics import gradient_statistics


def statistics(grads, loss_scale=None):
    return [float(value) for value in gradient_statistics(grads, loss_scale)]


def test_the_norm_and_the_share_of_zeros():
    grads = [keras.ops.convert_to_tensor([3.0 * 8, 0.0]), None, keras.ops.convert_to_tensor([[4.0 * 8], [0.0]])]
    assert statistics(grads, 8.0) == [5.0, 0.5]


def test_both_parts_of_complex_gradients_count():
    grad = keras.ops.convert_to_tensor(np.array([3 + 4j, 12j, 0, 0], "complex64"))
    assert statistics([grad]) == [pytest.approx(13.0), 0.5]


@pytest.mark.backends("jax")
def test_the_rows_of_a_sparse_array_that_are_there():
    import jax.numpy as jnp
    from jax.experimental import sparse

    grad = sparse.BCOO((jnp.array([[3.0, 0.0], [4.0, 0.0]]), jnp.array([[1], [7]])), shape=(100, 2))
    assert statistics([grad]) == [5.0, 0.5]
