"""`make_train_step` on many devices: inf on shard k alone, for each k, and one device with the joined batch."""

import numpy as np
import pytest

from tests.distributed.expectations import check_equals_one_device, check_faults
from tests.distributed.launch import run_program


def check(result, shards: int, copies: int, reports: int = 1):
    """Checks variables and what the step reported, on each of `reports` replicas."""
    check_faults(result, shards, copies)
    assert result["new_traces"] == 0
    for fault in result["faults"]:
        assert fault["reported"] == {
            "loss_is_finite": [fault["kind"] == "gradient"] * reports,
            "loss_scale": fault["scales"][:1] * reports,
            "skipped": [1.0] * reports,
        }
    check_equals_one_device(result)
    accumulated = result["accumulated"]
    assert result["many"]["skipped"] == [[0.0] * reports] * 4
    assert accumulated["many"]["skipped"] == [[float(i == 2)] * reports for i in range(4)]
    for one, many in ((result["one"], result["many"]), (accumulated["one"], accumulated["many"])):
        # The loss of the whole batch on every replica: with its weights, and the model's own loss once.
        losses = np.broadcast_to(one["losses"], (4, reports))
        # float16 has 11 significant bits, and the batch is summed in another order
        np.testing.assert_allclose(many["losses"], losses, rtol=2e-3)
        np.testing.assert_allclose(many["metric"], one["metric"], rtol=2e-3)
    if reports == 1:
        assert result["many"]["reported_metric"] == [result["many"]["metric"]]


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize(
    ("replicas", "in_run"),
    [
        pytest.param(2, False, id="2 replicas"),
        pytest.param(1, False, id="1 replica"),
        pytest.param(4, True, id="4 replicas, called in strategy.run"),
    ],
)
def test_each_replica_of_a_mirrored_strategy(replicas, in_run):
    in_run_options = ["--in-run"] if in_run else []
    result = run_program("train.py", "mirrored", "--by", "step", "--shards", replicas, *in_run_options)
    check(result, replicas, copies=replicas, reports=replicas if in_run else 1)
    assert not result["many"]["jit_compile"] and result["one"]["jit_compile"]
    if not in_run:
        many, one = result["sizes"]["many"], result["sizes"]["one"]
        # float16 has 11 significant bits, and the batch is summed in another order
        np.testing.assert_allclose(many["losses"], one["losses"], rtol=2e-3)
        # Two programs for all sizes, each traced on every replica.
        assert (many["traces"], one["traces"]) == (2 * replicas, 2)
    # The weights of the rows, from 0.5 to 2, on all replicas together.
    assert result["state"]["counted"] == 4 * replicas * 1.25
    assert result["state"]["same_weights"]
    # Sums of float32 in another order: a metric that was loaded is shared out evenly.
    assert result["state"]["metric"][0] == pytest.approx(result["state"]["metric"][1], rel=1e-6)
    refused = result["refused"]
    assert "in the scope of one strategy" in refused["optimizer made outside"]
    assert "in the scope of one strategy" in refused["model made outside"]
    assert "XLA" in refused["jit_compile in run"]
    assert "Build the model in the strategy's scope" in refused["not built"]
    if replicas > 1:
        assert "XLA" in refused["jit_compile"] and f"{replicas} replicas" in refused["jit_compile"]
        assert "Return the losses before their mean" in refused["scalar loss"]
        assert f"{replicas} replicas can share equally" in refused["odd rows"]
    else:
        assert refused["jit_compile"] == refused["scalar loss"] == refused["odd rows"] == ""


@pytest.mark.slow
@pytest.mark.backends("jax")
@pytest.mark.parametrize(("where", "shards"), [("data_parallel", 8), ("model_parallel", 4)])
def test_each_shard_of_a_distribution(where, shards):
    result = run_program("train.py", where, "--by", "step", "--shards", shards)
    check(result, shards, copies=8)
    assert result["layouts_kept"]
    if where == "model_parallel":
        parts = result["part_shapes"]
        assert [parts["dense/kernel"], parts["sgd/dense_kernel_momentum"]] == [[8, 4], [8, 4]]
