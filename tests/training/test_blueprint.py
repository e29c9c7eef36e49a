"""Tests for `blueprint`: what a process needs to make a model again, beside its configuration."""

import keras
import numpy as np
import pytest
from keras import layers

import mpkeras
from mpkeras.seams import Blueprint
from tests.cases import first_quick


@keras.saving.register_keras_serializable(package="tests")
class ThreeDense(keras.Model):
    """A model whose config has its own dtype, and not those of its layers."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.body, self.middle = layers.Dense(6, "relu", name="body"), layers.Dense(4, name="middle")
        self.head = layers.Dense(3, name="head")

    def call(self, x):
        return self.head(self.middle(self.body(x)))

    def get_config(self):
        return super().get_config()


def graph():
    x = keras.Input((5,))
    middle = layers.Dense(4, name="middle")(layers.Dense(6, "relu", name="body")(x))
    return keras.Model(x, layers.Dense(3, name="head")(middle))


def made_again(model):
    """Returns a model as the process that compiles for `forecast` makes it."""
    again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(model))
    again(np.zeros((2, 5), "float32"))
    Blueprint.give_beside_config(again, Blueprint.beside_config_of(model))
    return again


def dtypes(model):
    found = [model.get_layer(name) for name in ("body", "middle", "head")]
    return [(layer.compute_dtype, str(layer.kernel.dtype)) for layer in found]


@pytest.mark.parametrize("make", first_quick([ThreeDense, graph]))
@pytest.mark.parametrize("way", first_quick(["rule", "scope", "Keras", "bfloat16"]))
def test_a_twin_gets_the_dtypes_that_a_policy_would_make_here(make, way):
    with mpkeras.policy_scope("mixed_bfloat16" if way == "scope" else "float32"):
        if way == "Keras":
            keras.config.set_dtype_policy("mixed_bfloat16")
        model = make()
        model(np.zeros((2, 5), "float32"))
    if way == "rule":
        # The layer that a rule of this policy keeps is free again under another one.
        rules = (*mpkeras.Policy("mixed_float16").keep_float32, "path:body")
        mpkeras.apply_policy(model, mpkeras.Policy("mixed_float16", keep_float32=rules))
        assert dtypes(model)[:2] == [("float32", "float32"), ("float16", "float32")]
    elif way == "bfloat16":
        mpkeras.apply_policy(model, way)
    twin = made_again(model)
    for policy, stored in (("mixed_bfloat16", "float32"), ("bfloat16", "bfloat16")):
        for converted in (twin, model):
            mpkeras.apply_policy(converted, policy)
            # A call tells which layer of a model of the user's own makes the outputs.
            converted(np.zeros((2, 5), "float32"))
            assert dtypes(converted) == [("bfloat16", stored), ("bfloat16", stored), ("float32", "float32")]
    assert dtypes(mpkeras.apply_policy(twin, "float32")) == [("float32", "float32")] * 3
