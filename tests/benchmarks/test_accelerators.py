"""benchmarks/accelerators.py: what it keeps, and the steps of peers, compiled for this CPU."""

import json

import pytest

import accelerators as benchmark

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")


def test_what_is_there_is_kept_and_the_largest_batch_is_added(tmp_path, monkeypatch, capsys):
    def forecast_model(name, device, policy, *, is_tiny, largest_batch):
        asked.append((policy, largest_batch))
        sizes = {"persistent_bytes": 2**30, "temporary_bytes": 2**31, "peak_bytes": 2**31, "fits": True}
        found = {"largest_batch": 96 if largest_batch else None, "products": {}, "conditionals": 0}
        return {"step": "mpkeras", "batch": 32, **sizes, **found}

    asked = []
    monkeypatch.setattr(benchmark, "forecast_model", forecast_model)
    options = ["--device", "l4", "--model", "bert_base", "--json", str(tmp_path / "found.json")]
    benchmark.main([*options, "--policy", "float32"])
    for _ in range(2):
        benchmark.main([*options, "--policy", "float32", "--policy", "bfloat16", "--largest-batch"])
    assert asked == [("float32", False), ("float32", True), ("bfloat16", True)]
    results = json.loads((tmp_path / "found.json").read_text())["results"]
    assert [(row["policy"], row["largest_batch"]) for row in results] == [("float32", 96), ("bfloat16", 96)]
    assert capsys.readouterr().out.count(" 96 ") == 2 * 2


@pytest.mark.slow
@pytest.mark.backends("jax")
@pytest.mark.parametrize("peer", ["keras", "jmp", "flax"])
def test_the_step_of_a_peer_is_compiled_for_the_same_model(peer):
    for needed in {"keras": (), "jmp": ("jmp", "optax"), "flax": ("flax", "optax")}[peer]:
        pytest.importorskip(needed)
    found = benchmark.compile_peer("resnet50", "cpu", "mixed_float16", peer, is_tiny=True)
    ours = benchmark.forecast_model("resnet50", "cpu", "mixed_float16", is_tiny=True, largest_batch=False)
    assert sum(found["products"].values()) == sum(ours["products"].values())
    # Weights and Adam's two moments in float32, statistics, and a handful of numbers.
    assert abs(found["persistent_bytes"] - ours["persistent_bytes"]) < 100
    assert found["fits"] and found["temporary_bytes"] > 0
    # Keras decides about an update with `cond`, where mpkeras, jmp and flax select.
    assert (found["conditionals"] > 0) == (peer == "keras")
