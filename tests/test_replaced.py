"""What mpkeras puts on an object of the user's, and what the user has put in that place since."""

import functools
import gc
import itertools
import re
import weakref
from pathlib import Path

import keras
import pytest

from mpkeras._replaced import KINDS, is_replaced, replace, replaced, replaced_attributes, restore

pytestmark = pytest.mark.backends("tensorflow")  # attributes of Python objects
ROOT = Path(__file__).parent.parent


@pytest.fixture
def layer():
    return keras.layers.Dense(1)


def ours():
    return "ours"


def users():
    return "the user's"


def listed(owner):
    return [(entry.name, entry.kind) for entry in replaced_attributes(owner)]


def test_what_was_not_there_is_gone_again(layer):
    before = dict(vars(layer))
    assert replace(layer, "call", ours, kind="layer") and replace(layer, "autocast", False, kind="inputs")
    assert layer.call() == "ours" and listed(layer) == [("autocast", "inputs"), ("call", "layer")]
    restore(layer, "call", kind="layer")
    assert listed(layer) == [("autocast", "inputs")]
    restore(layer, "autocast", kind="inputs")
    assert vars(layer) == before


def test_what_is_covered_is_not_covered_by_the_same_kind(layer):
    vars(layer)["call"] = users
    assert replace(layer, "call", ours, kind="layer")
    assert not replace(layer, "call", print, kind="layer") and layer.call is ours
    restore(layer, "call", kind="layer")
    assert layer.call is users and not is_replaced(layer, "call", "layer")
    restore(layer, "call", kind="layer")
    assert layer.call is users


@pytest.mark.parametrize("order", list(itertools.permutations(("layer", "observed", "outputs"))), ids="-".join)
def test_three_kinds_over_each_other_go_in_any_order(layer, order):
    vars(layer)["call"] = users
    functions = {"layer": ours, "observed": print, "outputs": repr}
    for kind, function in functions.items():
        replace(layer, "call", function, kind=kind)
    for kind in order:
        assert layer.call is list(functions.values())[-1]
        restore(layer, "call", kind=kind)
        del functions[kind]
    assert layer.call is users and not listed(layer)


def test_what_the_user_has_put_there_since_stays(layer):
    replace(layer, "activation", ours, kind="layer")
    layer.activation = users
    assert not is_replaced(layer, "activation", "layer") and not listed(layer)
    restore(layer, "activation", kind="layer")
    assert layer.activation is users
    # It is what comes back when the layer is converted again, without a restore between as well.
    for _ in range(2):
        assert replace(layer, "activation", ours, kind="layer")
        layer.activation = users
    replace(layer, "activation", ours, kind="layer")
    restore(layer, "activation", kind="layer")
    assert layer.activation is users and "_mpkeras_replaced" not in vars(layer)


def test_what_the_user_has_deleted_stays_away(layer):
    replace(layer, "call", ours, kind="layer")
    del vars(layer)["call"]
    restore(layer, "call", kind="layer")
    assert "call" not in vars(layer)


def test_for_one_call_one_may_lie_over_another_of_its_kind():
    variable = keras.Variable(1.0)
    before = dict(vars(variable))
    with replaced(variable, "assign", ours, kind="written weights"):
        with pytest.raises(ZeroDivisionError), replaced(variable, "assign", users, kind="written weights"):
            assert variable.assign() == "the user's" and len(listed(variable)) == 2
            1 / 0  # noqa: B018
        assert variable.assign() == "ours"
    assert vars(variable) == before
    with replaced(variable, "assign", ours, kind="written weights"):
        vars(variable)["assign"] = users
    assert variable.assign is users


def test_a_layer_is_freed_with_what_it_was_given():
    layer = keras.layers.Dense(1)
    replace(layer, "call", functools.partial(type(layer).call, layer), kind="layer")
    reference = weakref.ref(layer)
    del layer
    gc.collect()
    assert reference() is None


def test_every_kind_has_its_reason_here_and_in_contributing(layer):
    with pytest.raises(ValueError, match=r"Received: kind='other'. Add it"):
        replace(layer, "call", ours, kind="other")
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## What is replaced on other people's objects")[2]
    assert re.findall(r"^\| ([a-z ]+) \| ", text.partition("\n## ")[0], re.MULTILINE)[1:] == list(KINDS)
