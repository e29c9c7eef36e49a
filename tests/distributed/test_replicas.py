"""G7 on TensorFlow: inf on replica k alone, for each k, under `MirroredStrategy` and on several workers."""

import json

import pytest

from tests.distributed.expectations import check_equals_one_device, check_faults
from tests.distributed.launch import free_ports, run_program, run_workers

pytestmark = pytest.mark.backends("tensorflow")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "eager"),
    [
        pytest.param(2, False, id="2 replicas in a graph"),
        # As on a machine with one GPU.
        pytest.param(1, False, id="1 replica in a graph"),
        pytest.param(2, True, id="2 replicas in eager mode"),
        pytest.param(4, False, id="4 replicas in a graph"),
        pytest.param(4, True, id="4 replicas in eager mode"),
    ],
)
def test_each_replica_of_a_mirrored_strategy(replicas, eager):
    result = run_program("train.py", "mirrored", "--shards", replicas, *(["--eager"] if eager else []))
    check_faults(result, shards=replicas, copies=replicas)
    check_equals_one_device(result)
    assert eager or result["new_traces"] == 0
    expected = [f"{replicas} replicas share a batch, each with whole weights"] if replicas > 1 else []
    assert [line.partition(":")[0] for line in result["audited"]] == expected


@pytest.mark.slow
@pytest.mark.parametrize("eager", [False, True], ids=["in a graph", "in eager mode"])
def test_each_worker_of_a_multi_worker_strategy(eager):
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]

    def environment(index):
        config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        return {"TF_CONFIG": json.dumps(config)}

    arguments = ["multiworker", *(["--eager"] if eager else [])]
    results = run_workers("train.py", [(arguments, environment(i)) for i in range(2)], timeout_s=180)
    for result in results:
        check_faults(result, shards=2, copies=1)
        check_equals_one_device(result)
        assert eager or result["new_traces"] == 0
    assert results[0]["many"] == results[1]["many"]
    assert [result["sum_in_16_bits"] for result in results] == [{"value": [-3.0], "scale": 8.0}] * 2
    # A NaN loss that worker 1 alone knows of: skipped by both, and no scale would cure it.
    assert [result["one_worker_knows_its_loss"] for result in results] == [{"value": [1.0, 1.0, 1.0], "scale": 8.0}] * 2
