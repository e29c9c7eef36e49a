import copy
import json
import pickle

import keras
import numpy as np
import pytest

from mpkeras.policies import Policy, default_rules, register_policy
from mpkeras.policies.loss_scaling import DynamicLossScale, FixedLossScale
from mpkeras.policies.policy import accumulating
from tests.cases import first_quick

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")


def settings(policy):
    return policy.name, policy.compute_dtype, policy.variable_dtype, policy.keep_float32, policy.loss_scale


def every_option_set():
    return Policy(
        "mine",
        compute_dtype="bfloat16",
        variable_dtype="float32",
        keep_float32=("Dense", "path:head"),
        loss_scale=DynamicLossScale(initial_scale=8.0, hysteresis=2),
    )


def test_another_name_and_another_remat_leave_the_accumulation():
    policy = accumulating(every_option_set(), 6)
    assert [policy.renamed("yours").accumulate_steps, policy.with_remat("blocks").accumulate_steps] == [6, 6]
    assert policy == every_option_set()


def test_slots_of_a_registered_policy_go_with_its_weights():
    register_policy(Policy("mixed_bfloat16", slot_dtype="bfloat16").renamed("small slots"))
    assert Policy("small slots").slot_dtype == Policy("small slots", loss_scale=2.0).slot_dtype == "bfloat16"
    assert Policy("small slots", variable_dtype="bfloat16").slot_dtype == "auto"


def through_json(config):
    return json.loads(json.dumps(config))


@pytest.mark.parametrize(
    ("name", "compute_dtype", "variable_dtype", "loss_scale"),
    [
        pytest.param("float32", "float32", "float32", None, id="float32"),
        pytest.param("float64", "float64", "float64", None, id="float64"),
        pytest.param("float16", "float16", "float16", DynamicLossScale(), id="pure float16 is scaled too"),
        pytest.param("bfloat16", "bfloat16", "bfloat16", None, id="bfloat16 has float32's range"),
        pytest.param("mixed_float16", "float16", "float32", DynamicLossScale(), id="mixed_float16"),
        pytest.param("mixed_bfloat16", "bfloat16", "float32", None, id="mixed_bfloat16"),
    ],
)
def test_built_in_settings(name, compute_dtype, variable_dtype, loss_scale):
    rules = default_rules() if compute_dtype in ("float16", "bfloat16") else ()
    assert settings(Policy(name)) == (name, compute_dtype, variable_dtype, rules, loss_scale)


@pytest.mark.parametrize(
    ("loss_scale", "expected"),
    [
        pytest.param(1024, FixedLossScale(1024.0), id="a number is fixed"),
        pytest.param(None, None, id="None is none, for float16 too"),
        pytest.param("dynamic", DynamicLossScale(), id="dynamic"),
        pytest.param(DynamicLossScale(initial_scale=4.0), DynamicLossScale(initial_scale=4.0), id="a rule"),
    ],
)
def test_loss_scale_overrides_the_registered_one(loss_scale, expected):
    assert Policy("mixed_float16", loss_scale=loss_scale).loss_scale == expected


def test_keywords_override_a_registered_policy_and_another_compute_dtype_brings_its_own_rules_and_scale():
    register_policy(every_option_set())
    expected = ("mine", "bfloat16", "float32", (), DynamicLossScale(8.0, hysteresis=2))
    assert settings(Policy("mine", keep_float32=())) == expected
    expected = ("mine", "float16", "float32", default_rules(), DynamicLossScale())
    assert settings(Policy("mine", compute_dtype="float16")) == expected


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"name": "mixed_flaot16"}, ValueError, "Did you mean 'mixed_float16'"),
        ({"name": "new"}, ValueError, "both `compute_dtype` and `variable_dtype`"),
        ({"name": "new", "compute_dtype": "float16"}, ValueError, "both `compute_dtype`"),
        ({"name": "float8"}, ValueError, "Use 'mixed_float8'"),
        (
            {"name": "new", "compute_dtype": "int8", "variable_dtype": "float32"},
            ValueError,
            r"`compute_dtype` to be one of float16.*Received: compute_dtype='int8'",
        ),
        ({"name": "mixed_float16", "compute_dtype": "bfloat16"}, ValueError, "Give the policy a name of its own"),
        ({"name": 16}, TypeError, "`name` to be a string"),
        ({"name": ""}, ValueError, "not empty"),
        ({"name": "float32", "keep_float32": "Softmax"}, TypeError, r"\(\.\.\., 'Softmax'\)"),
        ({"name": "float32", "keep_float32": ("a b",)}, ValueError, "class name"),
        ({"name": "float32", "loss_scale": "big"}, ValueError, "'dynamic'"),
        ({"name": "mixed_float16", "remat": "all"}, ValueError, r"'products', 'blocks'.*remat='all'.*Use 'blocks'"),
        ({"name": "mixed_float16", "remat": []}, ValueError, "name layers.*none"),
        ({"name": "mixed_float16", "remat": 3}, TypeError, "tuple of rules.*remat=3"),
    ],
)
def test_bad_arguments_are_answered_with_the_remedy(arguments, error, message):
    with pytest.raises(error, match=message):
        Policy(**arguments)


def test_another_name_and_a_config_are_checked_as_well():
    policy = every_option_set()
    with pytest.raises(ValueError, match="Expected a `name` that is not empty"):
        policy.renamed("")
    with pytest.raises(TypeError, match="Expected `name` to be a string. Received: name=16"):
        policy.renamed(16)
    half = {"name": "x", "compute_dtype": "float16", "loss_scale": None}
    with pytest.raises(ValueError, match="Received: {'name': 'x'.*}, without variable_dtype, keep_float32. Make"):
        Policy.from_config(half)


@pytest.mark.parametrize(
    ("other", "is_equal"),
    [
        pytest.param(every_option_set(), True, id="same settings"),
        pytest.param(Policy("mixed_bfloat16").renamed("mine"), False, id="other rules"),
        pytest.param(every_option_set().renamed("yours"), False, id="other name"),
        pytest.param(keras.DTypePolicy("mixed_bfloat16"), False, id="stock policy of the same dtypes"),
        pytest.param("mine", False, id="its name"),
    ],
)
def test_equality_and_hash(other, is_equal):
    policy = every_option_set()
    assert (policy == other) is is_equal
    assert (other == policy) is is_equal
    assert not is_equal or hash(policy) == hash(other)


POLICIES = [
    pytest.param(Policy("mixed_float16", loss_scale=64.0), id="a name that Keras knows"),
    pytest.param(every_option_set(), id="a name of its own"),
    pytest.param(
        Policy("odd", compute_dtype="float16", variable_dtype="bfloat16"), id="no stock policy has the dtypes"
    ),
]
WAYS = {
    "keras.saving": lambda p: keras.saving.deserialize_keras_object(
        through_json(keras.saving.serialize_keras_object(p))
    ),
    "deserialize": lambda p: keras.dtype_policies.deserialize(through_json(keras.dtype_policies.serialize(p))),
    "get": lambda p: keras.dtype_policies.get(through_json(keras.dtype_policies.serialize(p))),
    "from_config": lambda p: Policy.from_config(p.get_config()),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "get of the object": keras.dtype_policies.get,
}


@pytest.mark.parametrize("policy", [*POLICIES, Policy("mixed_float16").renamed("mixed_auto", "because")])
@pytest.mark.parametrize("way", WAYS)
def test_round_trips(policy, way):
    for _ in range(2):  # What was reloaded is reloaded again.
        reloaded = WAYS[way](policy)
        assert reloaded == policy and settings(reloaded) == settings(policy) and reloaded.reason == policy.reason
        policy = reloaded


def test_from_config_leaves_the_config_intact_and_needs_no_registry():
    config = every_option_set().get_config()
    before = copy.deepcopy(config)
    assert Policy.from_config(config) == every_option_set()
    assert config == before


@pytest.mark.parametrize("policy", first_quick(POLICIES[::-1]))
def test_layers_and_models_keep_their_dtypes_through_saving_and_take_another_policy(policy, tmp_path):
    dense = keras.layers.Dense(3, dtype=policy)
    wrapped = keras.layers.TimeDistributed(keras.layers.Dense(3, dtype=policy), dtype=policy)
    # TensorFlow has no orthogonal matrices in bfloat16.
    recurrent = keras.layers.LSTM(2, recurrent_initializer="glorot_uniform", dtype=policy)
    norm = keras.layers.BatchNormalization(dtype=policy)
    model = keras.Sequential([keras.Input((4, 2)), dense, wrapped, recurrent, norm])
    for generation in range(2):
        model.save(tmp_path / f"{generation}.keras")
        reloaded = keras.models.load_model(tmp_path / f"{generation}.keras")
        dtypes = [(layer.compute_dtype, layer.variable_dtype) for layer in reloaded.layers]
        assert dtypes == [(policy.compute_dtype, policy.variable_dtype)] * 4
        for old, new in zip(model.weights, reloaded.weights, strict=True):
            old, new = (keras.ops.convert_to_numpy(keras.ops.cast(w, "float32")) for w in (old, new))
            np.testing.assert_array_equal(old, new)
        model = reloaded
    model.layers[0].dtype_policy = "float32"
    assert model.layers[0].compute_dtype == "float32"


@pytest.mark.parametrize("default", [None, "float32"])
def test_survives_in_a_policy_map(default):
    policy = every_option_set()
    policy_map = keras.dtype_policies.DTypePolicyMap(default)
    policy_map["encoder/dense"] = policy
    # With default None Keras writes None into the `_name` of every value here, and from 3.16 on into the config alone.
    config = through_json(keras.dtype_policies.serialize(policy_map))
    assert policy.name == "mine" and policy == every_option_set()
    assert keras.dtype_policies.get(config)["encoder/dense"].renamed("mine") == policy


@pytest.mark.parametrize("dtypes, name", [
    (("bfloat16", "float32"), "mixed_bfloat16"),
    (("float16", "float16"), "float16"),
    (("float16", "bfloat16"), "float16_bfloat16"),
])  # fmt: skip
def test_a_config_without_the_name_has_that_of_the_dtypes(dtypes, name):
    policy = Policy("mine", compute_dtype=dtypes[0], variable_dtype=dtypes[1], keep_float32=("path:last",))
    again = Policy.from_config({**policy.get_config(), "name": None})
    assert again == policy.renamed(name) and again.name == name


def test_can_be_the_default_of_a_policy_map():
    policy_map = keras.dtype_policies.DTypePolicyMap(every_option_set())
    for each in (policy_map, keras.dtype_policies.get(through_json(keras.dtype_policies.serialize(policy_map)))):
        assert (each.name, each.compute_dtype) == ("map_mine", "bfloat16")


@pytest.mark.parametrize(
    ("compute_dtype", "variable_dtype", "stock"),
    [
        pytest.param("float16", "float32", keras.DTypePolicy("mixed_float16"), id="mixed_float16"),
        pytest.param("bfloat16", "float32", keras.DTypePolicy("mixed_bfloat16"), id="mixed_bfloat16"),
        pytest.param("float64", "float64", keras.DTypePolicy("float64"), id="one dtype"),
        pytest.param("float16", "bfloat16", None, id="Keras has none"),
        pytest.param("float32", "float16", None, id="the wrong way round"),
    ],
)
def test_stock(compute_dtype, variable_dtype, stock):
    policy = Policy("mine", compute_dtype=compute_dtype, variable_dtype=variable_dtype)
    assert policy.stock() == stock


def test_keeps_float32_returns_the_first_rule_that_matches():
    policy = Policy("mixed_float16", keep_float32=("path:nowhere", "path:head", "Dense"))
    assert policy.keeps_float32(keras.layers.Dense(1, name="head")) == "path:head"
    assert policy.keeps_float32(keras.layers.Dense(1, name="body")) == "Dense"
    assert policy.keeps_float32(keras.layers.Flatten()) is None


def test_remat_is_part_of_the_policy():
    layer = keras.layers.Dense(3)
    layer.build((None, 2))
    for remat in ("products", "blocks", ("path:block_\\d+$", "Dense"), (layer,)):
        policy = Policy("mixed_bfloat16", remat=remat)
        again = Policy.from_config(policy.get_config())
        assert policy != Policy("mixed_bfloat16") and policy.remat == remat
        assert again.remat == (("path:^dense$",) if remat == (layer,) else remat) or layer.path in str(again.remat)
        assert "remat=" in repr(policy) and policy.renamed("mine").remat == remat
    assert Policy("mixed_bfloat16").remat is None and "remat" not in Policy("float32").get_config()


DEFAULTS = default_rules()


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("mixed_float16", (..., "path:head"), (*DEFAULTS, "path:head")),
        ("mixed_bfloat16", ["Conv2D", ..., "path:head"], ("Conv2D", *DEFAULTS, "path:head")),
        ("float32", (..., "Conv2D"), ("Conv2D",)),
    ],
)
def test_an_ellipsis_stands_for_the_rules_that_hold_without_the_argument(name, given, expected):
    policy = Policy(name, keep_float32=given)
    assert policy.keep_float32 == expected
    assert keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(policy)) == policy


def test_an_ellipsis_in_a_set_of_another_dtype_and_of_float8():
    assert set(Policy("bfloat16", keep_float32={"path:a", ...}).keep_float32) == {*DEFAULTS, "path:a"}
    wide = Policy("own", compute_dtype="float16", variable_dtype="float32", keep_float32=("path:b", ...))
    assert wide.keep_float32 == ("path:b", *DEFAULTS)
    assert Policy("mixed_float8", keep_16_bits=(..., "path:a")).keep_16_bits == ("first", "last", "path:a")


def test_an_ellipsis_in_place_of_a_tuple_or_where_it_stands_for_nothing_is_refused():
    with pytest.raises(TypeError, match=r"tuple of rules. Received: keep_float32=Ellipsis"):
        Policy("mixed_float16", keep_float32=...)
    with pytest.raises(TypeError, match=r"each rule to be a string.*Ellipsis"):
        Policy("mixed_float16", remat=[...])
    with pytest.raises(ValueError, match="products in float8 only"):
        Policy("mixed_float16", keep_16_bits=(..., "path:a"))
