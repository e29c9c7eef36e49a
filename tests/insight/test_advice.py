"""`advise` on real models: they stay as they were, and the report says what was found."""

import json
import random

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.devices.native import Device
from mpkeras.insight import advice
from mpkeras.insight.advice import AdviceReport, loss_and_targets, measured_advice
from mpkeras.insight.bench import Bench, estimated_output_bytes, trainable_copy
from mpkeras.insight.report import Report
from mpkeras.insight.timing import Cell, NotTrainable

# What is left alone, and which loss is whose, knows no backend; on JAX the other tests measure.
NOT_ON_JAX = pytest.mark.backends("tensorflow", "torch")

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(8, 3)).astype("float32")


def stack():
    return [
        keras.layers.Dense(6, activation="relu"),
        keras.layers.BatchNormalization(),
        keras.layers.Dropout(0.5),
        keras.layers.Dense(3, activation="softmax"),
    ]


class Subclassed(keras.Model):
    def __init__(self, units=3, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.stack = [*stack()[:-1], keras.layers.Dense(units)]

    def call(self, x, training=False):
        for layer in self.stack:
            x = layer(x, training=training) if isinstance(layer, keras.layers.Dropout) else layer(x)
        return x

    def get_config(self):
        return {"units": self.units}


class WithoutConfig(Subclassed):
    def get_config(self):
        raise NotImplementedError


class LosesItsConfig(Subclassed):
    """The copy has other weights than the model."""

    def get_config(self):
        return {"units": 2}


def functional():
    inputs = x = keras.Input((4,))
    for layer in stack():
        x = layer(x)
    return keras.Model(inputs, x)


KINDS = {
    "functional": functional,
    "sequential": lambda: keras.Sequential([keras.Input((4,)), *stack()]),
    "subclassed": Subclassed,
    "subclassed without get_config": WithoutConfig,
    "subclassed that loses its configuration": LosesItsConfig,
}


def everything(model):
    """All that advice might change, as values that compare."""
    optimizer = model.optimizer
    variables = [*model.variables, *optimizer.variables, *model.metrics_variables]
    generator = keras.src.backend.common.global_state.get_global_attribute("global_seed_generator")
    layers = model._flatten_layers()
    random_state = np.random.get_state()
    content = {
        "values": [np.array(keras.ops.convert_to_numpy(v)).tobytes() for v in variables],
        "variables": [id(v) for v in variables],
        "policies": [
            (layer.name, layer.dtype_policy.name, layer.compute_dtype, "call" in vars(layer)) for layer in layers
        ],
        "compiled": (id(optimizer), id(model.train_function), id(model.loss), model.jit_compile),
        "train_step": "train_step" in vars(model),
        "optimizer": (optimizer.built, type(optimizer)),
        "python": random.getstate(),
        "numpy": (random_state[1].tobytes(), random_state[2]),
        "keras": generator if generator is None else keras.ops.convert_to_numpy(generator.state).tolist(),
        "global policy": keras.config.dtype_policy().name,
    }
    if keras.backend.backend() == "torch":
        import torch

        content["torch"] = torch.get_rng_state().numpy().tobytes()
        content["grads"] = [None if v.value.grad is None else id(v.value.grad) for v in model.trainable_variables]
    return content


@pytest.mark.slow
@pytest.mark.parametrize("policy", [None, "mixed_bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_model_stays_as_it_was(kind, policy):
    model = KINDS[kind]()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    if policy is not None:
        mpkeras.prepare(model, policy)
    model.fit(X, Y, verbose=0)
    before = everything(model)
    with trainable_copy(model, X) as (trained, is_copy):
        assert is_copy == (kind in ("functional", "sequential", "subclassed"))
        assert (trained is model) != is_copy
    jit = advice._present_jit(model)
    report = measured_advice(model, X, Y, "mse", settings=(jit,), rounds=2)
    assert everything(model) == before
    assert all(len(cell.times_ms) in (1, 2) for cell in report.cells), [cell.failure for cell in report.cells]
    # And it trains on as if nothing had been.
    assert np.isfinite(model.train_on_batch(X, Y))


@NOT_ON_JAX
@pytest.mark.slow
def test_a_model_that_is_not_built_is_copied_and_stays_so():
    model = Subclassed()
    model.compile("adam", "mse")
    measured_advice(model, X, Y, "mse", settings=(advice._present_jit(model),), rounds=1)
    assert not model.built and not model.optimizer.built


@pytest.mark.slow
def test_the_model_is_put_back_after_an_error(monkeypatch):
    model = WithoutConfig()
    model.compile("adam", "mse")
    model.fit(X, Y, verbose=0)
    before = everything(model)

    def interrupted(self, cell, steps):
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        mpkeras.advise(model, X, Y, verbose=0)
    assert everything(model) == before


def test_a_copy_follows_the_policies_of_its_author():
    with mpkeras.policy_scope("mixed_float16"):
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6), keras.layers.Dense(3, dtype="float32")])
    model.compile("adam", "mse")
    with trainable_copy(model, X) as (trained, is_copy):
        bench = Bench(trained, X, Y, keras.optimizers.Adam, "mse")
        found = {}
        for policy in ("float32", "mixed_bfloat16", "mixed_float16", "float32"):
            bench._change_to(policy)
            found[policy] = [layer.compute_dtype for layer in trained.layers]
    assert is_copy
    assert found == {
        "float32": ["float32", "float32"],
        "mixed_bfloat16": ["bfloat16", "float32"],
        "mixed_float16": ["float16", "float32"],
    }


@pytest.mark.slow
def test_a_whole_run(backend, capsys):
    model = functional()
    model.compile("adam", "mse")
    report = mpkeras.advise(model, X, Y, budget_s=20.0)
    assert "stage" in capsys.readouterr().out  # Keras' progress bar
    settings = {(cell.policy, cell.jit_compile) for cell in report.cells}
    assert {policy for policy, _ in settings} == {"float32", "mixed_bfloat16", "mixed_float16"}
    assert {jit for _, jit in settings} == ({False} if backend == "torch" else {False, True})
    assert isinstance(report, Report)
    assert report.policy in ("float32", "mixed_bfloat16", "mixed_float16")
    assert (report.policy, report.jit_compile) in settings
    text = str(report)
    assert ("Do not bother with 16 bits: " in text) == (not report.bother)
    assert "Speed is against float32" in text and "A copy of the model trained on 8 examples a step" in text
    assert "Why: " in text and "Memory is " in text
    content = json.loads(json.dumps(report.to_dict()))
    assert content["policy"] == report.policy and len(content["cells"]) == len(report.cells)
    assert report.plot().axes


def test_without_measurement_nothing_is_run():
    model = functional()
    report = mpkeras.advise(model, None, measure=False)
    assert report.sureness == "not measured" and report.cells == [] and report.decision is None
    assert "Not measured, and so not sure" in str(report)
    assert "Step (ms)" not in str(report) and "Leave out `measure=False`" in str(report)
    assert report.policy in (mpkeras.hardware().policy, "float32")
    assert report.plot().axes and json.dumps(report.to_dict())


GPU = Device("gpu", "A100", compute_capability=(8, 0))
EPYC = Device("cpu", "CPU", instruction_sets=frozenset({"avx512_bf16"}))


@pytest.mark.parametrize(
    ("device", "present_jit", "expected"),
    [
        # XLA's compiler for CPUs widens bfloat16.
        pytest.param(EPYC, True, False, id="under XLA a CPU gains nothing", marks=pytest.mark.backends("tensorflow")),
        pytest.param(EPYC, False, False, id="a CPU in graph mode", marks=pytest.mark.backends("tensorflow")),
        pytest.param(GPU, True, True, id="a GPU under XLA"),
        pytest.param(GPU, False, False, id="a GPU without"),
    ],
)
def test_the_guess_is_a_setting_in_which_16_bits_have_been_seen_to_gain(device, present_jit, expected):
    report = AdviceReport(functional(), [], present_jit, [device])
    assert (report.policy, report.jit_compile) == ("mixed_bfloat16", expected)
    assert f"Try mixed_bfloat16 with jit_compile={expected}." in str(report)


def test_the_guess_says_stay_only_of_what_the_model_has():
    plain = Device("cpu", "CPU")
    model = functional()
    stays = "Do not bother with 16 bits: stay with float32 with jit_compile=False."
    assert stays in str(AdviceReport(model, [], False, [plain]))
    mpkeras.apply_policy(model, "mixed_bfloat16")
    assert stays.replace("stay with", "use") in str(AdviceReport(model, [], False, [plain]))


def test_failures_are_in_the_table():
    class FloatOnly(keras.layers.Layer):
        def call(self, x):
            if keras.backend.standardize_dtype(x.dtype) != "float32":
                raise NotImplementedError("float32 only")
            return x

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), FloatOnly(), keras.layers.Dense(3)])
    model.compile("adam", "mse")
    report = measured_advice(model, X, Y, "mse", settings=(advice._present_jit(model),), rounds=3)
    assert report.policy == "float32" and not report.bother
    assert "No 16-bit policy could be measured" in str(report)
    assert all("float32 only" in cell.failure for cell in report.cells[1:])
    assert "raises: " in str(report)


def test_a_loss_that_is_not_finite_is_said():
    model = functional()
    bench = Bench(model, X * np.inf, Y, keras.optimizers.Adam, "mse")
    with pytest.raises(NotTrainable, match="loss not finite"):
        bench.begin(Cell("float32", False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        pytest.param({"x": X, "y": Y, "budget_s": 0}, ValueError, "budget_s=0.*Leave it out", id="no time"),
        pytest.param({"x": X, "y": Y, "measure": 1}, TypeError, "measure=1", id="measure"),
        pytest.param({"x": X, "y": Y, "jit_compile": "auto"}, TypeError, "jit_compile='auto'", id="jit_compile"),
        pytest.param({"x": X, "y": Y, "jit_compile": ()}, TypeError, "jit_compile=()", id="no setting"),
        pytest.param({"x": [X, X[:2]], "y": Y}, ValueError, r"same number of examples.*x\[:128\]", id="not one batch"),
        pytest.param({"x": iter([X]), "y": Y}, ValueError, "one batch", id="a generator"),
        pytest.param({"x": X[:, :2], "y": Y}, ValueError, "none of.*train_on_batch", id="does not fit"),
    ],
)
def test_bad_input(arguments, error, match):
    model = functional()
    model.compile("adam", "mse")
    with pytest.raises(error, match=match):
        mpkeras.advise(model, verbose=0, **arguments)


def test_a_model_without_a_loss_is_refused():
    with pytest.raises(ValueError, match="compile"):
        mpkeras.advise(functional(), X, Y)
    with pytest.raises(TypeError, match="keras.Model"):
        mpkeras.advise(keras.layers.Dense(2), X, Y)


@NOT_ON_JAX
@pytest.mark.slow
def test_losses_of_several_outputs_by_position():
    inputs = keras.Input((4,))
    outputs = [keras.layers.Dense(3, name="a")(inputs), keras.layers.Dense(3, name="b")(inputs)]
    model = keras.Model(inputs, outputs)
    for loss, targets in (
        ({"a": "mse", "b": "mae"}, {"a": Y, "b": Y}),
        (["mse", "mae"], [Y, Y]),
    ):
        model.compile("adam", loss)
        found, y = loss_and_targets(model, targets)
        assert found == {0: "mse", 1: "mae"} and y[0] is Y and y[1] is Y
        report = measured_advice(model, X, y, found, settings=(advice._present_jit(model),), rounds=1)
        assert report.cells[0].is_measured
    single = keras.Model(inputs, outputs[0])
    single.compile("adam", {"a": "mse"})
    assert loss_and_targets(single, {"a": Y})[0] == "mse"


@pytest.mark.slow
def test_an_optimizer_that_cannot_be_copied_is_named():
    class Own(keras.optimizers.SGD):
        def __init__(self, needed, **kwargs):
            super().__init__(**kwargs)

    model = functional()
    model.compile(Own(1), "mse")
    report = measured_advice(model, X, Y, "mse", settings=(advice._present_jit(model),), rounds=1)
    assert "Measured with Adam: Own cannot be copied" in str(report)


def test_estimated_memory_is_of_the_outputs_in_the_dtype_of_each_layer():
    inputs = keras.Input((4,))
    x = keras.layers.Dense(6, dtype="mixed_bfloat16")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3, dtype="float32")(x))
    # Eight examples of 6 numbers of 2 bytes and 3 of 4.
    assert estimated_output_bytes(model, X) == 8 * (6 * 2 + 3 * 4)
    assert estimated_output_bytes(Subclassed(), X) is None
