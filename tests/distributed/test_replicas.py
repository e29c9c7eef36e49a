"""G7 on TensorFlow: inf on replica k alone, for each k, under `MirroredStrategy` and on several workers.

On one replica alone P23 and P39 are these, too: the scale halves where only a gradient overflowed, and stays where the
forward pass is at fault.
"""

import pytest

from tests.distributed.expectations import check_equals_one_device, check_faults
from tests.distributed.launch import run_program, run_tensorflow_workers

pytestmark = pytest.mark.backends("tensorflow")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("replicas", "eager"),
    [
        pytest.param(2, False, id="2 replicas in a graph"),
        # As on a machine with one GPU.
        pytest.param(1, False, id="1 replica in a graph"),
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
    # The callback, made outside the strategy, makes its variables on every replica.
    check_faults(result["callback"], shards=replicas, copies=replicas)
    for name in ("metrics", "metrics_with_callback"):
        counted, skipped = result[name]
        # Of four rows that are called positive two are: where replicas have 1 of 3 and 1 of 1, their mean is neither.
        assert (counted["precision"], counted["seen_precision"], counted["true_positives"]) == (0.5, 0.5, 2.0)
        assert counted["f1"] == pytest.approx(0.5)
        assert (counted["skipped_steps"], skipped["skipped_steps"]) == (1, 2)
        # Nothing has counted: no number is one of the data.
        assert not any(skipped[name] > 0 for name in ("precision", "seen_precision", "true_positives", "f1"))
    # By hand: of the whole batch the gradient is 2 / 8 * (4, 4, 0), of each replica's own rows a part of it.
    assert result["gradients"] == pytest.approx([2**0.5, 1 / 3])
    # The means of 1, 9 and 5, and of 4, 36 and 20: the batch that the scale is found with counts as every other.
    assert result["losses"] == pytest.approx([5, 20])
    # XLA under several replicas is refused by its name.
    assert ("XLA" in result["xla"]) == (replicas > 1 and not eager)


@pytest.mark.slow
def test_each_worker_of_a_multi_worker_strategy():
    results = run_tensorflow_workers("train.py", "multiworker")
    for result in results:
        check_faults(result, shards=2, copies=1)
        check_equals_one_device(result)
        assert result["new_traces"] == 0
        assert result["sum_in_16_bits"] == {"value": [-3.0], "scale": 8.0}
        # A NaN loss that worker 1 alone knows of: skipped by both, and no scale would cure it.
        assert result["one_worker_knows_its_loss"] == {"value": [0.0], "scale": 8.0}
    assert results[0]["many"] == results[1]["many"]
