"""benchmarks/gpu_training.py: that both sides are one architecture, what follows from the times, and a tiny run."""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import keras
import numpy as np
import pytest

import gpu_training as benchmark
from gpu import cases, report, rounds, variants
from gpu.variants import FLOAT32, KERAS_FLOAT16, MPKERAS_BFLOAT16, MPKERAS_FLOAT16, TF32, TORCH_FLOAT16, VARIANTS

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")
JAX = pytest.mark.backends("jax")


@pytest.mark.parametrize(
    ("name", "macs"),
    [
        # torchvision's figure for ResNet-50 v1.5 at 224 x 224: 4.09 G.
        pytest.param("resnet50", 4.089e9, id="resnet50"),
        # 85 M weights of the blocks x 512 tokens, 2 x 768 x 512^2 in each attention, the pooler and two classes.
        pytest.param("bert_base", 84.934656e6 * 512 + 12 * 2 * 768 * 512**2 + 768**2 + 2 * 768, id="bert_base"),
        pytest.param("gpt2_small", (84.934656e6 + 768 * 50304) * 1024 + 12 * 768 * 1024**2, id="gpt2_small"),
    ],
)
def test_flops(name, macs):
    case = benchmark.case_of(name, False, batch_size=3)
    assert cases.flops_per_step(case) == pytest.approx(3 * 6 * macs, rel=1e-3)


@JAX
@pytest.mark.parametrize(
    ("name", "params"),
    [
        pytest.param("resnet50", 25_557_032, id="torchvision's ResNet-50"),
        # Hugging Face's BertModel has 109,482,240, with two rows for segments and without the two classes.
        pytest.param("bert_base", 109_482_240 - 2 * 768 + 2 * 769, id="BERT-base"),
        # GPT-2 has 124,439,808 with a vocabulary of 50257.
        pytest.param("gpt2_small", 124_439_808 + 768 * (50304 - 50257), id="GPT-2 small"),
    ],
)
def test_full_size_models_have_the_published_parameters(name, params):
    torch = pytest.importorskip("torch")
    from gpu import torch_models

    with torch.device("meta"):
        module = torch_models.build(cases.CASES[name])
    assert sum(parameter.numel() for parameter in module.parameters()) == params


def copy_weights(model, module):
    """Gives the torch module the weights of the Keras model; fails where one is left over or does not fit."""
    torch = pytest.importorskip("torch")
    left = {id(variable) for variable in model.trainable_variables}

    def kernel(layer):
        left.difference_update(id(variable) for variable in layer.trainable_variables)
        return [keras.ops.convert_to_numpy(variable) for variable in layer.trainable_variables]

    def assign(parameter, value):
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(np.array(value)))

    for path, part in module.named_modules():
        name = path.replace(".", "_")
        if type(part).__name__ == "ConvNorm":
            (weights,) = kernel(model.get_layer(name))
            gamma, beta = kernel(model.get_layer(f"{name}_norm"))
            assign(part.conv.weight, weights.transpose(3, 2, 0, 1))
            assign(part.norm.weight, gamma)
            assign(part.norm.bias, beta)
        elif type(part).__name__ == "Attention":
            values = kernel(model.get_layer(name))
            query, key, value = (v.reshape(v.shape[0], -1).T for v in values[0:6:2])
            assign(part.qkv.weight, np.concatenate([query, key, value]))
            assign(part.qkv.bias, np.concatenate([bias.ravel() for bias in values[1:6:2]]))
            assign(part.out.weight, values[6].reshape(-1, values[6].shape[-1]).T)
            assign(part.out.bias, values[7])
        elif isinstance(part, torch.nn.LayerNorm) or name.endswith(("head", "pooler", "mlp_up", "mlp_down")):
            weight, bias = kernel(model.get_layer(name))
            assign(part.weight, weight.T)
            assign(part.bias, bias)
        elif type(part).__name__ == "Transformer":
            tokens, positions = kernel(model.get_layer("embeddings"))
            assign(part.tokens.weight, tokens)
            assign(part.positions.weight, positions)
    assert not left


@JAX
@pytest.mark.parametrize("name", cases.TINY_CASES)
def test_keras_and_torch_train_the_same_architecture(name):
    pytest.importorskip("torch")
    from gpu import keras_trainer, torch_models, torch_trainer

    # Plain SGD steps on both sides: the loss of the third tells of the gradients of the first two.
    case = cases.TINY_CASES[name]._replace(learning_rate=0.01)
    options = {"data_format": "channels_last", "torch_compiler": "aot_eager", "torch_mode": "default"}
    ours = keras_trainer.make_trainer(case, VARIANTS[FLOAT32], options)
    variant = VARIANTS[TORCH_FLOAT16[0]]._replace(dtype="float32", scales=False)
    theirs = torch_trainer.make_trainer(case, variant, options)
    assert isinstance(theirs.model, (torch_models.ResNet, torch_models.Transformer))
    copy_weights(ours.model, theirs.model)
    for trainer in (ours, theirs):
        trainer.warm_up(3)
    # Sums in another order; Adam divides by small numbers in its first steps.
    np.testing.assert_allclose(theirs.losses, ours.losses, rtol=1e-3)
    assert ours.losses[2] < ours.losses[0]
    assert ours.describe()["params"] == theirs.describe()["params"]


def measured(step_ms, *, group=0, peak_bytes=None):
    blocks = [{"step_ms": ms, "queue_ms": 1.0} for ms in step_ms]
    found = {"group": group, "blocks": blocks, "unavailable": None, "peak_bytes": peak_bytes}
    return {**found, "losses": [1.0, 0.5], "attention": "cuDNN flash"}


BARE = f"{MPKERAS_FLOAT16}, no scaling"


def results_of(found, peak_flops_per_s=1e12):
    results = report.summarized("bert_base", cases.TINY_CASES["bert_base"], found, peak_flops_per_s, False)
    return {result["variant"]: result for result in results}


def test_what_follows_from_the_times():
    found = results_of(
        {
            FLOAT32: measured([8.0, 12.0], peak_bytes=4000),
            MPKERAS_FLOAT16: measured([4.0, 4.0], peak_bytes=2000),
            BARE: measured([3.0, 3.5], peak_bytes=2000),
            MPKERAS_BFLOAT16: measured([4.0, 4.0], group=1),
            KERAS_FLOAT16: {"group": 0, "blocks": [], "unavailable": "out of memory"},
        }
    )
    ours = found[MPKERAS_FLOAT16]
    # Four sequences of sixteen tokens in 4 ms.
    assert ours["per_s"]["median"] == 16_000
    assert ours["speedup"] == {"median": 2.5, "q1": 2.25, "q3": 2.75, "paired": True}
    assert ours["scaling_ms"]["median"] == 0.75
    assert ours["memory_ratio"] == 0.5
    flops = cases.flops_per_step(cases.TINY_CASES["bert_base"])
    assert ours["utilisation"] == pytest.approx(flops / 4e-3 / 1e12)
    assert found[FLOAT32]["scaling_ms"] is None and ours["notes"] == []
    of_another_group = found[MPKERAS_BFLOAT16]
    assert of_another_group["speedup"] == {"median": 2.5, "q1": 2.5, "q3": 2.5, "paired": False}
    assert any("not in the same rounds" in note for note in of_another_group["notes"])
    failed = found[KERAS_FLOAT16]
    assert failed["per_s"] is failed["speedup"] is failed["peak_bytes"] is None
    assert failed["notes"] == ["out of memory"]
    rows = {row["variant"]: row["x float32"] for row in report.table_rows(list(found.values()))}
    assert rows[KERAS_FLOAT16] == "-" and rows[MPKERAS_FLOAT16] != "-"


@pytest.mark.parametrize(
    ("step_ms", "peak_bytes", "is_judged", "met"),
    [
        pytest.param(4.0, 2000, True, [True, True, True, True], id="met"),
        pytest.param(6.0, 3000, True, [False, False, True, False], id="slower than torch"),
        pytest.param(4.0, 2000, False, [None] * 4, id="not judged on a CPU"),
        pytest.param(4.0, None, True, [True, None, True, True], id="no memory counted"),
    ],
)
def test_goals(step_ms, peak_bytes, is_judged, met):
    found = results_of(
        {
            FLOAT32: measured([8.0], peak_bytes=4000),
            KERAS_FLOAT16: measured([7.0], peak_bytes=2000),
            MPKERAS_FLOAT16: measured([step_ms], peak_bytes=peak_bytes),
            TORCH_FLOAT16[0]: measured([9.0]),
            TORCH_FLOAT16[1]: measured([5.0]),
        }
    )
    goals = report.goals(list(found.values()), is_judged)
    assert [goal["met"] for goal in goals if goal["variant"] == MPKERAS_FLOAT16] == met
    assert {goal["met"] for goal in goals if goal["variant"] == MPKERAS_BFLOAT16} == {None}
    assert len(report.goal_lines(goals)) == len(goals)


class FakeWorkers:
    """Stands in for processes: each takes 10 bytes of 28, in float32 20, and `torch bfloat16` fails."""

    are_shared = False

    def __init__(self):
        self.free, self.alive = 28, []

    def start(self, framework, variant):
        self.alive.append(variant)
        self.free -= self.taken_by(variant)
        return types.SimpleNamespace(variant=variant, ask=self.ask)

    @staticmethod
    def taken_by(variant):
        return 20 if "float32" in variant else 10

    def ask(self, do, variant, **arguments):
        if variant.startswith("torch bfloat16"):
            raise rounds.WorkerError("no kernel")
        if self.free < 0:
            raise rounds.WorkerError("RESOURCE_EXHAUSTED: out of memory")
        prepared = {"held_bytes": self.taken_by(variant)}
        return {"prepare": prepared, "block": measured([1.0])["blocks"][0], "finish": {"losses": [1.0]}}[do]

    def release(self, worker):
        self.alive.remove(worker.variant)
        self.free += self.taken_by(worker.variant)


def test_variants_that_find_no_room_come_in_a_later_group(monkeypatch):
    workers = FakeWorkers()
    monkeypatch.setattr(rounds, "free_bytes", lambda: workers.free)
    monkeypatch.setattr(rounds, "CONTEXT_BYTES", 0)
    options = {"rounds": 3, "steps": 1, "warm_up": 1}
    found = rounds.measure_model("bert_base", list(VARIANTS), workers, options, is_gpu=False, log=lambda line: None)
    # Room for two in 16 bits, for one in float32.
    assert workers.free == 28 and not workers.alive
    timed = {}
    for variant in VARIANTS.values():
        entry = found[variant.name]
        failed = variant.name == TF32 or variant.name.startswith("torch bfloat16")
        assert (entry["unavailable"] is not None) == failed, entry
        assert len(entry["blocks"]) == (0 if failed else 3)
        timed.setdefault(entry["group"], []).append(0 if failed else FakeWorkers.taken_by(variant.name))
        if variant.unscaled:
            assert found[variant.unscaled]["group"] == entry["group"]
    assert max(sum(taken) for taken in timed.values()) == 20


def test_what_no_memory_was_left_for_is_tried_again_alone(monkeypatch):
    workers = FakeWorkers()
    # The GPU says that there is more than there is.
    monkeypatch.setattr(rounds, "free_bytes", lambda: 2**40)
    options = {"rounds": 1, "steps": 1, "warm_up": 1}
    names = [FLOAT32, MPKERAS_FLOAT16, MPKERAS_BFLOAT16]
    found = rounds.measure_model("bert_base", names, workers, options, is_gpu=False, log=lambda line: None)
    assert [found[name]["unavailable"] for name in names] == [None] * 3
    assert [found[name]["group"] for name in names] == [1, 0, 0]
    workers.free = 15
    found = rounds.measure_model("bert_base", [FLOAT32], workers, options, is_gpu=False, log=lambda line: None)
    assert rounds.is_out_of_memory(found[FLOAT32]["unavailable"])
    # There is never enough: each is tried beside the other and alone, and that is said.
    workers.free = 5
    names = [MPKERAS_FLOAT16, TORCH_FLOAT16[0]]
    found = rounds.measure_model("bert_base", names, workers, options, is_gpu=False, log=lambda line: None)
    assert all(rounds.is_out_of_memory(found[name]["unavailable"]) for name in names) and workers.free == 5


def test_an_interrupted_benchmark_waits_for_no_process(monkeypatch):
    workers = rounds.Workers(shared=False)
    monkeypatch.setattr(rounds, "free_bytes", lambda: None)
    killed = []

    class Endless:
        def ask(self, do, **arguments):
            if killed:
                raise rounds.WorkerError("the process ended")
            raise KeyboardInterrupt

        def kill(self):
            killed.append(self)

        def close(self):
            pass

    monkeypatch.setattr(rounds, "Worker", lambda *arguments: Endless())
    with pytest.raises(KeyboardInterrupt):
        rounds.measure_model("bert_base", list(VARIANTS), workers, {"warm_up": 1}, is_gpu=True, log=lambda line: None)
    assert killed
    with pytest.raises(rounds.WorkerError, match="being ended"):
        workers.start("keras")
    workers.close()


@pytest.mark.backends("torch")
def test_torch_trains_on_after_a_first_step_that_is_skipped():
    """Its fused SGD would go on with a momentum that nobody has set."""
    import torch

    from gpu import torch_trainer

    case = cases.TINY_CASES["resnet50"]
    trainer = torch_trainer.make_trainer(case, VARIANTS[TORCH_FLOAT16[0]]._replace(dtype="float32"), {})
    ((x, y), *_) = trainer.batches
    trainer.step(x * float("inf"), y)
    assert trainer.scaler.get_scale() == 2.0**15
    for buffer in trainer.optimizer.state.values():
        assert not torch.any(buffer["momentum_buffer"])


def test_a_worker_says_what_went_wrong():
    worker = rounds.Worker("nothing")
    with pytest.raises(rounds.WorkerError, match="nothing_trainer"):
        worker.ask("hello")
    worker._process.kill()
    worker._process.wait()
    with pytest.raises(rounds.WorkerError, match="exit status -9"):
        worker.ask("hello")
    worker.close()


@JAX
@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2_small", "resnet50", "bert_base"])
def test_tiny_run_without_tensorflow(tmp_path, model):
    # Where TensorFlow is installed, this is what importing it finds instead.
    (tmp_path / "tensorflow.py").write_text("raise ImportError('no TensorFlow here')\n")
    root = Path(benchmark.__file__).parents[1]
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])}
    output = tmp_path / "results.json"
    command = [sys.executable, benchmark.__file__, "--tiny", "--model", model, "--json", str(output)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=settings)
    assert run.returncode == 0, run.stderr
    content = json.loads(output.read_text())

    has_torch = "plain torch" in [entry["backend"] for entry in content["environments"]]
    names = [name for name, variant in VARIANTS.items() if has_torch or variant.framework != "torch"]
    found = {(result["model"], result["variant"]): result for result in content["results"]}
    assert list(found) == [(model, name) for name in names]
    for name in names:
        result = found[model, name]
        if content["device"]["kind"] == "cpu":
            assert result["peak_bytes"] is None and result["utilisation"] is None and result["notes"]
            if name == TF32:
                assert result["per_s"] is None and result["notes"] == [rounds.NO_TF32]
                continue
        assert result["per_s"]["median"] > 0, result["notes"]
        assert np.isfinite(result["losses"]).all() and result["losses"][-1] < result["losses"][0]
        assert (result["scaling_ms"] is not None) == (VARIANTS[name].unscaled is not None)
        assert result["params"] == found[model, FLOAT32]["params"]
        if VARIANTS[name].framework == "keras":
            # The same seed and data: 16 bits change the loss in the third digit.
            np.testing.assert_allclose(result["losses"], found[model, FLOAT32]["losses"], rtol=2e-2)
    assert {goal["met"] for goal in content["goals"]} == {None}
    assert variants.TF32 in run.stdout and "FLOPs" in run.stdout
