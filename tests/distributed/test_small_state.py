"""Small weights and slots on several devices: each rounds as the others do, and as one device alone."""

import keras
import pytest

from tests.distributed.launch import run_program

WAYS = {"tensorflow": ["mirrored"], "jax": ["data_parallel", "model_parallel"], "torch": []}


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "jax")
@pytest.mark.every_case
@pytest.mark.parametrize("way", WAYS[keras.backend.backend()])
def test_all_devices_round_alike(way):
    result = run_program("small_state.py", way)
    assert result["dtypes"] == ["bfloat16", "float32"]
    assert max(result.pop("copies")) == 1
    assert result["like_one_device"] and result["moved"] and result["no_trace"]
    assert result["skipped"] == 1
