"""benchmarks/memory.py: what XLA says about a tiny step, and the ratios."""

import keras
import numpy as np
import pytest

import memory as benchmark

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")


@pytest.mark.backends("jax")
def test_the_arguments_of_a_step_are_weights_optimizer_and_batch(monkeypatch):
    import memory_models

    def build():
        return keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(10)])

    batch = np.zeros((8, 64), "float32"), np.zeros(8, "int32")
    monkeypatch.setitem(memory_models.MODELS, "bert_small", (build, lambda: batch, "tiny"))
    results = benchmark.measure(["bert_small"], ["float32", "mixed_bfloat16"], ["cpu"])["results"]
    found = results[0]
    weights = 64 * 256 + 256 + 256 * 10 + 10
    held = 3 * 4 * weights + sum(values.nbytes for values in batch)
    # Besides them a few scalars: counters, the loss scale, the learning rate.
    assert held < found["argument_bytes"] < held + 200
    assert 0 < found["temporary_bytes"] < held
    assert [result["ratio"]["median"] for result in results] == [
        result["temporary_bytes"] / found["temporary_bytes"] for result in results
    ]
    assert [row["policy"] for row in benchmark.table_rows(results)] == ["float32", "mixed_bfloat16"]
