"""A layer with a float32 activation is wholly in float32, and everything around it in 16 bits."""

import keras
import numpy as np
import pytest
from keras import layers

import mpkeras
from tests.cases import first_quick
from tests.op_trace import casts, exponential_dtypes, product_dtypes, training_ops
from tests.sixteen_bits import without_outputs

POLICIES = ["mixed_float16", "mixed_bfloat16"]
x = np.random.default_rng(0).normal(size=(2, 6, 8)).astype("float32")
IMAGES = np.random.default_rng(0).normal(size=(2, 8, 8, 3)).astype("float32")


def dtype_of(policy):
    return policy.removeprefix("mixed_")


def head(activation="softmax"):
    return keras.Sequential([keras.Input((6, 8)), layers.Dense(64, "relu"), layers.Dense(80, activation)])


def two_heads():
    inputs = keras.Input((6, 8))
    x = layers.Dense(64, "relu")(inputs)
    gate = layers.Dense(64, activation="sigmoid")(x)
    classes = layers.TimeDistributed(layers.EinsumDense("ab,bc->ac", 72, activation="log_softmax"))(x)
    return keras.Model(inputs, [layers.Multiply()([layers.Dense(64)(x), gate]), classes])


def squeeze_and_excite():
    """The gate of EfficientNet and MobileNetV3: convolutions on both sides of a sigmoid."""
    inputs = keras.Input((8, 8, 3))
    x = layers.Conv2D(64, 3)(inputs)
    gate = layers.GlobalAveragePooling2D(keepdims=True)(x)
    gate = layers.Conv2D(64, 1, activation="sigmoid")(layers.Conv2D(64, 1, activation="relu")(gate))
    return keras.Model(inputs, layers.Conv2D(4, 1)(layers.Multiply()([x, gate])))


def attention():
    inputs = keras.Input((6, 8))
    x = layers.MultiHeadAttention(2, 4)(inputs, inputs)
    x = layers.Attention()([x, x, x])
    return keras.Model(inputs, layers.Dense(600, activation="softmax")(x))


@pytest.mark.parametrize("policy", first_quick(POLICIES))
@pytest.mark.parametrize("make", [head, *first_quick([attention, two_heads, squeeze_and_excite])])
def test_products_of_heads_are_in_float32_and_all_others_in_16_bits(make, policy, backend):
    if make is attention and backend == "jax" and policy == "mixed_float16":
        pytest.skip("JAX on CPU has no float16 attention: kept in float32 by a rule that says so")
    if backend == "torch" and policy == "mixed_float16":
        pytest.skip("Keras itself multiplies float16 in float32 on a CPU with torch")
    model = mpkeras.apply_policy(make(), policy)
    # JAX accumulates attention in float32, and says so in the gradients of its products.
    forward_only = make is attention and backend == "jax"
    ops = training_ops(model, IMAGES if make is squeeze_and_excite else x, forward_only)
    assert product_dtypes(ops) == {dtype_of(policy), "float32"}
    expected = {"float32"}
    if make is attention:  # The softmax inside attention is no head.
        expected.add(dtype_of(policy))
    assert "float32" in exponential_dtypes(ops) <= expected


@pytest.mark.backends("tensorflow", "jax")
def test_casts_are_those_that_a_hand_count_gives():
    model = mpkeras.apply_policy(head(), "mixed_bfloat16")
    # The input, the kernel and bias of the first layer, and what the head takes.
    assert casts(training_ops(model, x, forward_only=True)) == 1 + 2 + 1


@pytest.mark.parametrize("policy", POLICIES)
def test_logits_cost_nothing(policy, backend):
    # What `audit` advises in the place of a large head: the product in 16 bits, the loss in float32.
    if backend == "torch" and policy == "mixed_float16":
        pytest.skip("Keras itself multiplies float16 in float32 on a CPU with torch")
    model = mpkeras.apply_policy(head("linear"), without_outputs(policy))
    assert product_dtypes(training_ops(model, x)) == {dtype_of(policy)}
    assert model.outputs[0].dtype == "float32"


@pytest.mark.backends("tensorflow")
def test_a_head_is_a_stock_float32_layer_for_everyone_else():
    model = mpkeras.apply_policy(head(), "mixed_bfloat16")
    layer = model.layers[-1]
    assert layer.dtype_policy == keras.DTypePolicy("float32") and model.outputs[0].dtype == "float32"
    assert layer.get_config()["activation"] == "softmax" and "mpkeras." not in str(model.get_config())
    copy = keras.Sequential.from_config(model.get_config())
    assert [layer.compute_dtype for layer in copy.layers] == ["bfloat16", "float32"]


def test_an_activation_that_the_user_has_changed_is_the_users():
    model = head()
    model.compile("sgd", "mse")
    mpkeras.prepare(model, "mixed_bfloat16")
    model.layers[-1].activation = keras.activations.linear
    expected = head("linear")
    expected.set_weights(model.get_weights())
    logits = model(x)
    assert keras.backend.standardize_dtype(logits.dtype) == "float32"
    np.testing.assert_allclose(
        keras.ops.convert_to_numpy(logits), keras.ops.convert_to_numpy(expected(x)), rtol=0.1, atol=0.05
    )
    mpkeras.apply_policy(model, "float32")
    assert model.layers[-1].activation is keras.activations.linear
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(model(x)), keras.ops.convert_to_numpy(expected(x)))


def test_a_call_that_the_user_has_wrapped_since_computes_as_the_layer_says():
    model = mpkeras.apply_policy(head(), "mixed_bfloat16")
    last, reference = model.layers[-1], head()
    reference.set_weights(model.get_weights())
    ours, seen = last.call, []

    def call_and_count(*args, **kwargs):
        seen.append(True)
        return ours(*args, **kwargs)

    last.call = call_and_count
    mpkeras.apply_policy(model, "float32")
    assert last.call is call_and_count
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(model(x)), keras.ops.convert_to_numpy(reference(x)))
    assert seen


def test_a_file_with_the_mark_of_a_split_head_loads(tmp_path):
    """Earlier versions split large heads, and marked them by an entry of a `DTypePolicyMap` that matches no path."""
    model = mpkeras.apply_policy(head(), "mixed_bfloat16")
    entry = {"mpkeras: product in 16 bits(?!)": keras.DTypePolicy("mixed_bfloat16")}
    marked = keras.Sequential(
        [
            keras.Input((6, 8)),
            layers.Dense(64, "relu", dtype="mixed_bfloat16"),
            layers.Dense(80, "softmax", dtype=keras.dtype_policies.DTypePolicyMap("float32", entry)),
        ]
    )
    marked.set_weights(model.get_weights())
    marked.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    mpkeras.apply_policy(loaded, "mixed_bfloat16")
    assert [layer.compute_dtype for layer in loaded.layers] == ["bfloat16", "float32"]
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(loaded(x)), keras.ops.convert_to_numpy(model(x)))
    mpkeras.apply_policy(loaded, "float32")
    assert [layer.compute_dtype for layer in loaded.layers] == ["float32", "float32"]


class Gated(layers.Layer):
    """Makes layers in its `call`, as the functions of `keras.layers` do."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.gate = layers.Dense(3)

    def build(self, input_shape):
        self.gate.build(input_shape)
        self.scale = self.add_weight(shape=(input_shape[-1] + 3,), initializer=keras.initializers.Constant(1.37))

    def call(self, inputs):
        joined = layers.concatenate([inputs, self.gate(inputs)])
        return joined * self.scale + layers.multiply([joined, joined])

    def compute_output_shape(self, input_shape):
        return (*input_shape[:-1], input_shape[-1] + 3)


class Counting(Gated):
    def build(self, input_shape):
        super().build(input_shape)
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs):
        self.calls.assign(self.calls + 1.0)
        return super().call(inputs)


class Island(Gated):
    call = mpkeras.float32_island(Gated.call)


def _as_compiled(policy, make, values):
    keras.utils.set_random_seed(5)
    with mpkeras.policy_scope(policy):
        model = make()
        model.compile("sgd", "mse")
        return keras.ops.convert_to_numpy(model(values))


@pytest.mark.parametrize(
    ("kind", "rules"),
    [
        pytest.param(Gated, (..., "path:gated"), id="by a rule"),
        pytest.param(Gated, (...,), id="it makes the outputs"),
        pytest.param(Counting, (...,), id="it writes state"),
        pytest.param(Island, (...,), id="by the decorator"),
    ],
)
@pytest.mark.parametrize("policy", first_quick(POLICIES))
def test_layers_that_the_call_of_one_in_float32_makes_are_in_float32(kind, rules, policy):
    values = np.random.default_rng(1).uniform(20.3, 41.7, size=(5, 4)).astype("float32")

    def make():
        return keras.Sequential([keras.Input((4,)), kind(name="gated")])

    expected = _as_compiled("float32", make, values)
    outputs = _as_compiled(mpkeras.Policy(policy, keep_float32=rules), make, values)
    # Only the `Dense` inside may round what it is given.
    np.testing.assert_allclose(outputs[:, :4], expected[:, :4], rtol=1e-6)
    np.testing.assert_allclose(outputs, expected, rtol=0.03, atol=3)


class Parameters(layers.Layer):
    """The parameters of a mixture, as one output."""

    def __init__(self):
        super().__init__()
        self.parts = [layers.Dense(2), layers.Dense(3, activation="softplus")]

    def build(self, input_shape):
        for part in self.parts:
            part.build(input_shape)
        super().build(input_shape)

    def call(self, inputs, mask=None):
        return layers.concatenate([part(inputs) for part in self.parts])


class Mean(keras.Model):
    def __init__(self):
        super().__init__()
        self.members = [keras.Sequential([layers.Dense(6, "relu"), layers.Dense(4)]) for _ in range(2)]

    def call(self, inputs):
        return layers.average([member(inputs) for member in self.members])


class Rating(keras.Model):
    def __init__(self):
        super().__init__()
        self.user, self.item, self.level = layers.Embedding(30, 5), layers.Embedding(30, 5), layers.Embedding(30, 1)

    def call(self, inputs):
        likes = layers.Dot(axes=-1)([self.user(inputs[:, 0]), self.item(inputs[:, 1])])
        return layers.add([likes, self.level(inputs[:, 1])]) * 37.3


class Twice(keras.Model):
    """Layers that a call makes, in front of what makes the outputs and behind it."""

    def __init__(self):
        super().__init__()
        self.first, self.mean, self.trend = layers.Dense(7, "tanh"), layers.Dense(2), layers.Dense(2)

    def call(self, inputs):
        x = layers.concatenate([self.first(inputs), self.first(0.25 * inputs)])
        return layers.subtract([self.mean(x), self.trend(x)])


@pytest.mark.parametrize("kind", [Parameters, *first_quick([Twice, Mean, Rating])])
def test_outputs_that_a_layer_made_in_a_call_joins_are_not_rounded(kind):
    values = np.random.default_rng(2).integers(0, 30, size=(40, 4))

    def make():
        joining = kind()
        first = layers.Dense(7, "tanh")
        return keras.Sequential([keras.Input((4,)), first, joining]) if kind is Parameters else joining

    outputs = _as_compiled("mixed_bfloat16", make, values if kind is Rating else values.astype("float32"))
    rounded = keras.ops.cast(keras.ops.cast(outputs, "bfloat16"), "float32")
    # By chance a number of float32 is one of bfloat16 in one of 65536 cases.
    assert np.mean(keras.ops.convert_to_numpy(rounded) == outputs) < 0.05
