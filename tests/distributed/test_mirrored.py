"""`MirroredStrategy` with the callback and with XLA. An inf on each replica alone is in `test_replicas.py`."""

import pytest

from tests.distributed.launch import mirrored_runs

pytestmark = pytest.mark.backends("tensorflow")


@pytest.mark.slow
def test_the_callback_makes_its_variables_on_every_replica():
    result = mirrored_runs("callback", "xla")["callback"]
    assert result["weights_unchanged"]
    assert result["state_finite"]
    assert result["scales"] == [1024.0, 1024.0]


@pytest.mark.slow
def test_xla_under_a_strategy_is_refused_by_name():
    assert "XLA" in mirrored_runs("callback", "xla")["xla"]
