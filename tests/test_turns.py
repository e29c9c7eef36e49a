"""Which slow tests `.ci/run` leaves out: over six turns none."""

import pytest

from tests.conftest import BACKENDS, has_its_turn

pytestmark = pytest.mark.backends("tensorflow")


class Item:
    """What pytest collects of a test, as far as turns look at it."""

    def __init__(self, name, *marks):
        self.name, self.location = name, ("tests/test_something.py", 1, name)
        self._marks = {decorator.mark.name: decorator.mark for decorator in marks}

    def iter_markers(self):
        return self._marks.values()

    def get_closest_marker(self, name):
        return self._marks.get(name)


def turns(item):
    """Returns for each of six turns the backends on which the test runs."""
    return [[name for name in BACKENDS if has_its_turn(item, name, turn)] for turn in range(6)]


@pytest.mark.parametrize("name", ["test_a", "test_b", "test_c"])
def test_each_turn_has_one_backend_and_each_backend_has_two(name):
    found = turns(Item(name, pytest.mark.slow))
    assert [len(names) for names in found] == [1] * 6
    assert sorted(sum(found, [])) == sorted(2 * BACKENDS)


@pytest.mark.parametrize(
    "mark", [pytest.mark.backends("jax", "torch"), pytest.mark.seldom("tensorflow")], ids=["named", "others are seldom"]
)
def test_of_two_backends_each_has_three(mark):
    assert sorted(sum(turns(Item("test_a", pytest.mark.slow, mark)), [])) == ["jax"] * 3 + ["torch"] * 3


def test_a_single_backend_has_every_other_turn():
    found = turns(Item("test_a", pytest.mark.slow, pytest.mark.backends("jax")))
    assert found in ([["jax"], []] * 3, [[], ["jax"]] * 3)


@pytest.mark.parametrize("marks", [[], [pytest.mark.slow, pytest.mark.every_turn]], ids=["quick", "every turn"])
def test_others_take_no_turns(marks):
    assert turns(Item("test_a", *marks)) == [list(BACKENDS)] * 6
