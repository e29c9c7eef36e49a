"""benchmarks/run_all.py: runs of benchmarks that take no time."""

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


def test_a_failed_benchmark_is_one_and_the_others_run(monkeypatch, tmp_path, capsys):
    calls = []

    def fake(name, arguments, out):
        calls.append((name, arguments))
        return None if name == "peers" else {"results": []}

    monkeypatch.setattr(benchmark, "run_script", fake)
    assert benchmark.run(["peers", "monitor_overhead"], True, [], tmp_path) == 1
    assert calls == [("peers", ["--quick"]), ("monitor_overhead", ["--quick", *benchmark.SCRIPTS["monitor_overhead"]])]
    assert "peers             " in capsys.readouterr().out
