"""The softmax of attention layers on JAX: Keras' forward pass, a backward pass in float32 from 16-bit probabilities."""

import keras
import numpy as np
import pytest
from keras import layers

import mpkeras
from mpkeras._replaced import is_replaced

pytestmark = pytest.mark.backends("jax")
rng = np.random.default_rng(0)
X = rng.normal(size=(3, 5, 8)).astype("float32")
# The third example's second query may look at nothing.
MASK = rng.random((3, 5, 5)) < 0.7
MASK[2, 1] = False

LAYERS = {
    "MultiHeadAttention": lambda: layers.MultiHeadAttention(2, 4, dropout=1e-9),
    "GroupQueryAttention": lambda: layers.GroupQueryAttention(4, 2, 1, dropout=1e-9),
    "over two axes": lambda: layers.MultiHeadAttention(2, 4, dropout=1e-9, attention_axes=(1, 2)),
}


def model_of(make, policy, shape=(5, 8)):
    keras.utils.set_random_seed(1)
    inputs = keras.Input(shape)
    model = keras.Model(inputs, make()(inputs, inputs))
    if policy is not None:
        mpkeras.apply_policy(model, policy)
    return model


def is_applied(layer):
    return is_replaced(layer, "_masked_softmax", "attention")


def attention_layer(model):
    return model.layers[1]


def gradient(model, x, mask=None):
    import jax

    layer = attention_layer(model)
    dtype = layer.compute_dtype

    def total(x):
        y = layer(x, x, attention_mask=mask)
        return (y.astype("float32") ** 2).sum()

    return np.asarray(jax.grad(total)(jax.numpy.asarray(x, dtype)), "float64")


@pytest.mark.parametrize("name", ["MultiHeadAttention", "GroupQueryAttention"])
@pytest.mark.parametrize("mask", [None, MASK], ids=["all", "masked"])
def test_forward_is_stock_and_the_gradient_as_near_to_float32(name, mask):
    ours = model_of(LAYERS[name], "mixed_bfloat16")
    stock = model_of(LAYERS[name], None)
    reference = model_of(LAYERS[name], None)
    assert is_applied(attention_layer(ours))
    for layer in attention_layer(stock)._flatten_layers():
        layer.dtype_policy = keras.DTypePolicy("mixed_bfloat16")
    stock.set_weights(ours.get_weights())
    reference.set_weights(ours.get_weights())
    y = [np.asarray(attention_layer(m)(X, X, attention_mask=mask), "float32") for m in (ours, stock)]
    np.testing.assert_array_equal(*y)

    exact = gradient(reference, X, mask)
    size = np.abs(exact).max()
    our_error, stock_error = (np.abs(gradient(m, X, mask) - exact).max() / size for m in (ours, stock))
    assert our_error < max(1.25 * stock_error, 2 * 2.0**-8)
    assert our_error < 0.03


def test_over_several_axes():
    ours = model_of(LAYERS["over two axes"], "mixed_bfloat16", shape=(3, 2, 8))
    reference = model_of(LAYERS["over two axes"], None, shape=(3, 2, 8))
    reference.set_weights(ours.get_weights())
    x = rng.normal(size=(2, 3, 2, 8)).astype("float32")
    exact = gradient(reference, x)
    np.testing.assert_allclose(gradient(ours, x), exact, atol=0.03 * np.abs(exact).max())


def test_the_derivative_is_that_of_softmax():
    import jax

    from mpkeras.conversion._jax import softmax_from_probabilities

    def softmax(scores, mask):
        return jax.nn.softmax(scores, axis=-1)

    scores = jax.numpy.asarray([[0.0, np.log(3.0)]], "bfloat16")
    # p = [1/4, 3/4]: dp1/ds1 = p1 (1 - p1) = 3/16, dp1/ds2 = -3/16; twice: p1 (1 - p1) (1 - 2 p1) = 3/32.
    first = jax.grad(lambda s: softmax_from_probabilities(softmax, -1, s, None)[0, 0].astype("float32"))
    np.testing.assert_allclose(np.asarray(first(scores), "float32"), [[3 / 16, -3 / 16]], rtol=0.02)
    second = jax.jacfwd(lambda s: first(s)[0, 0])(scores)
    np.testing.assert_allclose(np.asarray(second, "float32"), [[3 / 32, -3 / 32]], rtol=0.05)


def test_float32_and_the_way_back_are_stock():
    assert not is_applied(attention_layer(model_of(LAYERS["MultiHeadAttention"], "float32")))
    model = model_of(LAYERS["MultiHeadAttention"], "mixed_bfloat16")
    mpkeras.apply_policy(model, "float32")
    layer = attention_layer(model)
    assert not is_applied(layer) and "_masked_softmax" not in vars(layer)


def test_an_attention_layer_with_a_softmax_of_its_own_is_left_alone():
    class Own(layers.MultiHeadAttention):
        def _masked_softmax(self, attention_scores, attention_mask=None):
            return super()._masked_softmax(attention_scores, attention_mask)

    model = model_of(lambda: Own(2, 4, dropout=0.1), "mixed_bfloat16")
    assert not is_applied(attention_layer(model))


def test_trains_and_returns_from_a_file(tmp_path):
    model = model_of(LAYERS["MultiHeadAttention"], "mixed_bfloat16")
    model.compile("adam", "mse")
    model.fit(X, X, epochs=2, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", compile=False)
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))
