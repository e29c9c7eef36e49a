"""benchmarks/memory.py: what XLA says about a tiny step, and the ratios."""

import keras
import numpy as np
import pytest

import memory as benchmark

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")


def test_the_ratio_is_to_float32_of_the_same_target(monkeypatch):
    found = {("cpu", "float32"): 300, ("cpu", "mixed_bfloat16"): 200, ("tpu v5p", "float32"): 100}
    found["tpu v5p", "mixed_bfloat16"] = 50
    monkeypatch.setattr(
        benchmark,
        "compile_step",
        lambda name, policy, target: {"temporary_bytes": found[target, policy], "argument_bytes": 7, "seconds": 0.0},
    )
    monkeypatch.setattr(benchmark.harness, "environment", lambda: {"versions": {}})
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0")
    results = benchmark.measure(["resnet50"], ["float32", "mixed_bfloat16"], ["cpu", "tpu v5p"])["results"]
    assert [entry["ratio"]["median"] for entry in results] == [1.0, 200 / 300, 1.0, 0.5]
    assert ["goal_ratio" in entry for entry in results] == [False, True, False, True]
    assert [row["goal"] for row in benchmark.table_rows(results)] == ["", "0.67", "", "0.67"]


@pytest.mark.backends("jax")
def test_the_arguments_of_a_step_are_weights_optimizer_and_batch(monkeypatch):
    import memory_models

    def build():
        return keras.Sequential([keras.Input((64,)), keras.layers.Dense(256, "relu"), keras.layers.Dense(10)])

    batch = np.zeros((8, 64), "float32"), np.zeros(8, "int32")
    monkeypatch.setitem(memory_models.MODELS, "bert_small", (build, lambda: batch, "tiny"))
    found = benchmark.compile_step("bert_small", "float32", "cpu")
    weights = 64 * 256 + 256 + 256 * 10 + 10
    held = 3 * 4 * weights + sum(values.nbytes for values in batch)
    # Besides them a few scalars: counters, the loss scale, the learning rate.
    assert held < found["argument_bytes"] < held + 200
    assert 0 < found["temporary_bytes"] < held
