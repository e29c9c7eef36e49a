"""G7 on JAX: inf in the rows of shard k alone, for each k, under `keras.distribution` and in several processes."""

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras import _keras
from tests.distributed.expectations import check_equals_one_device, check_faults
from tests.distributed.launch import free_ports, run_program, run_workers

pytestmark = pytest.mark.backends("jax")


def test_each_shard_under_data_parallel():
    result = run_program("train.py", "data_parallel", "--shards", 8)
    (line,) = result["audited"]
    assert line.startswith("What travels between the 8 devices that share a batch is not counted")
    check_faults(result, shards=8, copies=8)
    check_equals_one_device(result)
    assert result["new_traces"] == 0
    assert result["layouts_kept"]


@pytest.mark.slow
def test_each_shard_under_model_parallel():
    # A mesh of 4 x 2: the batch is cut in four, kernels and their momenta in two.
    result = run_program("train.py", "model_parallel", "--shards", 4)
    check_faults(result, shards=4, copies=8)
    check_equals_one_device(result)
    assert result["new_traces"] == 0
    assert result["layouts_kept"]
    parts = result["part_shapes"]
    assert [parts["dense/kernel"], parts["sgd/dense_kernel_momentum"]] == [[8, 4], [8, 4]]


@pytest.mark.slow
def test_each_shard_in_two_processes():
    (port,) = free_ports(1)
    arguments = ["data_parallel", "--shards", 8, "--processes", 2, "--port", port]
    results = run_workers("train.py", [([*arguments, "--process", i], {}) for i in range(2)], timeout_s=180)
    for result in results:
        # Four of the eight devices are seen by each process.
        check_faults(result, shards=8, copies=4)
        check_equals_one_device(result)
        assert result["new_traces"] == 0
        assert result["layouts_kept"]
    assert results[0]["many"] == results[1]["many"]


@pytest.mark.parametrize("accumulate_steps", [None, 2])
def test_a_layout_that_fits_the_name_of_the_optimizer_is_for_weights_alone(accumulate_steps):
    # RMSNormalization calls its weight "scale", and every variable of a `loss_scale_optimizer` has that in its path.
    layout = keras.distribution.LayoutMap(keras.distribution.DeviceMesh((1, 1), ["batch", "model"], ["cpu:0"]))
    layout[".*scale"] = ("model",)
    distribution = keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
    with distribution.scope():
        weight = keras.Variable(np.ones(2), name="scale")
        optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.5, gradient_accumulation_steps=accumulate_steps))
        optimizer.build([weight])
    axes = {variable.path: _keras.layout_of(variable).axes for variable in [weight, *optimizer.variables]}
    numbers = [variable.path for variable in optimizer.variables if variable.shape == ()]
    assert len(numbers) >= 9 and {axes.pop(path) for path in numbers} == {()}
    # The weight, and sums of its gradients.
    assert set(axes.values()) == {("model",)}
