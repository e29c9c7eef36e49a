"""benchmarks/fine_tune.py: a run of the transformer."""

import json

import numpy as np
import pytest

import fine_tune as benchmark

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")

pytest.importorskip("sklearn")


@pytest.mark.slow
@pytest.mark.parametrize("policy", benchmark.POLICIES)
def test_the_transformer_trains(policy, monkeypatch):
    monkeypatch.setattr(benchmark, "BATCHES", 1)
    result = json.loads(json.dumps(benchmark.train("transformer", policy, steps=5, size=16)))
    assert result["unexpected"] == []
    assert not any(result["skipped"])
    assert result["loss"][-1] < result["loss"][0] == pytest.approx(np.log(256), rel=0.1)
    assert benchmark.table_rows([{"backend": "jax", **result}])[0]["unexpected"] == "0"
