import functools

import keras
import numpy as np
import pytest
from keras import layers

from mpkeras.policies import (
    Policy,
    apply_rules,
    kernels,
    layer_policy,
    layers_to_keep,
    set_global_policy,
    set_layer_policy,
    undo_rules,
)
from mpkeras.policies.rules import matches, validate

FLOAT32 = keras.DTypePolicy("float32")


class Block(layers.Layer):
    """A composite layer with attention inside."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = layers.MultiHeadAttention(2, 2, dropout=0.1, name="attention")
        self.normalization = layers.BatchNormalization(name="normalization")
        self.head = layers.Softmax(name="head")

    def call(self, x):
        return self.head(self.normalization(x + self.attention(x, x)))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.block = Block(name="block")
        self.nested = keras.Sequential([layers.Dense(3, activation="softmax", name="dense")], name="nested")

    def call(self, x):
        return self.nested(self.block(x))


def names(model, *rules):
    return {layer.name for layer, _ in layers_to_keep(model, rules)}


def compute_dtypes(model):
    return {layer.name: layer.compute_dtype for layer in model._flatten_layers(include_self=False)}


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        pytest.param(["Softmax", "path:head"], ("Softmax", "path:head"), id="a list"),
        pytest.param((), (), id="none"),
        pytest.param({"b", "a"}, ("a", "b"), id="a set is put in order"),
    ],
)
def test_validate(rules, expected):
    assert validate(rules) == expected


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        pytest.param("Softmax", TypeError, r"\('Softmax',\)", id="a bare string"),
        pytest.param(None, TypeError, "tuple of strings", id="None"),
        pytest.param((layers.Softmax,), TypeError, "Name the layer's class", id="the class itself"),
        pytest.param(("my softmax",), ValueError, "Received: 'my softmax'", id="a space"),
        pytest.param(("",), ValueError, "layer class name", id="empty"),
        pytest.param(("activation:",), ValueError, "name of an activation", id="no activation"),
        pytest.param(("name:head",), ValueError, "'path:' with its `layer.path`", id="unknown prefix"),
        pytest.param(("path:",), ValueError, "every layer", id="empty expression"),
        pytest.param(("path:he(ad",), ValueError, "regular expression.*Put a backslash", id="bad expression"),
    ],
)
def test_bad_rules_are_answered_with_the_remedy(rules, error, message):
    with pytest.raises(error, match=message):
        validate(rules)


@functools.wraps(keras.activations.softmax)
def wrapped_softmax(x):
    return keras.activations.softmax(x)


class MySoftmax(layers.Softmax):
    pass


@pytest.mark.parametrize(
    ("rule", "layer", "expected"),
    [
        pytest.param("Softmax", layers.Softmax(), True, id="its class"),
        pytest.param("Softmax", MySoftmax(), True, id="a subclass"),
        pytest.param("MySoftmax", layers.Softmax(), False, id="not the base of the class"),
        pytest.param("Soft", layers.Softmax(), False, id="part of the name"),
        pytest.param("activation:softmax", layers.Dense(1, activation="softmax"), True, id="activation by name"),
        pytest.param("activation:softmax", layers.Activation("softmax"), True, id="Activation layer"),
        pytest.param("activation:softmax", layers.Dense(1, activation=wrapped_softmax), True, id="wrapped"),
        pytest.param("activation:softmax", layers.Dense(1, activation="relu"), False, id="another activation"),
        pytest.param("activation:linear", layers.Dense(1), True, id="the default activation"),
        pytest.param("activation:softmax", layers.Flatten(), False, id="no activation"),
        pytest.param("path:hea", layers.Dense(1, name="my_head"), True, id="found anywhere in the name"),
        pytest.param("path:^head", layers.Dense(1, name="my_head"), False, id="tied to the start"),
    ],
)
def test_matches(rule, layer, expected):
    assert matches(rule, layer) is expected


def test_path_is_searched_once_the_layer_is_built():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2, name="dense")], name="outer")
    assert matches("path:^outer/dense$", model.layers[0])


def test_walks_functional_sequential_and_subclassed_models():
    inputs = keras.Input((3, 4))
    outputs = keras.Sequential([Block(name="block"), layers.Softmax(name="last")])(inputs)
    functional = keras.Model(inputs, layers.Dense(2, activation="softmax", name="dense")(outputs))
    assert names(functional, "Softmax", "activation:softmax") == {"head", "last", "dense"}
    assert names(Subclassed(), "Softmax", "activation:softmax") == {"head", "dense"}


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(lambda: layers.MultiHeadAttention(2, 2, dropout=0.1), id="MultiHeadAttention"),
        pytest.param(lambda: layers.GroupQueryAttention(2, 2, 1, dropout=0.1), id="GroupQueryAttention"),
    ],
)
def test_attention_looks_after_its_own_softmax(layer):
    set_global_policy("mixed_bfloat16")
    layer = layer()
    query = np.ones((1, 3, 4), "float32")
    layer(query, query)
    model = keras.Sequential([layer])
    assert layers_to_keep(model, ("Softmax",)) == layers_to_keep(layer, ("Softmax",)) == []
    assert apply_rules(model, Policy("mixed_bfloat16")) == []
    assert keras.backend.standardize_dtype(layer(query, query).dtype) == "bfloat16"


def test_a_rule_on_a_layer_holds_for_everything_inside_it():
    block = Block(name="block")
    block(np.ones((1, 3, 4), "float32"))
    inside = {layer.name for layer in block._flatten_layers(include_self=False)}
    assert {"attention", "query", "normalization", "head"} <= inside
    assert names(keras.Sequential([block]), "Block") == {"block", *inside}


def test_a_layer_used_twice_is_kept_where_one_use_is():
    shared = layers.Dense(2, name="shared")

    class Holder(layers.Layer):
        def __init__(self, layer, **kwargs):
            super().__init__(**kwargs)
            self.layer = layer

    model = keras.Sequential([shared, Holder(shared, name="holder")])
    assert names(model, "Holder") == {"shared", "holder"}


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_time_distributed_goes_with_the_layer_it_wraps(policy):
    # It runs `layer.call`, so that the policy of the layer alone changes nothing.
    set_global_policy(policy)
    dense = layers.Dense(3, activation="softmax", name="dense")
    model = keras.Sequential([keras.Input((2, 4)), layers.TimeDistributed(dense, name="each")])
    assert names(model, "activation:softmax") == {"each", "dense"}
    apply_rules(model, Policy(policy))
    assert keras.backend.standardize_dtype(model(np.ones((1, 2, 4), "float32")).dtype) == "float32"


def test_bidirectional_is_walked():
    model = keras.Sequential([layers.Bidirectional(layers.LSTM(2, activation="sigmoid", name="lstm"))])
    assert {"forward_lstm", "backward_lstm"} <= names(model, "activation:sigmoid")


def test_apply_returns_what_it_changed_and_can_be_undone():
    set_global_policy("mixed_float16")
    model = Subclassed()
    model(np.ones((1, 3, 4), "float32"))
    before = compute_dtypes(model)
    # No attention rule: it is the business of `missing_kernel_rules`.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_TRIALS", {})
        applied = apply_rules(model, Policy("mixed_float16", keep_float32=("Softmax", "path:nested/dense")))
        assert [(change.layer.name, change.rule) for change in applied] == [
            ("head", "Softmax"),
            ("dense", "path:nested/dense"),
        ]
        assert "gradient NaN" in applied[0].reason
        assert applied[1].reason == "kept in float32 by the policy 'mixed_float16'"
        assert [change.old_policy for change in applied] == [keras.DTypePolicy("mixed_float16")] * 2
        assert [type(change.layer.dtype_policy) for change in applied] == [keras.DTypePolicy] * 2
        assert compute_dtypes(model) == {**before, "head": "float32", "dense": "float32"}
        assert apply_rules(model, Policy("mixed_float16")) != [] and apply_rules(model, Policy("float16")) == []
    undo_rules(applied)
    assert compute_dtypes(model)["head"] == compute_dtypes(model)["dense"] == "float16"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_layers_that_do_not_compute_in_16_bits_are_left_alone(dtype):
    model = keras.Sequential([layers.Softmax(dtype=dtype), layers.Softmax(dtype="mixed_float16")])
    applied = apply_rules(model, Policy("mixed_float16"))
    assert [change.layer for change in applied] == [model.layers[1]]
    assert model.layers[0].compute_dtype == dtype


@pytest.mark.parametrize("mode", ["int8", "float8"])
def test_quantized_layers_are_left_alone(mode):
    dense = layers.Dense(2, activation="softmax", dtype="mixed_bfloat16")
    model = keras.Sequential([keras.Input((4,)), dense])
    dense.quantize(mode)
    policy = dense.dtype_policy
    assert apply_rules(model, Policy("mixed_bfloat16")) == []
    assert dense.dtype_policy is policy


def test_a_single_layer():
    layer = layers.Softmax(dtype="mixed_float16")
    assert [change.layer for change in apply_rules(layer, Policy("mixed_float16"))] == [layer]


def test_policy_map_of_a_layer():
    policy_map = keras.dtype_policies.DTypePolicyMap("mixed_bfloat16")
    first = layers.Dense(2, activation="softmax", name="first", dtype=policy_map)
    second = layers.Dense(2, name="second", dtype=policy_map)
    model = keras.Sequential([keras.Input((4,)), first, second], name="outer")
    applied = apply_rules(model, Policy("mixed_bfloat16"))
    assert [(change.layer, change.old_policy.name) for change in applied] == [(first, "mixed_bfloat16")]
    assert (first.compute_dtype, second.compute_dtype) == ("float32", "bfloat16")
    assert layer_policy(first) == FLOAT32
    undo_rules(applied)
    assert (first.compute_dtype, second.compute_dtype) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize(
    "statistics",
    [
        pytest.param({"mean": 7e4, "variance": 4e8}, id="given"),
        pytest.param(None, id="adapted"),
    ],
)
def test_normalization_forgets_statistics_that_float16_made_infinite(statistics):
    layer = layers.Normalization(axis=None, dtype="mixed_float16", **(statistics or {}))
    data = np.array([[5e4], [9e4]], "float32")  # Mean 7e4, variance 4e8: both are inf in float16.
    layer.build((None, 1))
    if statistics is None:
        layer.adapt(data)
    set_layer_policy(layer, FLOAT32)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(layer(data)), [[-1.0], [1.0]], rtol=1e-6)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize("value", [0.0, 300.0, 1e5])
@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(lambda: layers.BatchNormalization(epsilon=1e-12), id="BatchNormalization"),
        pytest.param(lambda: layers.LayerNormalization(epsilon=1e-12), id="LayerNormalization"),
        pytest.param(lambda: layers.GroupNormalization(2, epsilon=1e-12), id="GroupNormalization"),
        pytest.param(lambda: layers.RMSNormalization(epsilon=1e-12), id="RMSNormalization"),
        pytest.param(layers.UnitNormalization, id="UnitNormalization"),
        pytest.param(lambda: layers.Normalization(mean=7e4, variance=1e6), id="Normalization"),
        pytest.param(lambda: layers.Rescaling(1e-4), id="Rescaling"),
        pytest.param(lambda: layers.SpectralNormalization(layers.Dense(2, name="inner")), id="SpectralNorm"),
    ],
)
def test_range_of_kept_layers_is_that_of_float32(layer, value, policy):
    # P6. Signs alternate, so that there is something to normalize.
    inputs = (value * np.array([[1, -1, 1, -1], [-1, -1, 1, 1]])).astype("float32")
    keras.utils.set_random_seed(0)
    expected = layer()(inputs)
    set_global_policy(policy)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([layer()])
    apply_rules(model, Policy(policy))
    outputs = keras.ops.convert_to_numpy(keras.ops.cast(model.layers[0](inputs), "float32"))
    assert np.isfinite(outputs).all()
    # bfloat16 has 8 significant bits: LayerNormalization and GroupNormalization round their output once.
    np.testing.assert_allclose(outputs, keras.ops.convert_to_numpy(expected), rtol=1e-2, atol=1e-2)
