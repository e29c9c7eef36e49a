"""benchmarks/all_reduce.py: what it prints."""

import json

import pytest

import all_reduce as benchmark

# What is tested here needs no strategy: tests/distributed has those.
pytestmark = pytest.mark.backends("tensorflow")


def summary(median):
    return {"median": median, "q1": median, "q3": median}


FOUND = {
    "environment": {
        "backend": "tensorflow", "versions": {"keras": "3"}, "devices": ["cpu"], "threads": 1, "cpu": "one", "cores": 1,
    },
    "results": [
        {"variant": name, "params": 1001000, "time_ms": summary(20 * share), "ratio": summary(share),
         "sent_bytes": 4e6 * share, "sent_share": share}
        for name, share in (("as they are", 1.0), ("float16", 0.5))
    ],
}  # fmt: skip


def test_what_people_see(monkeypatch, tmp_path, capsys):
    asked = []
    monkeypatch.setattr(benchmark, "measure", lambda arguments: asked.append(arguments) or FOUND)
    monkeypatch.setattr("sys.argv", ["all_reduce.py", "--quick", "--json", str(tmp_path / "found.json")])
    assert benchmark.main() == 0
    assert asked == [["--layers", "1", "--rounds", "3", "--steps", "3"]]
    row = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("float16"))
    assert row.split()[:5] == ["float16", "1,001,000", "2.0", "0.50", "10.000"]
    assert json.loads((tmp_path / "found.json").read_text())["results"] == FOUND["results"]
