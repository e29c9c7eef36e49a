"""`advise`: models stay as they were, the report says what was found, and the choice is that of the numbers."""

import json
import random

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.conversion.last import last_conversion
from mpkeras.devices.native import Device
from mpkeras.tools.advise import advice
from mpkeras.tools.advise.advice import AdviceReport, decide, grid_of, measured_advice, rounds_won, storage_choices
from mpkeras.tools.advise.bench import (
    ESTIMATE,
    TEMPORARY,
    Bench,
    Cell,
    NotTrainable,
    estimated_output_bytes,
    trainable_copy,
)
from mpkeras.tools.shared.compiled import loss_and_targets
from mpkeras.tools.shared.report import Report
from mpkeras.training.objective import Objective
from mpkeras.training.state import bytes_of_training
from tests.step_modes import snapshot

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
    "without config": WithoutConfig,
    "loses its config": LosesItsConfig,
}


def everything(model):
    """All that advice might change, as values that compare."""
    optimizer = model.optimizer
    variables = [*model.variables, *optimizer.variables, *model.metrics_variables]
    generator = keras.src.backend.common.global_state.get_global_attribute("global_seed_generator")
    layers = model._flatten_layers()
    random_state = np.random.get_state()
    content = {
        "values": snapshot(variables),
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
@pytest.mark.parametrize(
    ("kind", "policy"),
    [*((kind, "mixed_bfloat16") for kind in KINDS), ("sequential", None), ("without config", None)],
)
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


class OneDense(keras.Model):
    """Has no configuration: no copy is trained, but the model itself."""

    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(3)

    def call(self, x):
        return self.dense(x)


@pytest.mark.slow
@NOT_ON_JAX
def test_small_weights_are_float32_in_each_setting_and_small_again_behind_it():
    model = OneDense()
    model.compile(keras.optimizers.SGD(0.5), "mse")
    policy = mpkeras.Policy("bfloat16", keep_float32=())
    mpkeras.prepare(model, policy).train_on_batch(X, Y)
    step = mpkeras.make_train_step(model, keras.optimizers.SGD(0.5), "mse", jit_compile=False)
    step(X, Y)
    conversion = last_conversion(model)
    with trainable_copy(model, X) as (trained, is_copy):
        assert trained is model and not is_copy
        bench = Bench(trained, X, Y, keras.optimizers.SGD, "mse")
        cells = [Cell(policy, False) for policy in ("float32", "mixed_bfloat16")]
        for cell in cells:
            bench.begin(cell)
        dtypes = []
        for cell in cells:
            bench._change_to(cell.policy)
            dtypes.append((model.dense.compute_dtype, model.dense.kernel.dtype))
            assert bench.measure(cell, 1) > 0
    assert dtypes == [("float32", "float32")] * 2  # It makes the outputs.
    assert (model.dense.compute_dtype, model.dense.kernel.dtype) == ("bfloat16", "bfloat16")
    # Doors without a policy go by the last conversion.
    assert last_conversion(model) is conversion and conversion.policy is policy
    for train in (model.train_on_batch, step):
        before = snapshot(model.dense.trainable_variables)
        train(X, Y)
        assert snapshot(model.dense.trainable_variables) != before


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
    # On a busy machine time may be up before a step in 16 bits was measured.
    assert ("Do not bother with 16 bits: " in text or "Nothing to say of 16 bits" in text) == (not report.bother)
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


@pytest.mark.parametrize(("policy", "words"), [("mixed_bfloat16", "Why: "), ("mixed_float16", "so, although ")])
def test_the_reason_for_a_dtype_is_not_given_for_another_one(policy, words):
    reference, chosen = Cell("float32", True, times_ms=[3.0] * 9), Cell(policy, True, times_ms=[2.0] * 9)
    report = AdviceReport(functional(), [reference, chosen], True, [GPU])
    assert report.policy == policy and report.native_policy == "mixed_bfloat16"
    assert f"{words}{report.to_dict()['native_reason']}." in str(report)


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


def test_the_share_of_the_weights_in_products_is_that_of_all_weights():
    # 4 * 6 + 6 and 6 * 3 + 3 in products, 24 in the normalization.
    model = keras.Sequential([keras.Input((4,)), *stack()])
    model.layers[0].trainable = False
    shares = [str(AdviceReport(model, [], False, [GPU])) for model.trainable in (True, False)]
    assert all("68% of the 75 weights are in matrix products" in text for text in shares)


def test_nothing_is_said_of_the_weights_of_a_model_that_is_not_built():
    model = keras.Sequential(stack())
    assert "is not known, as it is not built." in str(AdviceReport(model, [], False, [GPU]))
    cells = [Cell("float32", False, times_ms=[2.0] * 9), Cell("mixed_bfloat16", False, times_ms=[3.0] * 9)]
    report = AdviceReport(model, cells, False, [EPYC])
    assert not report.bother and "matrix products" not in str(report)


class OwnLoss(Subclassed):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.abs(y_pred))


@pytest.mark.slow
def test_a_loss_of_the_users_own_is_said_not_to_be_timed():
    model, plain = OwnLoss(), Subclassed()
    model.compile("sgd", "mse", jit_compile=False)
    plain.compile("sgd", "mse", jit_compile=False)
    options = {"jit_compile": False, "budget_s": 15.0, "verbose": 0}
    assert "has `compute_loss` of its own, not timed here" in str(mpkeras.advise(model, X, Y, **options))
    model = OwnLoss()
    model.compile("sgd", jit_compile=False)
    with pytest.raises(ValueError, match="Its `compute_loss` is not run here: compile it with a loss that takes about"):
        mpkeras.advise(model, X, Y, **options)
    assert "of its own" not in str(mpkeras.advise(plain, X, Y, **options))


@pytest.mark.slow
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


@pytest.mark.parametrize(("file", "option"), [(None, "`budget_s`"), ("model.keras", "`--budget`")])
def test_nothing_is_said_of_16_bits_that_time_was_up_for(file, option):
    late = [Cell(policy, True, failure="not measured: time") for policy in ("mixed_bfloat16", "mixed_float16")]
    report = AdviceReport(functional(), [Cell("float32", True, times_ms=[2.0] * 30), *late], True, [GPU], file=file)
    assert (report.policy, report.sureness, report.to_dict()["sureness"]) == ("float32", "not sure", "not sure")
    text = str(report)
    assert f"time was up before one was measured: give more by {option}." in text
    assert "Do not bother" not in text and "Why: " not in text
    # What fails however much time there is needs none.
    late = [Cell(cell.policy, True, failure="raises: TypeError: float32 only") for cell in late]
    report = AdviceReport(functional(), [Cell("float32", True, times_ms=[2.0] * 30), *late], True, [GPU])
    assert report.sureness == "sure" and "No 16-bit policy could be measured" in str(report)


def test_a_loss_that_is_not_finite_is_said():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    bench = Bench(model, X * np.inf, Y, keras.optimizers.SGD, "mse")
    with pytest.raises(NotTrainable, match="loss not finite"):
        bench.begin(Cell("float32", False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        pytest.param({"x": X, "y": Y, "jit_compile": "auto"}, TypeError, "jit_compile='auto'", id="jit_compile"),
        pytest.param({"x": X, "y": Y, "jit_compile": ()}, TypeError, "jit_compile=()", id="no setting"),
        pytest.param({"x": [X, X[:2]], "y": Y}, ValueError, r"same number of examples.*x\[:128\]", id="not one batch"),
        pytest.param(
            {"x": X[:, :2], "y": Y}, ValueError, r"none of.*\(\d+, 2\). Try `model.train_on_batch", id="does not fit"
        ),
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


# `fit` takes lists in the order in which Keras takes dictionaries apart: that of the names.
OF_OUTPUTS = [
    ("list", {"b": "mse", "a": "mae"}, {"a": Y, "b": Y[:, :1]}, [{0: "mse", 1: "mae"}, [Y[:, :1], Y]]),
    ("list", [None, "mae"], [Y], [{1: "mae"}, [None, Y]]),
    ("list", [None, "mae"], Y, [{1: "mae"}, [None, Y]]),
    ("list", "mse", (Y[:, :1], Y), [{0: "mse", 1: "mse"}, [Y[:, :1], Y]]),
    ("dict", {"b": "mse", "a": "mae"}, [Y, Y[:, :1]], [{"a": "mae", "b": "mse"}, {"a": Y, "b": Y[:, :1]}]),
    ("dict", ["mae", "mse"], (Y, Y[:, :1]), [{"a": "mae", "b": "mse"}, {"a": Y, "b": Y[:, :1]}]),
    ("dict", {"b": "mse"}, {"b": Y[:, :1]}, [{"b": "mse"}, {"a": None, "b": Y[:, :1]}]),
    ("dict", {"b": "mse"}, Y[:, :1], [{"b": "mse"}, {"a": None, "b": Y[:, :1]}]),
]


def of_two_outputs(kind, loss):
    inputs = keras.Input((4,))
    outputs = {"b": keras.layers.Dense(1, name="b")(inputs), "a": keras.layers.Dense(3, name="a")(inputs)}
    model = keras.Model(inputs, outputs if kind == "dict" else list(outputs.values()), name="two")
    model.compile("sgd", loss)
    return model


@NOT_ON_JAX
@pytest.mark.parametrize(("kind", "loss", "y", "expected"), OF_OUTPUTS)
def test_targets_that_fit_takes_are_taken(kind, loss, y, expected):
    """And their loss is that of `fit`."""
    model = of_two_outputs(kind, loss)
    found, targets = loss_and_targets(model, y)
    assert found == expected[0]
    keras.tree.map_structure(np.testing.assert_array_equal, targets, expected[1])
    outputs = model(X)
    losses = [model.compute_loss(X, y, outputs), Objective(found, []).total_loss(targets, outputs, None, [])]
    of_fit, of_step = map(keras.ops.convert_to_numpy, losses)
    np.testing.assert_allclose(of_step, of_fit, rtol=1e-5)


def test_targets_of_outputs_in_lists_of_lists_are_taken():
    inputs = keras.Input((4,))
    a, b, c = (keras.layers.Dense(1)(inputs) for _ in range(3))
    model = keras.Model(inputs, [{"a": a, "b": b}, c])
    model.compile("sgd", "mse")
    y = [{"a": Y, "b": Y}, Y]
    assert loss_and_targets(model, y)[1] is y
    # The loss of one output by its name is the loss.
    single = keras.Model(inputs, keras.layers.Dense(3, name="a")(inputs))
    single.compile("sgd", {"a": "mse"})
    assert loss_and_targets(single, {"a": Y})[0] == "mse"


@pytest.mark.parametrize(
    ("kind", "y", "received"),
    [
        ("dict", {"a": Y, "c": Y}, r"\['a', 'c'\]"),
        ("dict", {"a": Y}, r"\['a'\]"),
        ("list", [Y, Y, Y], "list of 3"),
        ("list", Y, "ndarray of 1"),
    ],
)
def test_other_targets_are_refused_with_the_names_of_the_outputs(kind, y, received):
    model = of_two_outputs(kind, "mse")
    names = r"\['a', 'b'\]" if kind == "dict" else r"\['b', 'a'\]"
    message = rf"for the outputs {names} of model 'two'\. Received: {received}\. Pass a dictionary"
    for call in (mpkeras.advise, mpkeras.trace_numerics):
        with pytest.raises(ValueError, match=message):
            call(model, X, y)


class Own(keras.optimizers.SGD):
    """Cannot be made from its configuration."""

    def __init__(self, needed, **kwargs):
        super().__init__(**kwargs)


@pytest.mark.slow
def test_an_optimizer_that_cannot_be_copied_is_named():
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


# What is chosen from given times: no step is run.


def timed(policy, jit=False, times=(), memory=None):
    return Cell(policy, jit, times_ms=list(times), memory_bytes=memory)


def chosen(cells, present_jit=False, **options):
    return decide(cells, present_jit, **options).chosen.name


@pytest.mark.parametrize(
    ("bfloat16_ms", "expected", "bother"),
    [
        pytest.param(5.0, "mixed_bfloat16, jit_compile=False", True, id="twice as fast"),
        pytest.param(10.0 / 1.05, "mixed_bfloat16, jit_compile=False", True, id="5 % faster"),
        pytest.param(10.0 / 1.03, "float32, jit_compile=False", False, id="3 % faster is not worth it"),
        pytest.param(12.0, "float32, jit_compile=False", False, id="slower"),
    ],
)
def test_speed_decides(bfloat16_ms, expected, bother):
    found = decide([timed("float32", times=[10.0] * 6), timed("mixed_bfloat16", times=[bfloat16_ms] * 6)], False)
    assert (found.chosen.name, found.bother) == (expected, bother)
    assert found.speedup[1] == pytest.approx(10.0 / bfloat16_ms)
    assert found.sureness() == "sure"


@pytest.mark.parametrize(
    ("memory", "ms", "expected"),
    [
        pytest.param(800, 10.0, "mixed_bfloat16", id="20 % less at the same speed"),
        pytest.param(810, 10.0, "float32", id="19 % less is not worth it"),
        pytest.param(500, 10.0 / 0.96, "float32", id="half of it, but 4 % slower"),
        pytest.param(500, 10.0 / 0.98, "mixed_bfloat16", id="half of it, 2 % slower"),
    ],
)
def test_memory_decides_at_nearly_the_same_speed(memory, ms, expected):
    cells = [timed("float32", times=[10.0] * 5, memory=1000), timed("mixed_bfloat16", times=[ms] * 5, memory=memory)]
    assert decide(cells, False).chosen.policy == expected
    assert decide(cells, False, memory_counts=False).chosen.policy == "float32"


def test_of_two_that_are_alike_the_one_that_asks_for_less_is_chosen():
    times = {"float32": 20.0, "mixed_float16": 10.0, "mixed_bfloat16": 10.1}
    cells = [timed(policy, jit, [ms] * 5) for policy, ms in times.items() for jit in (False, True)]
    # 1 % slower, but without loss scaling, and with the setting the model has.
    assert chosen(cells, present_jit=True) == "mixed_bfloat16, jit_compile=True"
    assert chosen(cells, present_jit=False) == "mixed_bfloat16, jit_compile=False"
    cells[-1].times_ms = cells[-2].times_ms = [10.3] * 5
    assert chosen(cells, present_jit=False) == "mixed_float16, jit_compile=False"


def test_ratios_are_of_the_same_round():
    # A machine that is three times slower in every other round: medians over all rounds would say nothing.
    slow = [1.0, 3.0, 1.0, 3.0, 1.0, 3.0]
    cells = [timed("float32", times=[10.0 * s for s in slow]), timed("mixed_bfloat16", times=[8.0 * s for s in slow])]
    found = decide(cells, False)
    assert found.speedup == pytest.approx((1.25, 1.25, 1.25))
    assert rounds_won(cells[1], cells[0]) == (6, 6)


@pytest.mark.parametrize(
    ("faster_rounds", "rounds", "expected"),
    [
        pytest.param(19, 20, "sure", id="95 %"),
        pytest.param(18, 20, "fairly sure", id="90 %"),
        pytest.param(15, 20, "fairly sure", id="75 %"),
        pytest.param(14, 20, "not sure", id="70 %"),
        pytest.param(2, 2, "not sure", id="all of two"),
    ],
)
def test_sureness_is_the_share_of_rounds_that_agree(faster_rounds, rounds, expected):
    times = [5.0] * faster_rounds + [11.0] * (rounds - faster_rounds)
    found = decide([timed("float32", times=[10.0] * rounds), timed("mixed_bfloat16", times=times)], False)
    assert found.bother and found.sureness() == expected


def test_failed_cells_are_left_out():
    failed = timed("mixed_float16")
    failed.failure = "loss not finite: inf"
    assert chosen([timed("float32", times=[10.0]), failed]) == "float32, jit_compile=False"
    assert chosen([failed, timed("mixed_bfloat16", times=[10.0])]) == "mixed_bfloat16, jit_compile=False"
    assert decide([failed], False) is None


def test_the_grid_begins_with_what_suits():
    names = [cell.name for cell in grid_of((True, False), "mixed_float16")]
    assert names == [
        "float32, jit_compile=True",
        "mixed_float16, jit_compile=True",
        "float32, jit_compile=False",
        "mixed_float16, jit_compile=False",
        "mixed_bfloat16, jit_compile=True",
        "mixed_bfloat16, jit_compile=False",
    ]


# What training would keep, by the dtypes of weights and slots: counted by hand, and as it then is.

CPU = Device("cpu", "CPU")


def classifier():
    """Of 362 parameters 216 are in a layer that follows "bfloat16", the others stay in float32; 48 are statistics."""
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(24),  # 8 * 24 + 24 = 216
            keras.layers.BatchNormalization(),  # 48 trained, 48 not
            keras.layers.Dense(2, activation="softmax"),  # 24 * 2 + 2 = 50
        ]
    )


def dense():
    """1000 parameters follow "bfloat16", 100 make the outputs and stay in float32."""
    hidden, head = (keras.layers.Dense(units, use_bias=False) for units in (50, 2))
    return keras.Sequential([keras.Input((20,)), hidden, head])


@pytest.mark.parametrize(
    ("model", "optimizer", "is_built", "expected"),
    [
        # 1000 parameters with two moments: 12, 8 and 6 bytes each; 100 of 12, 8 and 12.
        pytest.param(dense, keras.optimizers.Adam, True, [(13200, 4400), (8800, 4400), (7200, 2400)], id="Adam"),
        pytest.param(dense, keras.optimizers.SGD, False, [(4400, 4400), (4400, 4400), (2400, 2400)], id="no slots"),
        pytest.param(
            dense,
            lambda: keras.optimizers.Adam(use_ema=True),
            True,
            # Four bytes more for each of 1100.
            [(17600, 4400), (13200, 4400), (11600, 2400)],
            id="averages of the weights stay float32",
        ),
        pytest.param(
            classifier,
            keras.optimizers.Adam,
            False,
            # 362 * 4 + 2 * 314 * 4; the same with 2 * 314 * 2; of 216 in bfloat16 with their slots and 98 + 48 not.
            [(3960, 1256), (2704, 1256), (216 * 6 + 98 * 12 + 48 * 4, 216 * 2 + 98 * 4)],
            id="layers that stay float32",
        ),
    ],
)
def test_bytes_by_hand(model, optimizer, is_built, expected):
    model, optimizer = model(), optimizer()
    if is_built:
        optimizer.build(model.trainable_variables)
    found = storage_choices(model, optimizer)
    assert [way.name for way in found] == ["float32", "bfloat16 slots", "bfloat16 weights and slots"]
    assert [(way.state_bytes, way.gradient_bytes) for way in found] == expected
    assert optimizer.built == is_built


def test_quantized_weights_and_counts_are_among_the_bytes():
    layer = keras.layers.Dense(8)
    model = keras.Sequential([keras.Input((16,)), layer, keras.layers.Dropout(0.5)])
    layer.quantize("int8")
    # A byte for each weight, four for each of 8 scales and 8 biases; Adam has two slots of each bias.
    found = storage_choices(model, keras.optimizers.Adam())
    assert [(way.state_bytes, way.gradient_bytes) for way in found][:2] == [(128 + 64 + 64, 32), (128 + 64 + 32, 32)]
    assert mpkeras.audit(model).training_bytes["weights"] == {"int8": 128, "float32": 64}
    adapted = keras.Sequential([keras.Input((3,)), keras.layers.Normalization()])
    adapted.layers[0].adapt(np.ones((5, 3)))
    dtype = adapted.layers[0].count.dtype  # int64 on TensorFlow
    assert mpkeras.audit(adapted).training_bytes["weights"] == {"float32": 24, dtype: {"int32": 4, "int64": 8}[dtype]}


SMALL_SLOTS = mpkeras.Policy("mixed_bfloat16", slot_dtype="bfloat16")


@pytest.mark.parametrize(
    ("before", "way", "policy"),
    [
        ("mixed_float16", 1, SMALL_SLOTS),
        (None, 2, "bfloat16"),
        ("bfloat16", 0, "mixed_bfloat16"),
    ],
    ids=str,
)
def test_what_is_told_is_what_is_kept(before, way, policy):
    model = classifier()
    model.compile(keras.optimizers.Nadam(), "mse")
    if before is not None:
        mpkeras.prepare(model, before)
    state = snapshot(model.weights), [weight.dtype for weight in model.weights]
    told = storage_choices(model, model.optimizer)[way]
    assert (snapshot(model.weights), [weight.dtype for weight in model.weights]) == state
    mpkeras.prepare(model, policy)
    model.optimizer.build(model.trainable_variables)
    held = {group: sum(sums.values()) for group, sums in bytes_of_training(model, model.optimizer).items()}
    assert (told.state_bytes, told.gradient_bytes) == (held["weights"] + held["slots"], held["gradients"])


def test_parts_of_frozen_weights_are_counted_as_weights_alone():
    model = classifier()
    model.layers[0].trainable = False
    found = storage_choices(model, keras.optimizers.Adam())
    # 362 weights and two slots for 98; in bfloat16 the 216 frozen ones, and no slot.
    assert [way.state_bytes for way in found] == [362 * 4 + 98 * 8, 362 * 4 + 98 * 4, 216 * 2 + 146 * 4 + 98 * 8]


def advised(optimizer=None, cells=(), memory_kind=None, file=None, model=dense):
    model = model()
    if optimizer is not None:
        model.compile(optimizer, "mse")
    return AdviceReport(model, cells, False, [CPU], memory_kind=memory_kind, file=file)


def test_the_report_names_the_ways():
    text = str(advised(keras.optimizers.Adam()))
    assert (
        # 13200, 8800 and 7200 bytes of 1100 parameters.
        "Weights and optimizer state, with Adam: 12.9 KiB (12.0 bytes a parameter) in float32, 8.6 KiB (8.0 bytes a "
        'parameter) with `slot_dtype="bfloat16"`, 7.0 KiB (6.5 bytes a parameter) under "bfloat16".'
    ) in text
    assert 'short: `mpkeras.prepare(model, mpkeras.Policy("float32", slot_dtype="bfloat16"))`' in text
    assert '`mpkeras.prepare(model, "bfloat16")` the weights as well' in text
    # There is no slot to store.
    text = str(advised(keras.optimizers.SGD()))
    assert 'short: `mpkeras.prepare(model, "bfloat16")` stores weights' in text and "Policy(" not in text
    assert "short: `mpkeras run --policy bfloat16 SCRIPT`" in str(advised(keras.optimizers.Adam(), file="m.keras"))


@pytest.mark.parametrize(
    ("step_bytes", "kind", "named"),
    [
        # bfloat16 saves 6000 bytes of 13200 and what the step needs.
        pytest.param(16800, TEMPORARY, True, id="a fifth"),
        pytest.param(17200, TEMPORARY, False, id="less"),
        pytest.param(17200, ESTIMATE, True, id="an estimate decides nothing"),
    ],
)
def test_it_is_a_choice_where_the_state_is_much_of_the_memory(step_bytes, kind, named):
    cell = Cell("float32", False)
    cell.times_ms, cell.memory_bytes = [1.0, 1.0, 1.0], step_bytes
    text = str(advised(keras.optimizers.Adam(), [cell], kind))
    assert ("Where memory is what is short" in text) == named
    assert ("Small state would save 20% of the memory at most" in text) == (not named)


def test_what_is_not_known_is_not_told():
    not_built = keras.Sequential([keras.layers.Dense(2)])
    reports = [advised(), advised(Own(1)), advised(keras.optimizers.Adam(), model=lambda: not_built)]
    assert all(report.storage == [] and "optimizer state" not in str(report) for report in reports)
    # A model without weights has no bytes a parameter.
    model = keras.Sequential([keras.Input((3,)), keras.layers.Rescaling(0.5)])
    report = advised(keras.optimizers.Adam(), model=lambda: model)
    assert "a parameter" not in str(report) and report.to_dict()["parameters"] == 0


@pytest.mark.slow
def test_advise_counts_with_the_optimizer_of_the_model():
    model = dense()
    model.compile(keras.optimizers.Adadelta(), "mse")
    report = mpkeras.advise(model, None, measure=False)
    last = {"name": "bfloat16 weights and slots", "state_bytes": 7200, "gradient_bytes": 2400}
    assert report.to_dict()["storage"][2] == last
    assert "with Adadelta: 12.9 KiB" in str(report) and not model.optimizer.built
    x, y = np.ones((8, 20), "float32"), np.ones((8, 2), "float32")
    measured = mpkeras.advise(model, x, y, verbose=0, jit_compile=False, budget_s=5.0)
    assert measured.storage == report.storage and not model.optimizer.built
