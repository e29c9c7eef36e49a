import keras
import pytest

from mpkeras.policies import DEFAULT_RULES, default_rules, describe_rules
from mpkeras.policies.rules import validate

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")


def test_rules_can_be_read_and_are_named_once():
    rules = default_rules()
    assert validate(rules) == rules
    assert len(set(rules)) == len(rules)


@pytest.mark.parametrize(("rule", "reason"), DEFAULT_RULES, ids=default_rules())
def test_each_rule_names_something_of_keras_and_has_a_reason(rule, reason):
    kind, _, argument = rule.partition(":")
    if kind == "activation":
        assert callable(getattr(keras.activations, argument))
    elif hasattr(keras.layers, rule):
        assert issubclass(getattr(keras.layers, rule), keras.layers.Layer)
    else:
        # A layer that is newer than this Keras. Keras 3.15 has all of them.
        assert tuple(int(part) for part in keras.version().split(".")[:2]) < (3, 15), rule
    assert reason


def test_table_shows_every_rule_with_its_reason():
    lines = describe_rules().splitlines()
    assert lines[0].startswith("stays in float32")
    assert [line.split()[0] for line in lines[1:]] == list(default_rules())
    assert "2.7% off" in describe_rules()
