"""Attention layers: Keras' forward pass, a backward pass in float32 from probabilities that are kept in 16 bits."""

import functools
import importlib

import keras
import numpy as np
import pytest
from keras import layers, ops

import mpkeras
from mpkeras._replaced import is_replaced
from tests.conversion.derivatives import derivatives
from tests.sixteen_bits import without_outputs

pytestmark = pytest.mark.backends("jax", "tensorflow")
rng = np.random.default_rng(0)
X = rng.normal(size=(3, 5, 8)).astype("float32")
# The third example's second query may look at nothing.
MASK = rng.random((3, 5, 5)) < 0.7
MASK[2, 1] = False

LAYERS = {
    # Without dropout Keras leaves all of it to `keras.ops.dot_product_attention`.
    "fused MultiHeadAttention": lambda: layers.MultiHeadAttention(2, 4),
    "fused GroupQueryAttention": lambda: layers.GroupQueryAttention(4, 4, 2),
    "MultiHeadAttention": lambda: layers.MultiHeadAttention(2, 4, dropout=1e-9),
    "GroupQueryAttention": lambda: layers.GroupQueryAttention(4, 2, 1, dropout=1e-9),
}


def model_of(make, policy, shape=(5, 8)):
    keras.utils.set_random_seed(1)
    inputs = keras.Input(shape)
    model = keras.Model(inputs, make()(inputs, inputs))
    if policy is not None:
        mpkeras.apply_policy(model, without_outputs(policy))
    return model


def stock_of(make, shape=(5, 8)):
    """The layer as Keras has it under its own policy, without what mpkeras changes."""
    model = model_of(make, None, shape)
    for layer in attention_layer(model)._flatten_layers():
        layer.dtype_policy = keras.DTypePolicy("mixed_bfloat16")
    return model


# TensorFlow keeps no float32 probabilities where Keras takes the softmax itself.
REPLACED = {"jax": {"_masked_softmax", "_compute_attention"}, "tensorflow": {"_compute_attention"}}


def replaced(layer):
    return {name for name in ("_masked_softmax", "_compute_attention") if is_replaced(layer, name, "attention")}


def is_applied(layer):
    found = replaced(layer)
    assert found in (set(), REPLACED[keras.backend.backend()])
    return bool(found)


def attention_layer(model):
    return model.layers[1]


def gradient(model, x, **options):
    layer = attention_layer(model)

    def total(x):
        y = ops.cast(layer(x, x, **options), "float32")
        return ops.sum(y * y)

    return as_float32(derivatives(total, ops.cast(x, layer.compute_dtype))[0]).astype("float64")


def as_float32(tensor):
    return ops.convert_to_numpy(ops.cast(tensor, "float32"))


CALLS = {
    "all": {},
    "masked": {"attention_mask": MASK},
    "one mask for all": {"attention_mask": MASK[2]},
    "causal": {"use_causal_mask": True},
    "masked and causal": {"attention_mask": MASK, "use_causal_mask": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)
def test_forward_is_stock_and_the_gradient_as_near_to_float32(name, options):
    make = LAYERS[name]
    ours, stock, reference = model_of(make, "mixed_bfloat16"), stock_of(make), model_of(make, None)
    assert is_applied(attention_layer(ours))
    stock.set_weights(ours.get_weights())
    reference.set_weights(ours.get_weights())
    y = [as_float32(attention_layer(m)(X, X, **options)) for m in (ours, stock)]
    np.testing.assert_array_equal(*y)

    exact = gradient(reference, X, **options)
    differences = [gradient(m, X, **options) - exact for m in (ours, stock)]
    our_error, stock_error = map(np.linalg.norm, differences)
    assert our_error < 1.25 * stock_error
    assert our_error < 0.03 * np.linalg.norm(exact)
    assert np.abs(differences[0]).max() < 0.03 * np.abs(exact).max()


def test_over_several_axes():
    make = functools.partial(layers.MultiHeadAttention, 2, 4, dropout=1e-9, attention_axes=(1, 2))
    ours, reference = (model_of(make, policy, shape=(3, 2, 8)) for policy in ("mixed_bfloat16", None))
    reference.set_weights(ours.get_weights())
    x = rng.normal(size=(2, 3, 2, 8)).astype("float32")
    exact = gradient(reference, x)
    np.testing.assert_allclose(gradient(ours, x), exact, atol=0.03 * np.abs(exact).max())


@pytest.mark.backends("jax")
@pytest.mark.parametrize("name", ["fused MultiHeadAttention", "fused GroupQueryAttention"])
def test_of_the_size_of_the_scores_nothing_is_kept_in_float32(name):
    import jax

    x = np.zeros((1, 512, 8), "float32")
    scores = (4 if "Group" in name else 2) * 512 * 512

    def temporaries(make, count):
        layers = [attention_layer(make(LAYERS[name])) for _ in range(count)]

        def total(x):
            for layer in layers:
                x = x + layer(x, x)
            return x.astype("float32").sum()

        x16 = jax.numpy.asarray(x, layers[0].compute_dtype)
        return jax.jit(jax.grad(total)).lower(x16).compile().memory_analysis().temp_size_in_bytes

    def kept_by_each(make):
        # What a layer works with comes and goes; what it keeps for the backward pass is there for each of them.
        return (temporaries(make, 12) - temporaries(make, 4)) / 8 / scores

    ours = kept_by_each(functools.partial(model_of, policy="mixed_bfloat16", shape=x.shape[1:]))
    # A CPU widens all 16-bit numbers, and keeps some of them so; what an H100 keeps is in `test_forecast.py`.
    assert ours < 6.2
    # Since JAX 0.11 the program of its own attention keeps as little on a CPU (0.10.2: 8.1).
    assert ours < kept_by_each(stock_of)


@pytest.mark.backends("tensorflow")
def test_a_graph_keeps_a_third_of_the_bytes():
    import tensorflow as tf

    make = functools.partial(layers.MultiHeadAttention, 2, 4)
    size = 3 * 2 * 64 * 64

    def kept_for_backward_pass(model):
        forward: set = set()

        @tf.function(autograph=False)
        def gradients(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.cast(model(x), "float32") ** 2)
            forward.update(tf.compat.v1.get_default_graph().get_operations())
            return tape.gradient(loss, model.trainable_variables)

        graph = gradients.get_concrete_function(tf.TensorSpec((3, 64, 8), "bfloat16")).graph
        backward = set(graph.get_operations()) - forward
        read = {made_by(tensor) for operation in backward for tensor in operation.inputs if tensor.op in forward}
        return sorted(dtype.size for _, dtype, elements in read if dtype.is_floating and elements == size)

    def made_by(tensor):
        # What only hands a tensor on makes no other one.
        while tensor.op.type in ("Identity", "IdentityN"):
            tensor = tensor.op.inputs[tensor.value_index]
        return tensor.name, tensor.dtype, tensor.shape.num_elements()

    # Of each score 2 bytes, and 6 by Keras' own attention.
    assert kept_for_backward_pass(model_of(make, "mixed_bfloat16", (64, 8))) == [2]
    assert kept_for_backward_pass(stock_of(make, (64, 8))) == [2, 4]


@pytest.mark.parametrize("flash_attention", [True, False])
def test_whoever_asks_for_a_kernel_gets_keras_own(flash_attention):
    """There is none on a CPU: Keras says so where it was asked for (from 3.11 on), and ours must not hide it."""
    make = functools.partial(layers.MultiHeadAttention, 2, 4, flash_attention=flash_attention)
    layer = attention_layer(stock_of(make))
    x = ops.cast(X, "bfloat16")
    try:
        expected = as_float32(layer(x, x))
    except Exception as error:
        expected = error
    model = model_of(make, "mixed_bfloat16")
    assert is_applied(attention_layer(model))
    if isinstance(expected, Exception):
        with pytest.raises(type(expected)):
            attention_layer(model)(x, x)
    else:
        np.testing.assert_array_equal(as_float32(attention_layer(model)(x, x)), expected)


@pytest.mark.parametrize(
    ("heads", "x", "options"),
    [
        # The first step of a generation: JAX on a CPU has no such product with the sums that are asked for.
        pytest.param(1, X[:1, :1], {"use_causal_mask": True}, id="one query and one key of one head"),
        pytest.param(2, X, {"return_attention_scores": True}, id="scores are returned"),
    ],
)
def test_in_eager_code_as_stock(heads, x, options):
    make = functools.partial(layers.MultiHeadAttention, heads, 4)
    ours, stock = model_of(make, "mixed_bfloat16"), stock_of(make)
    stock.set_weights(ours.get_weights())
    results = [attention_layer(m)(ops.cast(x, "bfloat16"), ops.cast(x, "bfloat16"), **options) for m in (ours, stock)]
    for mine, theirs in zip(*map(keras.tree.flatten, results), strict=True):
        np.testing.assert_array_equal(as_float32(mine), as_float32(theirs))


def test_the_derivative_is_that_of_softmax():
    """With two keys, and values of one and zero, the result is a probability; its derivatives are known."""
    attend = importlib.import_module(f"mpkeras.conversion._{keras.backend.backend()}").dot_product_attention
    query = ops.cast(np.ones((1, 2, 1, 2)), "bfloat16")
    value = ops.cast([[[[1.0, 0.0]], [[0.0, 0.0]]]], "bfloat16")

    def first_probability(scores):
        key = ops.reshape(ops.stack([scores, ops.zeros_like(scores)], axis=-1), (1, 2, 1, 2))
        return ops.cast(attend(query, key, value, 1.0)[0, 0, 0, 0], "float32")

    def slope(scores):
        return ops.cast(derivatives(first_probability, scores)[0][0], "float32")

    scores = ops.cast([0.0, np.log(3.0)], "bfloat16")
    # p = [1/4, 3/4]: dp1/ds1 = p1 (1 - p1) = 3/16, dp1/ds2 = -3/16; twice: p1 (1 - p1) (1 - 2 p1) = 3/32.
    np.testing.assert_allclose(as_float32(derivatives(first_probability, scores)[0]), [3 / 16, -3 / 16], rtol=0.02)
    np.testing.assert_allclose(as_float32(derivatives(slope, scores)[0]), [3 / 32, -3 / 32], rtol=0.05)


@pytest.mark.backends("jax")
def test_the_derivatives_of_the_softmax_itself():
    import jax

    from mpkeras.conversion._jax import softmax_from_probabilities

    scores = jax.numpy.asarray([[0.0, np.log(3.0)]], "bfloat16")
    first = jax.grad(lambda s: softmax_from_probabilities(jax.nn.softmax, -1, s)[0, 0].astype("float32"))
    np.testing.assert_allclose(np.asarray(first(scores), "float32"), [[3 / 16, -3 / 16]], rtol=0.02)
    second = jax.jacfwd(lambda s: first(s)[0, 0])(scores)
    np.testing.assert_allclose(np.asarray(second, "float32"), [[3 / 32, -3 / 32]], rtol=0.05)


def test_float32_and_the_way_back_are_stock():
    assert not is_applied(attention_layer(model_of(LAYERS["MultiHeadAttention"], "float32")))
    model = model_of(LAYERS["MultiHeadAttention"], "mixed_bfloat16")
    mpkeras.apply_policy(model, "float32")
    layer = attention_layer(model)
    assert not is_applied(layer) and not {"_masked_softmax", "_compute_attention"} & set(vars(layer))


@pytest.mark.parametrize("name", ["_masked_softmax", "_compute_attention"])
def test_what_an_attention_layer_computes_itself_is_left_alone(name):
    def own(self, *args, **kwargs):
        return getattr(layers.MultiHeadAttention, name)(self, *args, **kwargs)

    own_class = type("Own", (layers.MultiHeadAttention,), {name: own})
    layer = attention_layer(model_of(lambda: own_class(2, 4, dropout=0.1), "mixed_bfloat16"))
    assert replaced(layer) == REPLACED[keras.backend.backend()] - {name}


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", [False, True])
@pytest.mark.parametrize("name", ["MultiHeadAttention", "fused MultiHeadAttention"])
def test_trains_and_returns_from_a_file(tmp_path, name, jit_compile):
    model = model_of(LAYERS[name], "mixed_bfloat16")
    model.compile("adam", "mse", jit_compile=jit_compile)
    model.fit(X, X, epochs=2, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", compile=False)
    np.testing.assert_array_equal(as_float32(loaded(X)), as_float32(model(X)))
    loaded.compile(jit_compile=jit_compile)
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))
