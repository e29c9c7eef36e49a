"""The benchmark harness: orders, clock readings, medians, ratios and tables worked out by hand."""

import json

import pytest

import harness

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")


class FakeClock:
    """A clock that only moves when told to."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


def test_every_round_holds_every_name_once():
    for order in harness.round_orders(["a", "b", "c"], rounds=7):
        assert sorted(order) == ["a", "b", "c"]


def test_each_name_comes_first_equally_often():
    first = [order[0] for order in harness.round_orders(["a", "b", "c"], rounds=12)]
    assert {name: first.count(name) for name in "abc"} == {"a": 4, "b": 4, "c": 4}


def test_orders_repeat_with_the_seed_and_change_with_it():
    names = ["a", "b", "c", "d"]
    assert harness.round_orders(names, 20, seed=1) == harness.round_orders(names, 20, seed=1)
    assert harness.round_orders(names, 20, seed=1) != harness.round_orders(names, 20, seed=2)


def test_no_name_is_an_error():
    with pytest.raises(ValueError, match="at least one step"):
        harness.round_orders([], rounds=1)


def test_only_the_step_and_the_wait_are_timed():
    clock = FakeClock()

    def work(seconds):
        clock.seconds += seconds

    times = harness.time_interleaved(
        {"fast": lambda: work(0.002), "slow": lambda: work(0.010)},
        rounds=3,
        wait=lambda result: work(0.001),
        before=lambda: work(5.0),
        clock=clock,
    )
    assert times["fast"] == pytest.approx([3.0, 3.0, 3.0])
    assert times["slow"] == pytest.approx([11.0, 11.0, 11.0])


def test_warm_up_runs_first_and_is_not_timed():
    calls = []
    times = harness.time_interleaved(
        {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=1, warm_up=2
    )
    assert calls[:4] == ["a", "a", "b", "b"]
    assert sorted(calls[4:]) == ["a", "b"]
    assert [len(values) for values in times.values()] == [1, 1]


@pytest.mark.parametrize("counts", [{"rounds": 0}, {"rounds": 1, "warm_up": 0}], ids=str)
def test_no_rounds_and_no_warm_up_are_errors(counts):
    with pytest.raises(ValueError, match=r"rounds=\d, warm_up=\d\. Pass 1 or more"):
        harness.time_interleaved({"a": lambda: None}, **counts)


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


def test_ratios_of_different_rounds_are_an_error():
    with pytest.raises(ValueError, match="Received: 2 and 1"):
        harness.paired_ratios([1.0, 2.0], [1.0])


def test_format_table():
    rows = [{"step": "jax jit", "ms": "1.5"}, {"step": "torch", "ms": "10.25"}]
    assert harness.format_table(rows) == "\n".join(["step     ms", "-------  -----", "jax jit  1.5", "torch    10.25"])
    assert harness.format_table([]) == ""


def test_environment_names_versions_and_device(capsys):
    found = harness.environment()
    assert {"python", "keras", "mpkeras", found["backend"]} <= found["versions"].keys()
    assert found["threads"] >= 1 and found["cores"] >= 1 and found["devices"] and found["cpu"]
    (line,) = harness.environment_lines([found])
    assert f"keras {found['versions']['keras']}" in line and f"{found['cores']} cores" in line


def test_results_are_written(tmp_path):
    path = tmp_path / "new" / "results.json"
    harness.write_json(path, {"ratio": 1.25})
    assert json.loads(path.read_text()) == {"ratio": 1.25}


def test_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    summary = {"median": 1.5, "q1": 1.25, "q3": 2.0}
    path = tmp_path / "plot.png"
    harness.write_bar_plot(
        path,
        {"jax": {"keras": summary, "mpkeras": summary}, "torch": {"keras": summary}},
        title="title",
        ylabel="ratio",
        goals={"jax": 1.25},
    )
    assert path.read_bytes().startswith(b"\x89PNG")
