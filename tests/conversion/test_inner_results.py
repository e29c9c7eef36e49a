"""A layer of the user's own adds what a float32 layer inside returns to 16 bits, and rounds it there alone."""

import keras
import numpy as np
import pytest
from keras import layers, ops

import mpkeras
from tests.training.models import DOORS, made_by

X = np.random.default_rng(12).normal(0.4, 0.5, (24, 5)).astype("float32")
Y = X[:, :1]


class Residual(layers.Layer):
    def __init__(self, add=lambda x, y: x + y, **kwargs):
        super().__init__(**kwargs)
        self.add = add
        self.product, self.norm = layers.Dense(5), layers.BatchNormalization(momentum=0.5)

    def call(self, x, training=False):
        return self.add(x, self.norm(self.product(x), training=training))


class Pooled(layers.Layer):
    """Weighs what it is given by a softmax, and by a gate in a model inside."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.scores = layers.Dense(5, "softmax")
        self.gate = keras.Sequential([layers.Dense(7), layers.Dense(5, "sigmoid")])

    def call(self, x):
        return x * self.scores(x) - x * self.gate(x)


class Attention(layers.Layer):
    """Normalizes its queries, and multiplies them with the keys by an operator of the backend."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = layers.RMSNormalization()

    def call(self, x):
        x = ops.reshape(x, (-1, 5, 1))
        weights = ops.softmax(self.norm(x) @ ops.transpose(x, (0, 2, 1)))
        return ops.reshape(ops.matmul(weights, x), (-1, 5))


class Subclassed(keras.Model):
    def __init__(self, inner):
        super().__init__()
        self.first, self.inner, self.head = layers.Dense(5), inner(), layers.Dense(1)

    def call(self, x):
        return self.head(self.inner(self.first(x)))


class Around(Subclassed):
    """The model itself adds what its normalization returns; its head is float32 all the same."""

    def call(self, x):
        x = self.first(x)
        return self.head(x + self.inner(x))


def functional(inner):
    inputs = keras.Input((5,))
    return keras.Model(inputs, layers.Dense(1)(inner()(layers.Dense(5)(inputs))))


def trained(make, inner, door, policy):
    keras.utils.set_random_seed(4)
    model, callbacks = made_by(door, lambda: make(inner), policy)
    loss = model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0, callbacks=callbacks).history["loss"]
    return model, loss


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS[::3])
@pytest.mark.parametrize("inner", [Residual, Pooled])
@pytest.mark.parametrize("make", [functional, Subclassed])
def test_it_trains_as_in_float32(make, inner, door):
    expected, expected_loss = trained(make, inner, "prepare", "float32")
    model, loss = trained(make, inner, door, "mixed_bfloat16")
    np.testing.assert_allclose(loss, expected_loss, rtol=0.03)  # bfloat16 has 8 significant bits
    # Statistics move once a step: with a momentum of 0.5 a second time would show.
    for variable, right in zip(model.non_trainable_variables, expected.non_trainable_variables, strict=True):
        np.testing.assert_allclose(variable, right, rtol=0.05, atol=0.05)
    assert model.layers[-1].compute_dtype == "float32"


def test_the_head_of_such_a_model_stays_in_float32():
    model = Around(lambda: layers.BatchNormalization(momentum=0.9))
    model(X)
    mpkeras.apply_policy(model, "mixed_bfloat16")
    assert keras.backend.standardize_dtype(model(X).dtype) == "float32"
    assert [layer.compute_dtype for layer in model.layers] == ["bfloat16", "float32", "float32"]


def test_attention_of_normalized_queries():
    """Of one number each: normalized, a query is its sign."""
    block = Attention()
    model = keras.Sequential([keras.Input((5,)), layers.Dense(5), block, layers.Dense(1)])
    mpkeras.apply_policy(model, "mixed_bfloat16")
    assert block.norm.compute_dtype == "float32" and block.compute_dtype == "bfloat16"
    weights = np.exp(np.sign(X)[:, :, None] * X[:, None, :])
    expected = np.sum(weights * X[:, None, :], axis=2) / np.sum(weights, axis=2)
    outputs = ops.convert_to_numpy(ops.cast(block(X), "float32"))
    np.testing.assert_allclose(outputs, expected, atol=0.02)  # bfloat16 has 8 significant bits


def test_a_result_is_rounded_only_where_two_dtypes_are_refused():
    shared = Residual(ops.add)
    inputs = keras.Input((5,))
    model = keras.Model(inputs, [layers.Dense(1)(shared(inputs)), shared.norm(inputs)])
    mpkeras.apply_policy(model, "mixed_bfloat16")
    assert shared.norm.compute_dtype == "float32"
    assert keras.backend.standardize_dtype(shared(X).dtype) == "float32"


@pytest.mark.backends("tensorflow")  # others add float32 to bfloat16
def test_elsewhere_the_layer_inside_returns_float32():
    block = Residual()
    inputs = keras.Input((5,))
    model = keras.Model(inputs, [layers.Dense(1)(block(inputs)), block.norm(inputs)])
    mpkeras.apply_policy(model, "mixed_bfloat16")
    assert keras.backend.standardize_dtype(block(X).dtype) == "bfloat16"
    assert keras.backend.standardize_dtype(block.norm(X).dtype) == "float32"
    np.testing.assert_array_equal(model(X)[1], block.norm(X))


class Through(layers.Layer):
    """Adds to its inputs what two layers make of them, one after the other."""

    def __init__(self, up=3e5, **kwargs):
        super().__init__(**kwargs)
        self.wide = layers.Dense(5, kernel_initializer=keras.initializers.Constant(up), name="wide")
        self.narrow = layers.Dense(5, kernel_initializer=keras.initializers.Constant(0.2 / up), name="narrow")

    def call(self, x):
        return x + self.narrow(self.wide(x))


def through():
    block = Through(name="block")
    return block, keras.Sequential([keras.Input((5,)), block, layers.Dense(1, name="head")], name="net")


def test_between_layers_that_rules_of_the_users_keep_nothing_is_rounded():
    block, model = through()
    rules = (*mpkeras.policies.default_rules(), "path:wide$", "path:narrow$")
    mpkeras.apply_policy(model, mpkeras.Policy("mixed_float16", keep_float32=rules))
    assert [layer.compute_dtype for layer in (block, block.wide, block.narrow)] == ["float16", "float32", "float32"]
    for batch in (X, X[:3]):
        # 3e5 times the sum of each row, and a fifth of its mean; float16 has 11 significant bits.
        expected = batch + 1.0 * batch.sum(-1, keepdims=True)
        outputs = ops.convert_to_numpy(ops.cast(block(batch), "float32"))
        np.testing.assert_allclose(outputs, expected, rtol=2e-3, atol=2e-3)


class Tied(layers.Layer):
    """Adds what its table makes, as an embedding of words and positions does."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = layers.Dense(1, kernel_initializer="ones")

    def call(self, x):
        return self.table(x) + x


class TiedModel(keras.Model):
    def __init__(self):
        super().__init__()
        self.tied = Tied()

    def call(self, x):
        return self.tied.table(self.tied(x))


def tied_graph():
    tied, inputs = Tied(), keras.Input((1,))
    return keras.Model(inputs, tied.table(tied(inputs)))


@pytest.mark.parametrize("make", [tied_graph, TiedModel])
def test_a_head_that_another_layer_uses_too_is_in_float32_and_rounded_in_there_alone(make):
    with mpkeras.policy_scope("mixed_bfloat16"):
        model = make()
        model.compile("sgd", "mse")
    x = np.ones((1, 1), "float32")
    model(x)
    tied = next(layer for layer in model.layers if isinstance(layer, Tied))
    tied.table.set_weights([np.array([[1.0 + 2**-12]]), np.zeros(1)])
    assert tied.table.compute_dtype == "float32" and tied.compute_dtype == "bfloat16"
    # What `tied` adds is 2 on TensorFlow, in bfloat16, and elsewhere, in float32, more by 2 ** -12.
    once, twice = 2 * (1 + 2**-12), (2 + 2**-12) * (1 + 2**-12)
    assert ops.convert_to_numpy(model(x)).item() in (np.float32(once), np.float32(twice))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*was skipped", "ignore:.*has moved", "ignore:.* steps", "ignore:.*in a row")
@pytest.mark.filterwarnings("ignore:The outputs of layer .* are inf or NaN")
def test_training_goes_on_where_a_layer_inside_has_moved():
    block, model = through()
    model.compile(keras.optimizers.SGD(0.0), "mse")
    fallback = mpkeras.callbacks.Float32Fallback(patience=1)
    mpkeras.prepare(model, "mixed_float16", loss_scale=1.0)
    options = {"batch_size": 8, "verbose": 0, "shuffle": False}
    model.fit(X, Y, epochs=3, callbacks=[fallback], **options)
    assert fallback.moved == ["net/block/wide", "net/block/narrow"]
    assert block.compute_dtype == "float16"
    # What is found out by then is no part of the pass that is looked at.
    assert mpkeras.trace_numerics(model, X[:8], Y[:8]).culprit is None
    skipped = int(model.optimizer.skipped_steps)
    history = model.fit(X, Y, **options).history
    assert int(model.optimizer.skipped_steps) == skipped
    hidden = X + X.sum(-1, keepdims=True)
    kernel = ops.convert_to_numpy(model.layers[-1].kernel)
    np.testing.assert_allclose(history["loss"], np.mean((hidden @ kernel - Y) ** 2), rtol=0.01)
