"""The benchmark harness: orders, clock readings and tables worked out by hand."""

import json

import pytest

import harness

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")


def test_rounds_hold_every_name_once_and_each_comes_first_equally_often():
    names = ["a", "b", "c"]
    orders = list(harness.round_orders(names, rounds=12))
    assert all(sorted(order) == names for order in orders)
    first = [order[0] for order in orders]
    assert {name: first.count(name) for name in names} == {"a": 4, "b": 4, "c": 4}
    names = ["a", "b", "c", "d"]
    assert harness.round_orders(names, 20, seed=1) == harness.round_orders(names, 20, seed=1)
    assert harness.round_orders(names, 20, seed=1) != harness.round_orders(names, 20, seed=2)


def test_the_warm_up_comes_first_and_only_the_step_and_the_wait_are_timed():
    seconds, calls = 0.0, []

    def work(name, duration):
        nonlocal seconds
        seconds += duration
        calls.append(name)

    times = harness.time_interleaved(
        {"fast": lambda: work("fast", 0.002), "slow": lambda: work("slow", 0.010)},
        rounds=3,
        warm_up=2,
        wait=lambda result: work("wait", 0.001),
        before=lambda: work("before", 5.0),
        clock=lambda: seconds,
    )
    assert times["fast"] == pytest.approx([3.0, 3.0, 3.0])
    assert times["slow"] == pytest.approx([11.0, 11.0, 11.0])
    steps = [name for name in calls if name in times]
    assert steps[:4] == ["fast", "fast", "slow", "slow"] and sorted(steps[4:6]) == ["fast", "slow"]


def test_tables_and_files(tmp_path):
    rows = [{"step": "jax jit", "ms": "1.5"}, {"step": "torch", "ms": "10.25"}]
    assert harness.format_table(rows) == "\n".join(["step     ms", "-------  -----", "jax jit  1.5", "torch    10.25"])
    assert harness.format_table([]) == ""
    harness.write_json(tmp_path / "new" / "results.json", {"ratio": 1.25, "losses": [0.5, float("nan"), float("-inf")]})
    # What JSON knows alone: other programs read it, too.
    text = (tmp_path / "new" / "results.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"ratio": 1.25, "losses": [0.5, None, None]}
