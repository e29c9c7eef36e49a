"""G7: all replicas take the same decision. One inf on one of two replicas is in `test_pains.py`."""

import numpy as np
import pytest

from tests.distributed.launch import run_mirrored

pytestmark = pytest.mark.backends("tensorflow")


def test_inf_on_the_last_of_four_replicas_in_eager_mode():
    result = run_mirrored("--replicas", "4", "--bad-replica", "3", "--eager")
    assert result["weights_unchanged"]
    assert result["state_finite"]
    assert result["scales"] == [1024.0] * 4


def test_the_callback_makes_its_variables_on_every_replica():
    result = run_mirrored("--bad-replica", "1", "--callback")
    assert result["weights_unchanged"]
    assert result["state_finite"]
    assert result["scales"] == [1024.0, 1024.0]


def test_two_replicas_without_faults_equal_one_device_with_the_joined_batch():
    # Without BatchNormalization, whose statistics are taken per replica.
    two, one = run_mirrored("--no-batchnorm"), run_mirrored("--no-batchnorm", "--replicas", "1")
    assert not two["weights_unchanged"]
    for a, b in zip(two["weights"], one["weights"], strict=True):
        # float16 has 11 significant bits, and the batch is summed in another order
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=5e-4)


def test_xla_under_a_strategy_is_refused_by_name():
    with pytest.raises(AssertionError, match="XLA"):
        run_mirrored("--jit")
