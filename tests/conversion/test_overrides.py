"""What a layer is given while it is converted, and what its user has put in that place since."""

import functools
import gc
import weakref

import keras
import pytest

from mpkeras.conversion.overrides import is_overridden, overridden, override, restore

pytestmark = pytest.mark.backends("tensorflow")  # attributes of Python objects


@pytest.fixture
def layer():
    return keras.layers.Dense(1)


def ours():
    return "ours"


def users():
    return "the user's"


def test_what_was_not_there_is_gone_again(layer):
    before = dict(vars(layer))
    override(layer, "call", ours)
    override(layer, "autocast", False)
    assert layer.call() == "ours" and overridden(layer) == {"call", "autocast"}
    restore(layer, "call")
    assert overridden(layer) == {"autocast"}
    restore(layer, "autocast")
    assert vars(layer) == before


def test_what_was_there_is_back_after_several_times(layer):
    vars(layer)["call"] = users
    override(layer, "call", ours)
    override(layer, "call", print)
    restore(layer, "call")
    assert layer.call is users and not is_overridden(layer, "call")
    restore(layer, "call")
    assert layer.call is users


def test_what_the_user_has_put_there_since_stays(layer):
    override(layer, "activation", ours)
    layer.activation = users
    assert not is_overridden(layer, "activation") and overridden(layer) == frozenset()
    restore(layer, "activation")
    assert layer.activation is users
    # It is what comes back when the layer is converted again.
    override(layer, "activation", ours)
    assert layer.activation is ours
    restore(layer, "activation")
    assert layer.activation is users


def test_what_the_user_has_deleted_stays_away(layer):
    override(layer, "call", ours)
    del vars(layer)["call"]
    restore(layer, "call")
    assert "call" not in vars(layer)


def test_a_layer_is_freed_with_what_it_was_given():
    layer = keras.layers.Dense(1)
    override(layer, "call", functools.partial(type(layer).call, layer))
    reference = weakref.ref(layer)
    del layer
    gc.collect()
    assert reference() is None
