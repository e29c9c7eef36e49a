"""G7 on torch: inf on rank k alone, for each k, under `DistributedDataParallel`."""

import numpy as np
import pytest

from tests.distributed.launch import free_ports, run_workers

pytestmark = pytest.mark.backends("torch")


def assert_equal(one, many):
    assert one["scale"] == many["scale"] == 1024.0
    for a, b in zip(one["weights"], many["weights"], strict=True):
        # float16 has 11 significant bits, and the batch is summed in another order
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=5e-4)


@pytest.fixture(scope="module")
def results():
    (port,) = free_ports(1)
    return run_workers("ddp.py", [(["--rank", rank, "--port", port], {}) for rank in range(2)], timeout_s=180)


def test_each_rank_alone_skips_the_step_of_all(results):
    unknown = "input, and the first rank does not know its loss"
    expected = [
        (0, "input", 1024.0),
        (0, "gradient", 512.0),
        # Nobody who knows its loss has a bad one: the gradients decide, and the scale halves.
        (0, unknown, 256.0),
        (1, "input", 256.0),
        (1, "gradient", 128.0),
        (1, unknown, 128.0),
    ]
    for result in results:
        faults = result["faults"]
        assert [(fault["rank"], fault["kind"], fault["scale"]) for fault in faults] == expected
        assert all(fault["changed"] == [] and fault["new_skips"] == 1 for fault in faults)
        assert result["learns_on"]


def test_our_step_with_averaged_gradients(results):
    for result in results:
        own = result["own_step"]
        # It knows the loss of every rank: the scale halves for gradients alone.
        assert [fault["scale"] for fault in own["faults"]] == [1024.0, 512.0, 512.0, 512.0, 256.0, 256.0]
        assert all(fault["changed"] == [] and fault["new_skips"] == 1 for fault in own["faults"])
        assert own["learns_on"]
        assert_equal(result["one"], own)
    assert results[0]["own_step"]["weights"] == results[1]["own_step"]["weights"]


def test_without_faults_two_ranks_equal_one_device_with_the_joined_batch(results):
    for result in results:
        assert_equal(result["one"], result["many"])
    assert results[0]["many"] == results[1]["many"]


def test_an_audit_says_who_decides_what_travels(results):
    for result in results:
        (line,) = result["audited"]
        assert line.startswith("2 ranks share a batch. What travels between them torch says")


def test_torchs_own_16_bit_sums_equal_the_float32_sums_to_rounding(results):
    for result in results:
        assert_equal(result["many"], result["compressed"])
        assert result["many"]["weights"] != result["compressed"]["weights"]


def test_ranks_that_reduce_nothing_else_decide_together(results):
    for result in results:
        assert result["own_gradients"] == {"value": [1.0, 1.0, 1.0], "skipped": 1}
