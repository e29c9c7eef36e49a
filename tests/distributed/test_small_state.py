"""Small weights and slots on several devices: each rounds as the others do, and as one device alone."""

import keras
import pytest

from tests.distributed.launch import run_processes, run_program

# How a model is trained there; on torch on two ranks, in a loop under `DistributedDataParallel` and in a step of ours.
WAYS = {"tensorflow": ["mirrored"], "jax": ["data_parallel", "model_parallel"], "torch": ["loop", "step"]}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS[keras.backend.backend()])
def test_all_devices_round_alike(way, backend):
    if backend == "torch":
        results = run_processes("small_state.py", "ranks", "--by", way)
        assert results[0] == results[1]
    else:
        results = [run_program("small_state.py", way, "--shards", 4 if way == "mirrored" else 2, "--devices", 4)]
    for result in results:
        for one, many, with_faults in (found.values() for found in result.values()):
            assert "bfloat16" in one["dtypes"] and one["moved"]
            assert set(many["copies"]) == {1}
            assert many["bits"] == one["bits"]
            # A fault in one shard is skipped by all, and leaves no trace.
            assert with_faults["bits"] == many["bits"]
            assert (many["skipped"], with_faults["skipped"]) == (0, 2)
