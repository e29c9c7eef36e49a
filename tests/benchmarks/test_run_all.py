"""benchmarks/run_all.py: its goals, and runs of benchmarks that take no time."""

from pathlib import Path

import pytest

import run_all as benchmark

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")

# Writes what a benchmark writes, or fails.
SCRIPT = """
import argparse, json, pathlib, sys
parser = argparse.ArgumentParser()
for name in ("json", "plot", "backend", "status"):
    parser.add_argument(f"--{name}")
parser.add_argument("--quick", action="store_true")
options = parser.parse_args()
print("the table, quick" if options.quick else "the table")
result = {"mode": "jax jit", "ratio": {"median": 1.2}, "goal_ratio": 1.25}
pathlib.Path(options.json).write_text(json.dumps({"results": [result]}))
if options.plot:
    pathlib.Path(options.plot).write_text("a picture")
sys.exit(int(options.status or 0))
"""


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "peers.py").write_text(SCRIPT)
    return folder


def summary(median):
    return {"median": median, "q1": median - 0.1, "q3": median + 0.1}


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        pytest.param({"ratio": summary(1.0)}, [], id="no goal"),
        pytest.param({"goal_ratio": 1.25}, [], id="not measured"),
        pytest.param({"ratio": summary(1.0), "goal_ratio": 1.25}, [("ratio", 1.0, True, 0.2)], id="reached"),
        pytest.param({"ratio": summary(1.25), "goal_ratio": 1.25}, [("ratio", 1.25, True, 0.0)], id="just reached"),
        pytest.param({"ratio": summary(1.5), "goal_ratio": 1.25}, [("ratio", 1.5, False, -0.2)], id="missed"),
        pytest.param(
            {"ratio": summary(1.0), "rollback_ratio": summary(1.53), "goal_rollback_ratio": 1.02},
            [("rollback_ratio", 1.53, False, -0.5)],
            id="of the rollback alone",
        ),
        pytest.param(
            {"speedup": summary(1.5), "goal_speedup": 1.25}, [("speedup", 1.5, True, 0.2)], id="higher is better"
        ),
        pytest.param({"speedup": summary(1.0), "goal_speedup": 1.25}, [("speedup", 1.0, False, -0.2)], id="too slow"),
        pytest.param({"share": 0.5, "goal_share": 0.625}, [("share", 0.5, True, 0.2)], id="a number"),
    ],
)
def test_goals_of(result, expected):
    found = benchmark.goals_of(result)
    assert [(goal["quantity"], goal["measured"], goal["reached"]) for goal in found] == [
        (quantity, measured, reached) for quantity, measured, reached, _ in expected
    ]
    assert [goal["margin"] for goal in found] == pytest.approx([margin for *_, margin in expected])


def test_goal_rows_say_by_how_much():
    result = {"mode": "jax jit", "variant": "mpkeras", "ratio": summary(1.5), "goal_ratio": 1.25}
    better = {"model": "mlp", "params": 3000, "batch_size": 8, "speedup": 2.0, "goal_speedup": 1.6}
    rows = benchmark.goal_rows({"a": benchmark.goals_of(result), "b": benchmark.goals_of(better)})
    assert [list(row.values()) for row in rows] == [
        ["a", "jax jit, mpkeras", "ratio", "1.5", "≤ 1.25", "missed by 20%"],
        ["b", "mlp, 3,000 parameters, batch 8", "speedup", "2", "≥ 1.6", "reached, 25% better"],
    ]


def test_every_script_with_quick_is_run():
    texts = {path.stem: path.read_text() for path in Path(benchmark.__file__).parent.glob("*.py")}
    quick = {name for name, text in texts.items() if '"--quick"' in text and name != "run_all"}
    assert quick <= {*benchmark.SCRIPTS, *benchmark.OTHERS}


def test_files_are_written_and_a_failure_leaves_earlier_ones(folder, tmp_path, capsys):
    out = tmp_path / "out"
    content = benchmark.run_script("peers", ["--quick"], out, folder)
    assert content["results"][0]["goal_ratio"] == 1.25
    assert (out / "peers.txt").read_text() == "the table, quick\n"
    assert (out / "peers.json").exists() and "the table, quick" in capsys.readouterr().out
    assert benchmark.run_script("peers", ["--status", "3"], out, folder) is None
    assert (out / "peers.txt").read_text() == "the table, quick\n"
    assert "exit status 3" in capsys.readouterr().err


@pytest.mark.parametrize(("ratio", "text"), [(1.0, "1 of 1 reached"), (1.5, "0 of 1 reached")])
def test_a_missed_goal_is_no_failure(ratio, text, monkeypatch, tmp_path, capsys):
    content = {"results": [{"ratio": summary(ratio), "goal_ratio": 1.25}]}
    monkeypatch.setattr(benchmark, "run_script", lambda *arguments: content)
    assert benchmark.run(["peers"], True, ["jax"], tmp_path) == 0
    assert text in capsys.readouterr().out


def test_a_failed_benchmark_is_one_and_the_others_run(monkeypatch, tmp_path, capsys):
    calls = []

    def fake(name, arguments, out):
        calls.append((name, arguments))
        return None if name == "peers" else {"results": []}

    monkeypatch.setattr(benchmark, "run_script", fake)
    assert benchmark.run(["peers", "monitor_overhead"], True, [], tmp_path) == 1
    assert calls == [("peers", ["--quick"]), ("monitor_overhead", ["--quick", *benchmark.SCRIPTS["monitor_overhead"]])]
    assert "peers             " in capsys.readouterr().out
