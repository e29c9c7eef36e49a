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
@pytest.mark.parametrize("make", [head, two_heads, squeeze_and_excite, attention])
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
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    mpkeras.apply_policy(loaded, "float32")
    assert [layer.compute_dtype for layer in loaded.layers] == ["float32", "float32"]
