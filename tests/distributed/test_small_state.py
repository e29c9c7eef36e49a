"""Small weights and slots on several devices: each rounds as the others do, and as one device alone."""

import keras
import pytest

from tests.distributed.launch import free_ports, run_program, run_workers

WAYS = {"tensorflow": ["mirrored"], "jax": ["data_parallel", "model_parallel"], "torch": []}


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "jax")
@pytest.mark.parametrize("way", WAYS[keras.backend.backend()])
def test_all_devices_round_alike(way):
    result = run_program("small_state.py", way)
    assert result["dtypes"] == ["bfloat16", "float32"]
    assert max(result.pop("copies")) == 1
    assert result["like_one_device"] and result["moved"] and result["no_trace"]
    assert result["skipped"] == 1


@pytest.fixture(scope="module")
def ranks():
    (port,) = free_ports(1)
    return run_workers("small_state_ddp.py", [(["--rank", rank, "--port", port], {}) for rank in range(2)], 180)


@pytest.mark.slow
@pytest.mark.backends("torch")
@pytest.mark.parametrize("what", ["weights and slots", "slots"])
@pytest.mark.parametrize("way", ["loop", "step"])
def test_ranks_round_as_one_process_does(ranks, way, what):
    """Under `DistributedDataParallel`: a fault on one rank is skipped by both."""
    for result in ranks:
        one, found, skipped = (result[what][name] for name in ("one", way, f"{way}, with a fault"))
        assert "bfloat16" in one["dtypes"] and one["moved"]
        assert found == one
        assert (skipped.pop("skipped"), found.pop("skipped")) == (2, 0)
        assert skipped == found
    assert ranks[0][what] == ranks[1][what]
