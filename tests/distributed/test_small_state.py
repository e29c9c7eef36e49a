"""Small weights and slots on several devices: each rounds as the others do, and as one device alone."""

import keras
import pytest

from tests.distributed.launch import run_processes, run_program

WAYS = {"tensorflow": ["mirrored"], "jax": ["data_parallel", "model_parallel"], "torch": ["ranks"]}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS[keras.backend.backend()])
def test_all_devices_round_alike(way):
    if way == "ranks":
        results = run_processes("small_state.py", way)
        assert results[0] == results[1]
    else:
        results = [run_program("small_state.py", way, "--shards", 2, "--devices", 4)]
    for result in results:
        for case, one, many, with_faults in (found.values() for found in result):
            assert "bfloat16" in one["dtypes"] and one["moved"], case
            assert set(many["copies"]) == {1}, case
            assert many["bits"] == one["bits"], case
            # A fault in one shard is skipped by all, and leaves no trace.
            assert with_faults["bits"] == many["bits"], case
            assert (many["skipped"], with_faults["skipped"]) == (0, 2), case
