"""G7 on torch: inf on rank k alone, for each k, under `DistributedDataParallel` and in a step of ours."""

import pytest

from tests.distributed.expectations import check_equal, check_faults
from tests.distributed.launch import run_processes

pytestmark = pytest.mark.backends("torch")


def test_each_rank_alone_skips_the_step_of_all():
    """And without faults two ranks equal one device with the joined batch: one run of two processes for all of it."""
    loops = run_processes("train.py", "ranks", "--by", "loop")
    unknown = "input, and the first rank does not know its loss"
    expected = [
        (0, "input", [1024.0]),
        (0, "gradient", [512.0]),
        # Nobody who knows its loss has a bad one: the gradients decide, and the scale halves.
        (0, unknown, [256.0]),
        (1, "input", [256.0]),
        (1, "gradient", [128.0]),
        (1, unknown, [128.0]),
    ]
    for result in loops:
        faults = result["faults"]
        assert [(fault["shard"], fault["kind"], fault["scales"]) for fault in faults] == expected
        assert all(fault["changed"] == [] and fault["new_skips"] == 1 for fault in faults)
        assert result["learns_on"] and result["finite"]
        (line,) = result["audited"]
        assert line.startswith("2 ranks share a batch. What travels between them torch says")
        # Ranks that reduce nothing else decide together.
        assert result["own_gradients"] == {"value": [1.0, 1.0, 1.0], "skipped": 1}
        check_equal(result["one"], result["many"], scale=1024.0)
        # torch's own sums in 16 bits equal those in float32 to rounding.
        check_equal(result["many"], result["compressed"], scale=1024.0)
        assert result["many"]["weights"] != result["compressed"]["weights"]
    assert loops[0]["many"] == loops[1]["many"]


@pytest.mark.slow
def test_our_step_with_averaged_gradients():
    results = run_processes("train.py", "ranks", "--by", "step")
    capsules = [result["capsule"] for result in results]
    assert [(capsule["devices"], capsule["skipped"]) for capsule in capsules] == [(2, False), (2, True)]
    # The first rank's own rows are not at fault, and its file says so.
    assert "in these rows, and 2 devices decided together: run the capsule of another rank" in capsules[0]["remedy"]
    assert capsules[1]["same_bits"] and "Gradients overflow at a loss scale of 1024" in capsules[1]["remedy"]
    for result in results:
        # It knows the loss of every rank: the scale halves for gradients alone.
        check_faults(result, shards=2, copies=1)
        check_equal(result["one"], result["many"], scale=1024.0)
    assert results[0]["many"]["weights"] == results[1]["many"]["weights"]
