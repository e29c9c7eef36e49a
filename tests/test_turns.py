"""Which slow tests `.ci/run` leaves out: over 72 turns none."""

import ast
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

PLUGIN = Path(__file__).parents[1] / ".ci" / "plugin" / "turns.py"
SPEC = importlib.util.spec_from_file_location("turns", PLUGIN)
turns_plugin = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(turns_plugin)
BACKENDS = turns_plugin.BACKENDS

pytestmark = pytest.mark.backends("tensorflow")


FILE = "tests/test_something.py"


class Item:
    """What pytest collects of a test, as far as turns look at it."""

    def __init__(self, name, *marks):
        self.name, self.originalname, self.location = name, name.split("[")[0], (FILE, 1, name)
        self.parent = SimpleNamespace(nodeid=FILE)
        self._marks = {decorator.mark.name: decorator.mark for decorator in marks}

    def iter_markers(self):
        return self._marks.values()

    def get_closest_marker(self, name):
        return self._marks.get(name)


def turns(item):
    """Returns for each of 72 turns the backends on which the test runs."""
    return [[name for name in BACKENDS if turns_plugin.has_its_turn(item, name, turn)] for turn in range(72)]


@pytest.mark.parametrize("name", ["test_a", "test_b", "test_c"])
@pytest.mark.parametrize("mark", [pytest.mark.slow, pytest.mark.matrix], ids=["slow", "matrix"])
def test_each_backend_has_one_of_72_turns(name, mark):
    found = turns(Item(name, mark))
    assert sorted(sum(found, [])) == sorted(BACKENDS)
    # 23 turns without it follow each with it.
    first = next(turn for turn, names in enumerate(found) if names)
    assert [len(names) for names in [*found[first:], *found[:first]]] == [1, *[0] * 23] * 3


@pytest.mark.parametrize("is_seldom", [False, True], ids=["named", "others are seldom"])
def test_two_backends_have_three_turns(is_seldom, monkeypatch):
    marks = [pytest.mark.slow]
    if is_seldom:
        monkeypatch.setitem(turns_plugin.SELDOM, FILE, {"test_a": ("tensorflow",)})
    else:
        marks.append(pytest.mark.backends("jax", "torch"))
    assert sorted(sum(turns(Item("test_a", *marks)), [])) in (["jax", "jax", "torch"], ["jax", "torch", "torch"])


def test_a_single_backend_has_three():
    found = turns(Item("test_a", pytest.mark.slow, pytest.mark.backends("jax")))
    assert sum(found, []) == ["jax"] * 3 and found[:24] * 3 == found


def test_slow_ones_of_some_files_run_in_each_turn_on_one_backend(monkeypatch):
    monkeypatch.setattr(turns_plugin, "EVERY_TURN", (FILE,))
    found = turns(Item("test_a", pytest.mark.slow))
    assert sorted(found[:3]) == [[name] for name in sorted(BACKENDS)] and found[:3] * 24 == found


@pytest.mark.parametrize("name", ["test_a", "test_b", "test_c"])
def test_quick_ones_run_on_tensorflow_and_of_three_turns_once_on_each_of_the_others(name):
    found = turns(Item(name))
    assert sorted(found[:3]) == [["tensorflow"], ["tensorflow", "jax"], ["tensorflow", "torch"]]
    assert found[:3] * 24 == found


def test_quick_ones_that_tensorflow_does_not_run_take_none():
    assert turns(Item("test_a", pytest.mark.backends("jax"))) == [list(BACKENDS)] * 72


QUICK = [Item(f"test_a[{number}]") for number in range(3)]
SLOW = [Item(f"test_a[{number}]", pytest.mark.slow) for number in range(3, 6)]


def cases_left(**options):
    """Returns the numbers of the cases of a test, three quick and three slow ones, that are not left out."""
    left_out = turns_plugin.later_cases(QUICK + SLOW, "jax", **options)
    return [number for number, item in enumerate(QUICK + SLOW) if item not in left_out]


def test_one_slow_case_remains_and_another_one_72_turns_later():
    found = [cases_left(slow_ones_only=False, turn=turn) for turn in (0, 71, 72, 144, 216)]
    assert found == [[0, 3], [0, 3], [0, 4], [0, 5], [0, 3]]


def test_quick_cases_all_remain_where_slow_ones_alone_are_chosen():
    assert cases_left(slow_ones_only=True, turn=80) == [0, 1, 2, 4]


def test_every_case_remains_of_a_test_in_the_table(monkeypatch):
    monkeypatch.setitem(turns_plugin.EVERY_CASE, FILE, {"test_a": ("jax",)})
    assert cases_left(slow_ones_only=False, turn=72) == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("table", ["EVERY_CASE", "SELDOM"])
def test_the_tables_name_tests_that_there_are(table):
    for file, of_file in getattr(turns_plugin, table).items():
        tree = ast.parse((PLUGIN.parents[2] / file).read_text(encoding="utf-8"))
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert set(of_file) <= (names if isinstance(of_file, dict) else set(BACKENDS)), file
