"""The benchmark harness: orders, clock readings, medians, ratios and tables worked out by hand."""

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


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: harness.round_orders([], rounds=1), "at least one step"),
        (lambda: harness.time_interleaved({"a": print}, rounds=0), "rounds=0, warm_up=.*Pass 1 or more"),
        (lambda: harness.time_interleaved({"a": print}, rounds=1, warm_up=0), "rounds=1, warm_up=0. Pass 1 or more"),
        (lambda: harness.paired_ratios([1.0, 2.0], [1.0]), "Received: 2 and 1"),
    ],
    ids=["no name", "no rounds", "no warm-up", "ratios of different rounds"],
)
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        pytest.param([5.0], {"median": 5.0, "q1": 5.0, "q3": 5.0}, id="one value"),
        pytest.param([1.0, 2.0, 3.0, 4.0, 100.0], {"median": 3.0, "q1": 2.0, "q3": 4.0}, id="outlier ignored"),
        pytest.param([4.0, 1.0], {"median": 2.5, "q1": 1.75, "q3": 3.25}, id="between two values"),
    ],
)
def test_summarize(values, expected):
    assert harness.summarize(values) == expected


def test_ratio_is_taken_within_each_round():
    # The machine got five times slower from round to round; the ratio shows nothing of that.
    compared = harness.compare({"bare": [2.0, 6.0, 10.0], "ours": [4.0, 12.0, 20.0]}, baseline="bare")
    assert compared["ours"]["ratio"] == {"median": 2.0, "q1": 2.0, "q3": 2.0}
    assert compared["ours"]["time_ms"] == {"median": 12.0, "q1": 8.0, "q3": 16.0}
    assert compared["bare"]["ratio"]["median"] == 1.0


def test_tables_and_files(tmp_path):
    rows = [{"step": "jax jit", "ms": "1.5"}, {"step": "torch", "ms": "10.25"}]
    assert harness.format_table(rows) == "\n".join(["step     ms", "-------  -----", "jax jit  1.5", "torch    10.25"])
    assert harness.format_table([]) == ""
    harness.write_json(tmp_path / "new" / "results.json", {"ratio": 1.25, "losses": [0.5, float("nan"), float("-inf")]})
    # What JSON knows alone: other programs read it, too.
    text = (tmp_path / "new" / "results.json").read_text()
    assert json.loads(text, parse_constant=pytest.fail) == {"ratio": 1.25, "losses": [0.5, None, None]}


def test_environment_names_versions_and_device():
    found = harness.environment()
    assert {"python", "keras", "mpkeras", found["backend"]} <= found["versions"].keys()
    assert found["threads"] >= 1 and found["cores"] >= 1 and found["devices"] and found["cpu"]
    (line,) = harness.environment_lines([found])
    assert f"keras {found['versions']['keras']}" in line and f"{found['cores']} cores" in line


def test_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    summary = {"median": 1.5, "q1": 1.25, "q3": 2.0}
    path, series = tmp_path / "plot.png", {"jax": {"keras": summary, "mpkeras": summary}, "torch": {"keras": summary}}
    harness.write_bar_plot(path, series, title="title", ylabel="ratio", goals={"jax": 1.25})
    assert path.read_bytes().startswith(b"\x89PNG")
