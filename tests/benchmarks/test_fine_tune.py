"""benchmarks/fine_tune.py: what it finds wrong, the layers of ResNet-50, a run of the transformer."""

import json

import numpy as np
import pytest

import fine_tune as benchmark
import fine_tune_models as models
import mpkeras

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")

pytest.importorskip("sklearn")


def test_passes_are_means_over_the_batches():
    assert benchmark.BATCHES == 4
    assert benchmark.passes([4.0, 2.0, 4.0, 2.0, 9.0, 1.0, 2.0, 1.0, 2.0]) == (3.0, 1.5)


def small_transformer():
    return models.CausalLM(models.Backbone(8, width=16, heads=2, blocks=1))


def test_what_is_wrong_is_named():
    model = mpkeras.apply_policy(small_transformer(), "mixed_bfloat16")
    tokens = np.zeros((2, 8), "int32")
    kept = models.MODELS["transformer"].float32_layers
    assert models.unexpected(models.dtypes(model, tokens), kept, "bfloat16") == []
    model.backbone.get_layer("mlp_up_0").dtype_policy = "float32"
    assert models.unexpected(models.dtypes(model, tokens), kept, "bfloat16") == [
        "tensor mlp_up_0 (Dense): float32, not bfloat16",
        "layer mlp_up_0 (Dense): float32, not bfloat16",
    ]


def test_layers_within_layers_are_seen():
    model = mpkeras.apply_policy(small_transformer(), "mixed_bfloat16")
    seen = models.dtypes(model, np.zeros((2, 8), "int32"))
    # The embedding and its two; three normalizations; the attention with its four products, softmax and dropout;
    # dropout, two sums, two products of the block; the head, in float32.
    assert models.count(seen, "layer") == {"bfloat16": 3 + 3 + 7 + 1 + 2 + 2, "float32": 1}
    # What each of those returns that is not within another.
    assert models.count(seen, "tensor") == {"bfloat16": 1 + 3 + 1 + 1 + 2 + 2, "float32": 1}


@pytest.mark.slow
@pytest.mark.parametrize("policy", benchmark.POLICIES)
def test_the_transformer_trains(policy, monkeypatch):
    monkeypatch.setattr(benchmark, "BATCHES", 1)
    result = json.loads(json.dumps(benchmark.train("transformer", policy, steps=5, size=16)))
    assert result["unexpected"] == []
    assert not any(result["skipped"])
    assert result["loss"][-1] < result["loss"][0] == pytest.approx(np.log(256), rel=0.1)
    assert benchmark.table_rows([{"backend": "jax", **result}])[0]["unexpected"] == "0"


@pytest.mark.slow
def test_each_layer_of_resnet50_computes_as_it_should():
    # That it learns, and its step under XLA, take more time than a test has: see benchmarks/results/fine_tune.txt.
    spec = models.MODELS["resnet50"]
    model = mpkeras.apply_policy(spec.build(32), "mixed_bfloat16")
    checked = models.dtypes(model, spec.load(32, 4, 1)[0][0])
    assert models.unexpected(checked, spec.float32_layers, "bfloat16") == []
    # 53 normalizations and the head in float32; 53 convolutions, 49 activations, 16 sums, two paddings and two
    # poolings in 16 bits.
    expected = {"bfloat16": 53 + 49 + 16 + 2 + 2, "float32": 53 + 1}
    assert models.count(checked, "layer") == models.count(checked, "tensor") == expected
