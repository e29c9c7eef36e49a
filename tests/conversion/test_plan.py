"""What a plan says of a model, that it changes nothing, and that a plan that fails halfway leaves nothing behind."""

import keras
import numpy as np
import pytest
from keras import layers

import mpkeras
from mpkeras._replaced import replaced_attributes
from mpkeras.conversion.plan import Conversion, plan
from mpkeras.policies import Policy

pytestmark = pytest.mark.backends("tensorflow")  # looks at Python objects
BFLOAT16 = Policy("mixed_bfloat16")


class Own(layers.Layer):
    def call(self, x):
        return x * 2


def make():
    inputs = keras.Input((8,))
    x = layers.Dense(8, activity_regularizer="l2", name="body")(inputs)
    x = layers.BatchNormalization(name="norm")(Own(name="own")(x))
    return keras.Model(inputs, layers.Dense(4, activation="softmax", name="head")(x), name="net")


def picture(model):
    return [(layer, layer.dtype_policy, sorted(vars(layer))) for layer in [model, *model.layers]]


def by_name(rows):
    return {row.layer.name: row for row in rows}


def test_a_row_for_each_layer_says_what_and_why():
    model = make()
    before = picture(model)
    rows = by_name(plan(model, BFLOAT16, Conversion(model, BFLOAT16)))
    assert picture(model) == before
    assert [(row.before.compute_dtype, row.after.compute_dtype) for row in rows.values()] == [
        ("float32", "bfloat16"),  # the model
        ("float32", "bfloat16"),  # its input
        ("float32", "bfloat16"),
        ("float32", "bfloat16"),
        ("float32", "float32"),
        ("float32", "float32"),
    ]
    of_bias = ("gradient of the bias in float32",) if keras.backend.backend() == "tensorflow" else ()
    assert rows["body"][4:] == (None, "policy mixed_bfloat16", ("penalties in float32", *of_bias))
    assert rows["own"].changes == ("penalties in float32", "mixed dtypes named", "layers made inside")
    assert rows["norm"].rule == "BatchNormalization" and rows["norm"].reason.startswith("inputs of 1e5")
    assert rows["head"].rule == "activation:softmax" and rows["head"].without_rule.compute_dtype == "bfloat16"
    assert rows["head"].after is rows["head"].before and rows["head"].changes == ()


def test_apply_policy_carries_out_the_rows_and_a_second_plan_has_nothing_to_do():
    model = make()
    rows = plan(model, BFLOAT16, Conversion(model, BFLOAT16))
    mpkeras.apply_policy(model, BFLOAT16)
    assert [layer.dtype_policy.name for layer in [model, *model.layers]] == [row.after.name for row in rows]
    again = plan(model, BFLOAT16)
    assert all(row.after is row.before for row in again)
    assert [(row.rule, row.changes) for row in again] == [(row.rule, row.changes) for row in rows]


def test_without_a_conversion_rows_say_what_rules_would_make_of_the_model_as_it_is():
    with mpkeras.policy_scope("mixed_float16"):
        model = make()
    rows = by_name(plan(model, Policy("mixed_float16", keep_float32=("Own",)).renamed("mine")))
    assert [name for name, row in rows.items() if row.after is not row.before] == ["own"]
    assert rows["own"].rule == "Own" and rows["own"].reason == "kept in float32 by the policy 'mine'"


class Unwilling(layers.Dense):
    """Takes no other policy once it is made."""

    @property
    def dtype_policy(self):
        return self._dtype_policy

    @dtype_policy.setter
    def dtype_policy(self, value):
        raise RuntimeError("no other policy")


def test_an_error_before_the_last_row_leaves_the_model_as_it_was():
    inputs = keras.Input((8,))
    x = Unwilling(3)(Own()(layers.Dense(8, activity_regularizer="l2")(inputs)))
    model = keras.Model(inputs, layers.Dense(2)(x))
    expected, before = model(np.ones((2, 8))).numpy(), picture(model)
    with pytest.raises(RuntimeError, match="no other policy"):
        mpkeras.apply_policy(model, BFLOAT16)
    assert picture(model) == before and not replaced_attributes(model)
    np.testing.assert_array_equal(model(np.ones((2, 8))).numpy(), expected)


class Late(keras.Model):
    """One layer refuses a second policy, another one is made when the model is built."""

    def __init__(self):
        super().__init__()
        self.first = Unwilling(2, dtype="mixed_bfloat16")

    def build(self, input_shape):
        self.last = layers.BatchNormalization(dtype="mixed_bfloat16")

    def call(self, x):
        return self.last(self.first(x))


def test_after_an_error_the_earlier_conversion_goes_on_when_the_model_is_built():
    model = Late()
    mpkeras.apply_policy(model, BFLOAT16)
    with pytest.raises(RuntimeError, match="no other policy"):
        mpkeras.apply_policy(model, "mixed_float16")
    model(np.ones((2, 8), "float32"))
    assert (model.first.compute_dtype, model.last.compute_dtype) == ("bfloat16", "float32")
