import ast
import functools
import re

import keras
import numpy as np
import pytest
from keras import layers

import mpkeras
from mpkeras import set_global_policy
from mpkeras.conversion.plan import plan
from mpkeras.policies import (
    DEFAULT_RULES,
    Policy,
    default_rules,
    describe_rules,
    kernels,
    layer_policy,
    layers_to_keep,
    set_layer_policy,
)
from mpkeras.policies.heads import OUTPUTS
from mpkeras.policies.rules import matches, unmatched, validate
from tests.cases import first_quick
from tests.sixteen_bits import without_outputs

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


def kept(model, policy) -> list:
    """Returns the rows of the layers that a rule, or a missing kernel, moves to float32."""
    return [row for row in plan(model, policy) if row.rule is not None and row.after is not row.before]


def compute_dtypes(model):
    return {layer.name: layer.compute_dtype for layer in model._flatten_layers(include_self=False)}


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (["Softmax", "path:head"], ("Softmax", "path:head")),
        ((), ()),
        ({"b", "a"}, ("a", "b")),
        ([layers.Softmax, "mine>Head"], (layers.Softmax, "mine>Head")),
    ],
    ids=["a list", "none", "a set is put in order", "a class, and one by its package"],
)
def test_validate(rules, expected):
    assert validate(rules) == expected


@pytest.mark.parametrize(
    ("rules", "error", "message"),
    [
        pytest.param("Softmax", TypeError, r"\(\.\.\., 'Softmax'\)", id="a bare string"),
        pytest.param(None, TypeError, "tuple of rules", id="None"),
        pytest.param((keras.Variable,), TypeError, "Name the layer's class", id="another class"),
        pytest.param((3,), TypeError, "a string, a layer class or a layer", id="a number"),
        pytest.param(layers.Softmax, TypeError, "tuple of rules", id="a bare class"),
        pytest.param(("mine>",), ValueError, "layer class name", id="a package alone"),
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


@keras.saving.register_keras_serializable(package="mine")
class MySoftmax(layers.Softmax):
    pass


HEAD = layers.Dense(1, name="head")


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
        pytest.param("MaxPool2D", layers.MaxPooling2D(), True, id="one of the names that Keras has for it"),
        pytest.param("MaxPooling2D", layers.MaxPool2D(), True, id="the other name"),
        pytest.param("MaxPool2D", layers.MaxPool1D(), False, id="a name of another class"),
        pytest.param("GroupQueryAttention", layers.GroupQueryAttention(2, 2, 1), True, id="the name in Keras' API"),
        pytest.param("GroupedQueryAttention", layers.GroupQueryAttention(2, 2, 1), True, id="the name of the class"),
        pytest.param("Convolution2DTranspose", layers.Conv2DTranspose(1, 1), True, id="an old name"),
        pytest.param("serialize", layers.Dense(1), False, id="a function of keras.layers"),
        pytest.param("mine>MySoftmax", MySoftmax(), True, id="the name that it is saved under"),
        pytest.param("other>MySoftmax", MySoftmax(), False, id="of another package"),
        pytest.param(layers.Softmax, MySoftmax(), True, id="the class itself"),
        pytest.param(MySoftmax, layers.Softmax(), False, id="a class derived from its own"),
        pytest.param(HEAD, HEAD, True, id="the layer itself"),
        pytest.param(HEAD, layers.Dense(1, name="head"), False, id="another layer of the same name"),
    ],
)
def test_matches(rule, layer, expected):
    assert matches(rule, layer) is expected


def test_path_is_searched_once_the_layer_is_built():
    assert matches("path:^net/body$", three_layers().layers[0])


def test_classes_and_layers_are_rules_like_their_names():
    inputs = keras.Input((4,))
    x = layers.Dense(3, name="first", dtype="mixed_bfloat16")(inputs)
    x = MySoftmax(name="weights", dtype="mixed_bfloat16")(x)
    model = keras.Model(inputs, layers.Dense(2, name="second", dtype="mixed_bfloat16")(x))
    policy = Policy("mixed_bfloat16", keep_float32=(MySoftmax, model.layers[-1]))
    assert [(row.layer.name, row.rule) for row in kept(model, policy)] == [
        ("weights", "mine>MySoftmax"),
        ("second", "path:^second$"),
    ]
    assert policy.keeps_float32(model.layers[-1]) is model.layers[-1]


def test_a_policy_with_classes_and_layers_is_saved_by_name_and_path():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(2, name="a+b")], name="net")
    policy = Policy("mixed_bfloat16", keep_float32=(MySoftmax, layers.LayerNormalization, model.layers[0], "path:x"))
    loaded = Policy.from_config(policy.get_config())
    assert loaded.keep_float32 == ("mine>MySoftmax", "LayerNormalization", r"path:^net/a\+b$", "path:x")
    assert loaded.keeps_float32(model.layers[0]) and loaded.keeps_float32(MySoftmax())
    # A class and its name are the same rule.
    by_class, named, of_layer = (
        Policy("mixed_bfloat16", keep_float32=(rule,)) for rule in (MySoftmax, "mine>MySoftmax", HEAD)
    )
    assert by_class == named and hash(by_class) == hash(named) and of_layer != named
    with pytest.raises(ValueError, match="saved by their path.*'late'.*Build the model first"):
        Policy("mixed_bfloat16", keep_float32=(layers.Dense(1, name="late"),)).get_config()


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ("Sotfmax", "rule 'Sotfmax', which matches none of model 'net'. Did you mean 'Softmax'?"),
        ("path:haed", "'path:haed'.*Did you mean 'path:head'?"),
        ("path:^net/hed$", "Did you mean 'path:.*head'"),
        ("activation:rleu", "Did you mean 'activation:relu'?"),
        ("LSTM", "rule 'LSTM', which matches none of model 'net'. Correct the rule"),
        (layers.LSTM, "rule 'LSTM', which matches none"),
        (HEAD, "rule \"layer 'head'\", which"),
    ],
)
def test_a_rule_that_matches_nothing_is_named_with_what_is_near(rule, message):
    (found,) = unmatched(three_layers(), (*default_rules(), "Softmax", rule, "path:body"), "keep_float32")
    assert re.search(message.replace("?", "[?]").replace("'net'.", "'net'[.]"), found), found
    assert found.endswith("Correct the rule, or leave it out.")


def test_what_is_near_to_a_path_matches_when_it_is_typed():
    model = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="block[2]"), layers.Dense(2)], name="net")
    (found,) = unmatched(model, ("path:block[2]",), "keep_float32")
    meant = ast.literal_eval(re.search("Did you mean ('.*')[?]", found)[1])
    assert meant != "path:block[2]" and unmatched(model, (meant,), "keep_float32") == []


def three_layers():
    body, head = layers.Dense(3, activation="relu", name="body"), layers.Dense(2, name="head")
    return keras.Sequential([keras.Input((4,)), body, head, layers.Softmax(name="probabilities")], name="net")


def test_rules_that_match_are_not_named():
    model = three_layers()
    rules = ("Dense", "path:body", "activation:relu", layers.Softmax, model.layers[0], "Softmax", "Softmax")
    assert unmatched(model, rules, "keep_float32") == []
    # Of what is inside attention layers only rules for a place reach anything: these look after their own precision.
    inputs = keras.Input((3, 4))
    model = keras.Model(inputs, layers.MultiHeadAttention(2, 2, name="attention")(inputs, inputs))
    assert len(unmatched(model, ("EinsumDense", "path:attention/quary"), "keep_float32")) == 2
    assert unmatched(model, ("path:attention", "path:attention/query"), "keep_float32") == []
    assert names(model, "EinsumDense", "path:attention/(query|key)$") == {"query", "key"}


def test_walks_functional_sequential_and_subclassed_models():
    inputs = keras.Input((3, 4))
    outputs = keras.Sequential([Block(name="block"), layers.Softmax(name="last")])(inputs)
    functional = keras.Model(inputs, layers.Dense(2, activation="softmax", name="dense")(outputs))
    assert names(functional, "Softmax", "activation:softmax") == {"head", "last", "dense"}
    assert names(Subclassed(), "Softmax", "activation:softmax") == {"head", "dense"}


@pytest.mark.parametrize(
    "layer_class, heads", [(layers.MultiHeadAttention, (2,)), (layers.GroupQueryAttention, (2, 1))]
)
def test_attention_looks_after_its_own_softmax(layer_class, heads):
    set_global_policy("mixed_bfloat16")
    layer = layer_class(2, *heads, dropout=0.1)
    query = np.ones((1, 3, 4), "float32")
    layer(query, query)
    model = keras.Sequential([layer])
    assert layers_to_keep(model, ("Softmax",)) == layers_to_keep(layer, ("Softmax",)) == []
    assert kept(model, without_outputs("mixed_bfloat16")) == []
    assert keras.backend.standardize_dtype(layer(query, query).dtype) == "bfloat16"


class Holder(layers.Layer):
    def __init__(self, layer, **kwargs):
        super().__init__(**kwargs)
        self.layer = layer


def test_a_rule_on_a_layer_holds_for_everything_inside_it_also_where_that_is_used_elsewhere():
    block = Block(name="block")
    block(np.ones((1, 3, 4), "float32"))
    inside = {layer.name for layer in block._flatten_layers(include_self=False)}
    assert {"attention", "query", "normalization", "head"} <= inside
    assert names(keras.Sequential([block]), "Block") == {"block", *inside}
    shared = layers.Dense(2, name="shared")
    assert names(keras.Sequential([shared, Holder(shared, name="holder")]), "Holder") == {"shared", "holder"}


def test_wrappers_go_with_the_layers_they_wrap():
    # TimeDistributed runs `layer.call`, so that the policy of the layer alone changes nothing.
    set_global_policy("mixed_bfloat16")
    dense = layers.Dense(3, activation="softmax", name="dense")
    model = keras.Sequential([keras.Input((2, 4)), layers.TimeDistributed(dense, name="each")])
    assert names(model, "activation:softmax") == {"each", "dense"}
    mpkeras.apply_policy(model, "mixed_bfloat16")
    assert keras.backend.standardize_dtype(model.layers[0](np.ones((1, 2, 4), "float32")).dtype) == "float32"
    model = keras.Sequential([layers.Bidirectional(layers.LSTM(2, activation="sigmoid", name="lstm"))])
    assert {"forward_lstm", "backward_lstm"} <= names(model, "activation:sigmoid")


def test_a_row_names_rule_and_reason_of_each_kept_layer():
    set_global_policy("mixed_float16")
    model = Subclassed()
    model(np.ones((1, 3, 4), "float32"))
    before = compute_dtypes(model)
    # No attention rule: it is the business of `missing_kernel_rules`.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_TRIALS", {})
        policy = Policy("mixed_float16", keep_float32=("Softmax", "path:nested/dense"))
        rows = kept(model, policy)
        assert [(row.layer.name, row.rule) for row in rows] == [("head", "Softmax"), ("dense", "path:nested/dense")]
        assert "gradient NaN" in rows[0].reason
        assert rows[1].reason == "kept in float32 by the policy 'mixed_float16'"
        assert [row.before for row in rows] == [keras.DTypePolicy("mixed_float16")] * 2
        assert [(type(row.after), row.after.name) for row in rows] == [(keras.DTypePolicy, "float32")] * 2
        assert compute_dtypes(model) == before
        mpkeras.apply_policy(model, policy)
        assert compute_dtypes(model) == {**before, "head": "float32", "dense": "float32"}
        assert kept(model, policy) == []


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_layers_that_do_not_compute_in_16_bits_are_left_alone(dtype):
    model = keras.Sequential([layers.Softmax(dtype=dtype), layers.Softmax(dtype="mixed_float16")])
    for one in (model, model.layers[1]):
        assert [row.layer for row in kept(one, Policy("mixed_float16"))] == [model.layers[1]]


@pytest.mark.parametrize("mode", ["int8", "float8"])
def test_quantized_layers_are_left_alone(mode):
    dense = layers.Dense(2, activation="softmax", dtype="mixed_bfloat16")
    model = keras.Sequential([keras.Input((4,)), dense])
    dense.quantize(mode)
    assert kept(model, Policy("mixed_bfloat16")) == []


def test_policy_map_of_a_layer():
    policy_map = keras.dtype_policies.DTypePolicyMap("mixed_bfloat16")
    first = layers.Dense(2, activation="softmax", name="first", dtype=policy_map)
    second = layers.Dense(2, name="second", dtype=policy_map)
    model = keras.Sequential([keras.Input((4,)), first, second], name="outer")
    (row,) = kept(model, without_outputs("mixed_bfloat16"))
    assert (row.layer, row.before.name) == (first, "mixed_bfloat16")
    set_layer_policy(first, row.after)
    assert (first.compute_dtype, second.compute_dtype) == ("float32", "bfloat16")
    assert layer_policy(first) == FLOAT32
    set_layer_policy(first, row.before)
    assert (first.compute_dtype, second.compute_dtype) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize("statistics", [{"mean": 7e4, "variance": 4e8}, None], ids=["given", "adapted"])
def test_normalization_forgets_statistics_that_float16_made_infinite(statistics):
    layer = layers.Normalization(axis=None, dtype="mixed_float16", **(statistics or {}))
    data = np.array([[5e4], [9e4]], "float32")  # Mean 7e4, variance 4e8: both are inf in float16.
    layer.build((None, 1))
    if statistics is None:
        layer.adapt(data)
    set_layer_policy(layer, FLOAT32)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(layer(data)), [[-1.0], [1.0]], rtol=1e-6)


@pytest.mark.parametrize("policy", first_quick(["mixed_float16", "mixed_bfloat16"]))
@pytest.mark.parametrize(
    "layer",
    [
        lambda: layers.BatchNormalization(epsilon=1e-12),
        lambda: layers.LayerNormalization(epsilon=1e-12),
        lambda: layers.GroupNormalization(2, epsilon=1e-12),
        lambda: layers.RMSNormalization(epsilon=1e-12),
        layers.UnitNormalization,
        lambda: layers.Normalization(mean=7e4, variance=1e6),
        lambda: layers.Rescaling(1e-4),
        lambda: layers.SpectralNormalization(layers.Dense(2, name="inner")),
    ],
    ids=["Batch", "Layer", "Group", "RMS", "Unit", "Normalization", "Rescaling", "Spectral"],
)
def test_range_of_kept_layers_is_that_of_float32(layer, policy):
    # P6. Signs alternate, so that there is something to normalize.
    large = (1e5 * np.array([[1, -1, 1, -1], [-1, -1, 1, 1]])).astype("float32")
    keras.utils.set_random_seed(0)
    in_float32 = layer()
    set_global_policy(policy)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([layer()])
    mpkeras.apply_policy(model, policy)
    for inputs in (large, 0.0 * large):
        expected = keras.ops.convert_to_numpy(in_float32(inputs))
        outputs = keras.ops.convert_to_numpy(keras.ops.cast(model.layers[0](inputs), "float32"))
        assert np.isfinite(outputs).all()
        # bfloat16 has 8 significant bits: LayerNormalization and GroupNormalization round their output once.
        np.testing.assert_allclose(outputs, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize(("rule", "reason"), DEFAULT_RULES, ids=default_rules())
def test_each_rule_names_something_of_keras_and_has_a_reason(rule, reason):
    kind, _, argument = rule.partition(":")
    if rule == OUTPUTS:
        assert not hasattr(keras.layers, rule)  # It goes by the place of a layer in its model.
    elif kind == "activation":
        assert callable(getattr(keras.activations, argument))
    elif hasattr(keras.layers, rule):
        assert issubclass(getattr(keras.layers, rule), keras.layers.Layer)
    else:
        # A layer that is newer than this Keras. Keras 3.15 has all of them.
        assert tuple(int(part) for part in keras.version().split(".")[:2]) < (3, 15), rule
    assert reason


@pytest.mark.backends("tensorflow")
def test_the_table_shows_every_rule_once_with_its_reason():
    rules = default_rules()
    assert validate(rules) == rules and len(set(rules)) == len(rules)
    lines = describe_rules().splitlines()
    assert lines[0].startswith("stays in float32")
    assert [line.split()[0] for line in lines[1:]] == list(rules)
    assert "2.7% off" in describe_rules()
