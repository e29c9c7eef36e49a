"""benchmarks/black_box.py: a few faults on the active backend."""

import json

import keras
import pytest

import black_box as benchmark


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is given numbers beyond float16:UserWarning")  # a fault of some
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
