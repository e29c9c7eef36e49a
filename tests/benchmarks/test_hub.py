"""benchmarks/hub.py: what it calls a fault, and a few models of KerasHub where that is installed."""

import re

import pytest

import hub as benchmark


@pytest.mark.backends("tensorflow")
def test_a_row_shows_each_check_in_one_word():
    checks = dict.fromkeys(benchmark.CHECKS, "yes") | {"audit": "no: warning: head", "lora": "–"}
    result = {
        "model": "BERT",
        "backend": "jax",
        "policy": "float32",
        "losses": [2.0, 0.5],
        "skipped_steps": 1,
        **checks,
    }
    (row,) = benchmark.table_rows([result])
    assert (row["loss"], row["skipped"]) == ("2 to 0.5", "1")
    assert [row[label] for label in benchmark.CHECKS] == ["yes", "yes", "no", "–", "yes"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
# Keras' own: a task of KerasHub compiles itself, so its optimizer is not the one of the file.
@pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer:UserWarning")
# Keras' own, of the layers of KerasHub's T5.
@pytest.mark.filterwarnings("ignore:.*was called on layer 'transformer_.*coder_layer_0':UserWarning")
@pytest.mark.filterwarnings("ignore:.*passed an input with a mask attached:UserWarning")
@pytest.mark.parametrize("name", ["BERT", "ResNet", "T5"])
def test_a_model_learns_in_float16(name, backend):
    pytest.importorskip("keras_hub")
    float32 = benchmark.checked(name, "float32", 12, None)
    found = benchmark.checked(name, "mixed_float16", 12, float32["losses"])
    for label in ("finite", "learns", "lora"):
        assert found[label] == "yes", (label, found[label])
    # A file of a task cannot say which layers are in float32: `docs/keras_hub.md`. Its head rounds to 11 bits.
    has_float32_attention = backend == "jax" and name != "ResNet" or backend != "torch" and name == "T5"
    if found["saving"] != "yes" and not has_float32_attention:
        reached, differ = map(float, re.findall(r"up to ([\d.e+-]+)", found["saving"]))
        assert differ < 2e-3 * reached, found["saving"]
