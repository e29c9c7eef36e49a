"""benchmarks/black_box.py: a few faults on the active backend."""

import json

import keras
import pytest

import black_box as benchmark


@pytest.mark.slow
def test_each_fault_is_kept_runs_again_and_is_named():
    # Each of the nine once.
    results = json.loads(json.dumps(benchmark.measure_faults(9, first=9)))
    (all_of_them,) = [result for result in results if result["part"] == "all"]
    assert all_of_them["faults"] == 9 and all_of_them["misses"] == []
    assert all_of_them["same_bits_share"] == all_of_them["right_share"] == 1.0
    file = {"backend": keras.backend.backend(), **benchmark.measure_file(2000)}
    rows = benchmark.table_rows([{"backend": "x", **all_of_them}, file])
    assert (
        rows[0]["measured"] == "9 faults: same bits 100.0%, right operation 100.0%" and "bytes" in rows[1]["measured"]
    )


@pytest.mark.backends("tensorflow")
def test_a_log_is_gone_on_with(tmp_path, monkeypatch):
    log = tmp_path / "faults.jsonl"
    of_others = {"backend": "jax", "seed": 2, "fault": "exponential", "same_bits": False, "right": False, "found": "x"}
    log.write_text(json.dumps(of_others) + "\n")
    seeds = []

    def try_fault(seed, own, folder):
        seeds.append(seed)
        skipped = {"fault": "exponential", "same_bits": True, "right": seed != 3, "found": "y"}
        return {"backend": "tensorflow", "seed": seed, **({"fault": None} if seed == 4 else skipped)}

    monkeypatch.setattr(benchmark, "try_fault", try_fault)
    benchmark.measure_faults(2, first=1, log=str(log))
    results = benchmark.measure_faults(4, first=1, log=str(log))
    assert seeds == [1, 2, 3, 4] and len(log.read_text().splitlines()) == 5
    kinds = {result["part"]: result for result in results}
    assert kinds["not skipped"]["faults"] == 1 and kinds["all"]["faults"] == kinds["exponential"]["faults"] == 3
    assert kinds["all"]["same_bits_share"] == 1.0 and kinds["all"]["right_share"] == 2 / 3
    assert kinds["all"]["misses"] == [{"seed": 3, "fault": "exponential", "same_bits": True, "found": "y"}]
    # No time is left for a fifth one.
    assert benchmark.measure_faults(5, first=1, log=str(log), minutes=-1.0) == results
