"""P37: the policy `mixed_float8`, and what else may be said of products in float8."""

import keras
import pytest

import mpkeras
from mpkeras import Policy, get_policy

pytestmark = pytest.mark.backends("tensorflow")


def test_the_built_in_policy():
    policy = get_policy("mixed_float8")
    assert (policy.compute_dtype, policy.variable_dtype, policy.loss_scale) == ("bfloat16", "float32", None)
    assert (policy.float8, policy.keep_16_bits) == ("current", ("first", "last"))
    assert policy.keep_float32 == get_policy("mixed_bfloat16").keep_float32
    assert "float8=current" in repr(policy)
    assert (get_policy("mixed_bfloat16").float8, get_policy("mixed_bfloat16").keep_16_bits) == (None, ())


def test_what_a_user_says_holds():
    policy = Policy("mixed_float8", keep_16_bits=[keras.layers.Dense, "path:router"])
    assert policy.keep_16_bits == (keras.layers.Dense, "path:router")
    policy = Policy("mine", compute_dtype="bfloat16", variable_dtype="bfloat16", float8="current", slot_dtype="float32")
    assert (policy.float8, policy.keep_16_bits, policy.slot_dtype) == ("current", ("first", "last"), "float32")
    assert Policy("mixed_float8", variable_dtype="bfloat16").float8 == "current"
    assert policy.renamed("other").float8 == "current"


@pytest.mark.parametrize("rules", [("first",), (), ("path:a", keras.layers.EinsumDense)])
def test_a_config_brings_it_back(rules):
    policy = Policy("mine", compute_dtype="bfloat16", variable_dtype="float32", float8="current", keep_16_bits=rules)
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(policy))
    assert again == policy and again.float8 == "current"
    assert policy != Policy("mine", compute_dtype="bfloat16", variable_dtype="float32")
    assert policy != Policy("mine", compute_dtype="bfloat16", variable_dtype="float32", float8="current")
    assert "float8" not in get_policy("mixed_bfloat16").get_config()


def test_a_config_with_scales_that_were_removed_says_so():
    config = keras.saving.serialize_keras_object(get_policy("mixed_float8"))
    config["config"]["float8"] = "delayed"
    with pytest.raises(ValueError, match="float8='delayed'. Use 'current': 'delayed' was removed"):
        keras.saving.deserialize_keras_object(config)


def test_keras_is_given_its_own_policy():
    """A layer that is made under it is a stock one; what it multiplies in is decided for the whole model."""
    with mpkeras.policy_scope("mixed_float8"):
        assert keras.config.dtype_policy().name == "mixed_bfloat16"
        assert mpkeras.global_policy() == get_policy("mixed_float8")
        assert keras.layers.Dense(16).dtype_policy.name == "mixed_bfloat16"
    assert mpkeras.global_policy().float8 is None


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"name": "mixed_float8", "float8": "past"}, ValueError, "float8='past'"),
        ({"name": "mixed_float8", "float8": "delayed"}, ValueError, "float8='delayed'.*'delayed' was removed"),
        ({"name": "mixed_float8", "compute_dtype": "float16"}, ValueError, "compute_dtype='float16'"),
        ({"name": "mixed_float16", "float8": "current"}, ValueError, "Use 'mixed_float8'"),
        ({"name": "mixed_bfloat16", "keep_16_bits": ("first",)}, ValueError, "float8=None"),
        ({"name": "mixed_float8", "keep_16_bits": "first"}, TypeError, "`keep_16_bits` to be a tuple"),
        ({"name": "mixed_float8", "keep_16_bits": ("path:",)}, ValueError, "after 'path:'"),
        ({"name": "mixed_float8", "keep_16_bits": (3,)}, TypeError, "Received: 3"),
    ],
)
def test_bad_input_is_refused(options, error, message):
    with pytest.raises(error, match=message):
        Policy(**options)
