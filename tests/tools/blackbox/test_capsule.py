"""P45: a skipped step in a file: all of its state, the same bits when it runs again, and the operation at fault."""

import functools

import keras
import numpy as np
import pytest
from keras import layers

import mpkeras
from mpkeras.callbacks import BlackBox, MixedPrecision
from mpkeras.conversion.float8 import multiplies_in_float8
from mpkeras.tools.blackbox import comparison
from mpkeras.training import capsule_file, training_backend
from tests.sixteen_bits import without_outputs
from tests.tools.blackbox import faults

OF_FAULTS = (
    faults.Log,
    faults.Steep,
    faults.Root,
    faults.Looping,
    faults.Branching,
    faults.OwnGradient,
    faults.Masked,
    faults.by_zero,
)
CUSTOM = {part.__name__: part for part in OF_FAULTS}
TENSORFLOW_AND_JAX = pytest.mark.backends("tensorflow", "jax")
SKIPS = pytest.mark.filterwarnings(
    "ignore:.*was skipped",
    "ignore:.* steps skipped in epoch",
    "ignore:All .* steps",
    "ignore:The outputs of layer .* are inf or NaN",
    "ignore:.*is given numbers beyond float16",
)


def skipped_step(tmp_path, model, data, *, loss="mse", loss_scale=1.0, before=(), **options):
    """Takes a step that is skipped, after those on the batches `before`; returns its file and the state before it."""
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.Adam(1e-3), loss_scale=loss_scale)
    step = mpkeras.make_train_step(model, optimizer, loss, **options)
    for good in before:
        assert not bool(step(*good)["skipped"])
    step._get_ready(*data[:2])
    state = step.state_dict()
    result = step(*data)
    assert bool(result["skipped"])
    path = tmp_path / "failure.mpk"
    assert step.capsule(path) == path.stat().st_size
    return path, state, result


def same(arrays, others):
    assert arrays.keys() == others.keys()
    return [name for name in arrays if arrays[name].tobytes() != others[name].tobytes()]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("steps", "jit_compile"),
    [
        pytest.param(1, False, id="one by one"),
        pytest.param(3, True, id="accumulated, xla", marks=TENSORFLOW_AND_JAX),
        pytest.param(3, False, id="accumulated", marks=pytest.mark.backends("torch")),
    ],
)
def test_a_step_is_kept_with_its_state_and_runs_again_with_the_same_bits(tmp_path, jit_compile, steps):
    # The loss is finite, and the gradient by the outputs, about 8 * 1e6 / 6, is beyond 65504.
    x, y = faults.batch()
    y[1, 2] = 1e6
    options = {
        "loss_scale": mpkeras.DynamicLossScale(8.0, dynamic_growth_steps=3),
        "metrics": [keras.metrics.MeanSquaredError(), keras.metrics.MeanAbsoluteError()],
        "before": [faults.batch(seed=i) for i in range(4)],
        "accumulate_steps": steps,
        "jit_compile": jit_compile,
    }
    path, state, result = skipped_step(tmp_path, faults.model_with(), (x, y, np.ones(4, "float32")), **options)
    capsule = mpkeras.load_capsule(path)
    assert same(capsule.state, state) == []
    for _ in range(2):
        run = capsule.run()
        assert run["same_bits"] and run["different"] == [] and run["versions"] == {} and capsule.is_exact
        assert run["skipped"] and run["loss_scale"] == float(result["loss_scale"])
        np.testing.assert_array_equal(run["loss"], float(result["loss"]))
    assert same(capsule._state_by_name(), dict(zip(capsule._state_by_name(), state.values(), strict=True))) == []
    np.testing.assert_array_equal(capsule.batch[0], x)
    np.testing.assert_array_equal(capsule.batch[2], np.ones(4))


def fitted_and_skipped(folder, options, x, y, fit_options=(), **of_model):
    """Fits with a black box and returns it, with the state before each step, by `(epoch, step)`."""
    model = faults.model_with(**of_model)
    inner = keras.optimizers.Adam(1e-3)
    optimizer = mpkeras.LossScaleOptimizer(inner, loss_scale=mpkeras.DynamicLossScale(8.0, dynamic_growth_steps=3))
    model.compile(optimizer, "mse", metrics=["mae"], **options)
    states = {}

    class Watching(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_begin(self, batch, logs=None):
            if self.model.optimizer.built:
                states[self.epoch, batch] = mpkeras.state_dict(self.model)

    box = BlackBox(folder, keep=9)
    callbacks = [MixedPrecision("mixed_float16"), box, Watching()]
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False, callbacks=callbacks, **dict(fit_options))
    return box, states, model


# The default is graph mode on TensorFlow (on a CPU), XLA on JAX, and eager on torch.
FIT = [
    pytest.param({}, id="default"),
    pytest.param({"run_eagerly": True}, id="eager", marks=TENSORFLOW_AND_JAX),
    pytest.param({"jit_compile": True}, id="xla", marks=pytest.mark.backends("tensorflow")),
    pytest.param({"steps_per_execution": 3}, id="several", marks=TENSORFLOW_AND_JAX),
]


@pytest.mark.slow
@SKIPS
@pytest.mark.parametrize("options", FIT)
def test_steps_of_fit_are_kept_with_their_state_and_run_again_with_the_same_bits(tmp_path, options):
    x, y = faults.batch(rows=24)
    x[5] = 1e5
    x[17] = np.nan
    box, states, _ = fitted_and_skipped(tmp_path, options, x, y)
    capsules = [mpkeras.load_capsule(path) for path in box.capsules]
    assert [(c.epoch, c.step) for c in capsules] == [(0, 1), (0, 4), (1, 1), (1, 4)]
    for capsule in capsules:
        run = capsule.run()
        assert run["same_bits"] and run["skipped"], run
        np.testing.assert_array_equal(capsule.batch[0], x[4 * capsule.step : 4 * capsule.step + 4])
        if (capsule.epoch, capsule.step) in states and "steps_per_execution" not in options:
            assert same(capsule.state, states[capsule.epoch, capsule.step]) == []
    assert capsules[1].first_operation().side == "batch"


# The layer and its dtype, what the batch is like, and of the operation its side, its layer and its name.
FAULTS = {
    "matmul": (None, None, {"scale": 2e4}, "forward", "net/hidden", "matmul"),
    "cast": (None, None, {"scale": 1e6}, "forward", "net/hidden", "cast"),
    "log": (faults.Log, "float32", {}, "forward", "fault", "log"),
    "loss": (None, None, {}, "forward", None, "divide"),
    "backward": (faults.Steep, "mixed_float16", {}, "backward", "fault", "multiply"),
    "slope": (faults.Root, "float32", {}, "backward", "fault", "sqrt"),
    "loop": (faults.Looping, "mixed_float16", {}, "forward", "fault", "exp"),
    "branch": (faults.Branching, "mixed_float16", {}, "forward", "fault", "multiply"),
    "own gradient": (faults.OwnGradient, "float32", {}, "backward", "fault", "divide"),
}


@SKIPS
@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_operation_is_named(tmp_path, fault, backend):
    make, dtype, data, side, where, name = FAULTS[fault]
    model = faults.model_with(*([] if make is None else [make(name="fault", dtype=dtype)]))
    if fault == "matmul":
        model.get_layer("hidden").kernel.assign(np.full((6, 8), 2.0))
    # By the outputs the gradients are some thousands: only the layer's own are beyond 65504.
    scale = 2.0**10 if fault == "backward" else 1.0
    options = {"loss": faults.by_zero if fault == "loss" else "mse", "loss_scale": scale, "jit_compile": False}
    path, _, _ = skipped_step(tmp_path, model, faults.batch(**data), **options)
    capsule = mpkeras.load_capsule(path, custom_objects=CUSTOM)
    found = capsule.first_operation()
    assert found.side == side and found.name in faults.NAMES[name], found
    # TensorFlow does not say which function a custom gradient is of; the line is there.
    is_unknown = fault == "own gradient" and backend == "tensorflow"
    assert where is None or is_unknown or found.where.endswith(where.rpartition("/")[2]), found
    if fault == "backward":
        # Those of all layers in front of it are beyond; it is the first that a backward pass comes to.
        first = capsule.compare(bound=0.05).first
        assert (first.path, first.outputs < 0.05, first.gradients) == ("drop", True, np.inf)
    if fault in ("log", "loss", "loop", "slope", "branch", "own gradient"):
        assert "faults.py:" in found.line, found
    if fault == "log":
        assert found.line.endswith("return inputs + ops.log(shifted)") and "epsilon" in capsule.remedy(found)
    if fault == "loss":
        assert found.where is None and "in by_zero" in found.line
    # It has looked and touched nothing.
    assert capsule.run()["same_bits"]


@pytest.mark.slow
def test_nan_in_the_batch_and_in_a_weight_are_named(tmp_path):
    x, y = faults.batch()
    y[2, 1] = np.nan
    path, _, _ = skipped_step(tmp_path, faults.model_with(), (x, y), jit_compile=False)
    capsule = mpkeras.load_capsule(path)
    found = capsule.first_operation()
    assert (found.side, found.where, found.message) == ("batch", "y", "holds 1 values that are not finite")
    assert "data" in capsule.remedy()
    comparison = capsule.compare(bound=0.5)
    assert comparison.first is None and "No other layer is more than 50 %" in str(comparison)
    model = faults.model_with()
    model.get_layer("head").bias.assign([np.inf, 0.0, 0.0])
    path, _, _ = skipped_step(tmp_path, model, faults.batch(), jit_compile=False)
    capsule = mpkeras.load_capsule(path)
    found = capsule.first_operation()
    assert found.side == "weight" and found.where.endswith("/bias")
    assert "checkpoint" in capsule.remedy(found)


@pytest.mark.slow
def test_the_inf_of_a_mask_is_no_fault(tmp_path):
    model = faults.model_with(faults.Masked(name="mask", dtype="float32"), faults.Log(name="fault", dtype="float32"))
    path, _, _ = skipped_step(tmp_path, model, faults.batch(), jit_compile=False)
    found = mpkeras.load_capsule(path, custom_objects=CUSTOM).first_operation()
    assert found.name in faults.NAMES["log"] and found.where.endswith("fault")


@keras.saving.register_keras_serializable("tests_of_capsules")
class Subclassed(keras.Model):
    """Its configuration holds no policy of its layers."""

    def __init__(self, **options):
        super().__init__(**options)
        self.hidden, self.drop = layers.Dense(8, name="hidden"), layers.Dropout(0.25, name="drop")
        self.head = layers.Dense(3, name="head")

    def call(self, inputs, training=False):
        return self.head(self.drop(self.hidden(inputs), training=training))


@pytest.mark.slow
@SKIPS
@pytest.mark.parametrize("make", [functools.partial(faults.model_with, policy="float32"), Subclassed])
def test_weights_in_bfloat16_are_in_bfloat16_again(tmp_path, make):
    model = make()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    x, y = faults.batch(rows=8)
    x[6] = np.inf
    box = BlackBox(tmp_path)
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=[MixedPrecision("bfloat16"), box])
    capsule = mpkeras.load_capsule(box.capsules[0])
    assert capsule.model.get_layer("hidden").kernel.dtype == "bfloat16"
    assert capsule.run()["same_bits"]


class Gated(layers.Layer):
    """Adds to its inputs what layers make of them that it makes itself, whose policies no configuration tells."""

    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.units = units
        self.norm, self.gate, self.out = (
            layers.LayerNormalization(),
            layers.Dense(2 * units, "relu"),
            layers.Dense(units),
        )

    def build(self, shape):
        self.norm.build(shape)
        self.gate.build(shape)
        self.out.build((*shape[:-1], 2 * self.units))

    def call(self, x):
        return x + self.out(self.gate(self.norm(x)))

    def get_config(self):
        return {**super().get_config(), "units": self.units}


@pytest.mark.slow
@pytest.mark.backends("tensorflow")  # others add float16 to float32
@pytest.mark.parametrize("policy", ["mixed_float16", "bfloat16"])
def test_layers_that_a_layer_makes_itself_are_made_as_they_were(tmp_path, policy):
    inputs = keras.Input((6,))
    model = keras.Model(inputs, layers.Dense(2)(Gated(6)(Gated(6)(inputs))))
    mpkeras.apply_policy(model, policy)
    x, y = np.ones((5, 6), "float32"), np.ones((5, 2), "float32")
    y[3, 1] = np.nan
    path, *_ = skipped_step(tmp_path, model, (x, y), jit_compile=False)
    capsule = mpkeras.load_capsule(path, custom_objects={"Gated": Gated})
    assert capsule.run()["same_bits"] and capsule.first_operation().where == "y"
    computed = [[layer.compute_dtype for layer in capsule_file.computing_layers(m)] for m in (capsule.model, model)]
    assert computed[0] == computed[1]


@pytest.mark.slow
@SKIPS
def test_a_loss_that_overflows_after_other_skipped_steps_is_named(tmp_path):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(1, kernel_initializer="zeros")])
    model.compile("adam", "mse")
    mpkeras.prepare(model, without_outputs("mixed_float16"), loss_scale=mpkeras.DynamicLossScale(2.0**15))
    box = BlackBox(tmp_path, keep=2)
    # The first step counts. Then the loss is 1e6, and its gradient of 2 * 1e3 / 4 overflows at the loss scale; 1e30
    # squared is inf itself.
    y = np.array([[0]] * 4 + [[1e3]] * 4 + [[1e30]] * 4, "float32")
    model.fit(np.ones((12, 3), "float32"), y, batch_size=4, shuffle=False, verbose=0, callbacks=[box])
    first, second = map(mpkeras.load_capsule, box.capsules)
    assert first.first_operation().side == "backward" and "loss scale of 32768" in first.remedy()
    found = second.first_operation()
    assert (found.side, found.message) == ("forward", "makes inf of float32 numbers up to 1e+30")
    assert "No 16 bits are at fault" in second.remedy(found)


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "torch")
def test_the_remedy_is_about_the_layer_that_overflows_and_not_about_one_in_front_whose_gradient_is_large(tmp_path):
    def dense(value, name):
        return keras.layers.Dense(4, kernel_initializer=keras.initializers.Constant(value), name=name)

    with mpkeras.policy_scope("mixed_float16"):
        stack = [keras.Input((4,)), dense(1.0, "front"), dense(6e3, "behind"), dense(1.0, "head")]
        model = keras.Sequential(stack, name="net")
    # Outputs of 4 * 4 * 6000; the gradient is larger in float32, as the mean square is of 384000.
    path, _, _ = skipped_step(tmp_path, model, (np.ones((2, 4)), np.zeros((2, 4))), jit_compile=False)
    capsule = mpkeras.load_capsule(path)
    assert capsule.trace().remedies()[0].startswith("Layer 'net/front': its gradient")
    assert capsule.remedy().startswith("Layer 'net/behind': its output reaches 9.6e+04")


@pytest.mark.slow
def test_the_trace_and_the_comparison_are_of_this_step(tmp_path):
    model = faults.model_with()
    model.get_layer("hidden").kernel.assign(np.full((6, 8), 2.0))
    path, _, _ = skipped_step(tmp_path, model, faults.batch(scale=2e4), jit_compile=False)
    capsule = mpkeras.load_capsule(path)
    report = capsule.trace()
    assert (report.culprit.side, report.culprit.path.rpartition("/")[2]) == ("output", "hidden")
    comparison = capsule.compare("float32", bound=0.05)
    assert comparison.first.path.endswith("hidden") and comparison.first.outputs == np.inf
    assert f"The first beyond 5.0 %: the outputs of '{comparison.first.path}', not finite." in str(comparison)
    assert [row.path.rpartition("/")[2] for row in comparison.rows] == ["hidden", "norm", "drop", "head"]
    assert "`keep_float32=(..., 'path:^net/hidden$')`" in capsule.remedy()
    assert "'inf'" in str(comparison.to_dict()) and comparison.to_dict()["bound"] == 0.05
    for arguments in ({"dtype": "float64"}, {"bound": 0.0}):
        with pytest.raises(ValueError, match="Expected `dtype` to be 'float32' and `bound`"):
            capsule.compare(**arguments)
    assert capsule.run()["same_bits"]


@SKIPS
def test_the_trace_names_the_layers_of_the_model_that_was_trained(tmp_path):
    with mpkeras.policy_scope("mixed_float16"):
        model = keras.Sequential([keras.Input((6,)), layers.Dense(8), layers.Dense(3)], name="net")
    x, y = faults.batch()
    x[2, 1] = 1e6
    path, _, _ = skipped_step(tmp_path, model, (x, y), jit_compile=False)
    capsule = mpkeras.load_capsule(path)
    report = capsule.trace()
    paths = [layer.path for layer in model.layers]
    # Up to Keras 3.15 those of the model that the capsule makes are others.
    assert [layer.path for layer in report.layers] == paths
    assert report.culprit.path == paths[0] and f"'{paths[0]}'" in report.culprit.message
    assert report.rules[0] == f"path:^{paths[0]}$" and report.rules[0] in capsule.remedy(report=report)
    mpkeras.apply_policy(model, report.policy())
    assert model.layers[0].compute_dtype == "float32"


@pytest.mark.slow
def test_a_weight_is_named_by_the_path_that_its_layer_had(tmp_path):
    with mpkeras.policy_scope("mixed_float16"):
        model = keras.Sequential([keras.Input((6,)), layers.Dense(3)], name="net")
    kernel = model.layers[0].kernel
    kernel.assign(np.full((6, 3), np.inf))
    path, _, _ = skipped_step(tmp_path, model, faults.batch(), jit_compile=False)
    capsule = mpkeras.load_capsule(path)
    culprit = capsule.trace().culprit
    assert capsule.model.layers[0].path != model.layers[0].path == culprit.path
    assert culprit.message == f"the weight '{kernel.path}' holds values that are not finite"


@pytest.mark.slow
def test_what_draws_numbers_in_a_loop_is_compared_as_it_was(tmp_path):
    with mpkeras.policy_scope("mixed_float16"):
        stack = [layers.SimpleRNN(3, dropout=0.25, return_sequences=True)]
        stack += [layers.TimeDistributed(layers.Dropout(0.25), name="drop")]
        stack += [layers.LSTM(3, return_sequences=True), layers.Rescaling(1e6)]
        dense = [layers.Dense(2, name="hidden"), layers.Dense(1, name="head")]
        model = keras.Sequential([keras.Input((5, 2)), *stack, *dense])
    data = np.ones((4, 5, 2), "float32"), np.zeros((4, 5, 1), "float32")
    path, _, _ = skipped_step(tmp_path, model, data, jit_compile=False)
    comparison = mpkeras.load_capsule(path).compare(bound=0.05)
    # The same numbers are drawn, and float16 overflows behind them.
    assert [row.outputs for row in comparison.rows[:2]] == [0.0, 0.0]
    # A recurrent layer without dropout draws nothing, though Keras gives it a generator.
    assert [row.is_as_it_was for row in comparison.rows] == [True, True, False, False, False, False]
    assert 0.0 < comparison.rows[2].outputs < 0.05
    assert comparison.first.path.endswith("hidden") and comparison.first.outputs == np.inf
    # A share of 0 is true of these two by construction, and no word on what float16 does in them.
    simple_rnn, drop = (row.path for row in comparison.rows[:2])
    assert f"what they lose by themselves is not in the table: {simple_rnn}, {drop}." in str(comparison)


@pytest.mark.slow
def test_attention_with_dropout_is_compared(tmp_path):
    with mpkeras.policy_scope("mixed_float16"):
        inputs = keras.Input((3, 4))
        attended = layers.MultiHeadAttention(2, 3, dropout=0.25, name="attention")(inputs, inputs)
        model = keras.Model(inputs, layers.Dense(1, name="head")(attended))
    x = np.random.default_rng(0).normal(size=(2, 3, 4)).astype("float32")
    path, _, _ = skipped_step(tmp_path, model, (x, np.full((2, 3, 1), np.nan, "float32")), jit_compile=False)
    capsule = mpkeras.load_capsule(path)
    comparison = capsule.compare(bound=0.05)
    rows = {row.path.rpartition("/")[2]: row for row in comparison.rows}
    # The same numbers are dropped.
    assert rows["attention"].outputs < 0.02
    assert capsule.run()["same_bits"]


@pytest.mark.slow
@SKIPS
def test_the_model_may_be_given_and_other_bits_are_named(tmp_path):
    path, state, _ = skipped_step(tmp_path, faults.model_with(), faults.batch(scale=1e6), jit_compile=False)
    model = faults.model_with()
    capsule = mpkeras.load_capsule(path, model)
    assert capsule.model is model and capsule.run()["same_bits"]
    # Other bits are named.
    other = mpkeras.load_capsule(path)
    name = next(name for name in other.state if name.endswith("skipped_steps"))
    other.state[name] = other.state[name] + 1
    other.versions["keras"] = "3.9.0"
    run = other.run()
    assert not run["same_bits"] and run["different"] == [name]
    assert run["versions"] == {"keras": ("3.9.0", keras.__version__)}
    wider = faults.model_with(head=4)
    with pytest.raises(ValueError, match="capsule of this model.*does not fit into 'net'"):
        mpkeras.load_capsule(path, wider)
    with pytest.raises(ValueError, match="same layers in the same dtypes.*float32"):
        mpkeras.load_capsule(path, faults.model_with(policy="float32"))
    with pytest.raises(TypeError, match="keras.Model"):
        mpkeras.load_capsule(path, "net")


@pytest.mark.slow
def test_classes_and_lambdas_need_what_keras_asks_for(tmp_path):
    model = faults.model_with(faults.Log(dtype="float32"))
    path, _, _ = skipped_step(tmp_path, model, faults.batch(), jit_compile=False)
    capsule = mpkeras.load_capsule(path)
    assert capsule.batch[0].shape == (4, 6) and "model/0/kernel" in capsule.state
    with pytest.raises(ValueError, match="Expected a model that can be made here.*custom_objects"):
        capsule.run()
    model = faults.model_with(layers.Lambda(lambda x: x * float("nan"), output_shape=(8,)))
    path, _, _ = skipped_step(tmp_path, model, faults.batch(), jit_compile=False)
    with pytest.raises(ValueError, match="If you trust the file, pass `safe_mode=False`"):
        mpkeras.load_capsule(path).run()
    assert mpkeras.load_capsule(path, safe_mode=False).run()["skipped"]


FAR = 4e6


def far(x):
    return FAR * x


@pytest.mark.slow
def test_what_a_file_does_not_hold_of_functions_is_said(tmp_path):
    made = [faults.model_with(layers.Lambda(lambda x: x * FAR)) for _ in range(2)]
    path, _, _ = skipped_step(tmp_path, made[0], faults.batch(), jit_compile=False)
    with pytest.raises(ValueError, match="one needs `FAR`. Pass `model=`.*or write a function of a name"):
        mpkeras.load_capsule(path, safe_mode=False).run()
    assert mpkeras.load_capsule(path, made[1]).run()["same_bits"]
    path, _, _ = skipped_step(tmp_path, faults.model_with(layers.Lambda(far)), faults.batch(), jit_compile=False)
    with pytest.raises(ValueError, match="Pass classes and functions of your own in `custom_objects`"):
        mpkeras.load_capsule(path).run()
    assert mpkeras.load_capsule(path, custom_objects={"far": far}).run()["same_bits"]


@SKIPS
@pytest.mark.slow
def test_a_capsule_of_another_backend_names_the_backend(tmp_path, backend):
    made = [faults.model_with() for _ in range(2)]
    path, _, _ = skipped_step(tmp_path, made[0], faults.batch(scale=1e6), jit_compile=False)
    other = "torch" if backend == "jax" else "jax"
    content, arrays = capsule_file.read(path)
    versions = {**content["versions"], "backend": other}
    capsule_file.write(path, {**content, "versions": versions}, arrays)
    message = (
        f"of {other}, while Keras computes with {backend}. Set the environment variable KERAS_BACKEND={other} before"
    )
    capsule = mpkeras.load_capsule(path)
    for ask in (capsule.run, capsule.trace, lambda: mpkeras.load_capsule(path, made[1])):
        with pytest.raises(ValueError, match=message):
            ask()
    # What was there is in the file, whatever computes.
    assert capsule.batch[0].shape == faults.batch()[0].shape and "model/0/kernel" in capsule.state


@SKIPS
@pytest.mark.slow
@pytest.mark.backends("torch")
@pytest.mark.parametrize("is_here", [pytest.param(False, id="no gpu here"), pytest.param(True, id="a gpu here")])
def test_a_capsule_of_a_machine_with_other_devices_runs(tmp_path, monkeypatch, is_here):
    path, _, _ = skipped_step(tmp_path, faults.model_with(), faults.batch(scale=1e6), jit_compile=False)
    generator = np.arange(16, dtype="uint8")
    if is_here:
        states, setter = training_backend.global_random_states, training_backend.set_global_random_states
        monkeypatch.setattr(training_backend, "global_random_states", lambda: {**states(), "cuda": generator})
        monkeypatch.setattr(training_backend, "set_global_random_states", lambda given: setter({"cpu": given["cpu"]}))
    else:
        content, arrays = capsule_file.read(path)
        capsule_file.write(path, content, {**arrays, "state/random/cuda": generator})
    run = mpkeras.load_capsule(path).run()
    assert run["skipped"] and run["same_bits"], run["different"]


@pytest.mark.slow
def test_a_capsule_is_of_a_step_that_was_skipped_just_now(tmp_path):
    model = faults.model_with()
    step = mpkeras.make_train_step(model, mpkeras.LossScaleOptimizer("sgd", loss_scale=1.0), "mse", jit_compile=False)
    with pytest.raises(ValueError, match="skipped just now.*no step that came to its end"):
        step.capsule(tmp_path / "a.mpk")
    step(*faults.batch())
    with pytest.raises(ValueError, match="skipped just now.*was applied"):
        step.capsule(tmp_path / "a.mpk")
    # A step that raises is not the skipped one before it.
    x, y = faults.batch(scale=np.nan)
    step(x, y)
    with pytest.raises(Exception):  # noqa: B017  what the backend says of shapes that do not fit
        step(x[:, :-1], y)
    with pytest.raises(ValueError, match="skipped just now.*no step that came to its end"):
        step.capsule(tmp_path / "a.mpk")
    unguarded = mpkeras.make_train_step(faults.model_with(), "sgd", "mse", jit_compile=False, rollback=False)
    unguarded(*faults.batch(scale=np.nan))
    with pytest.raises(ValueError, match="rollback=False"):
        unguarded.capsule(tmp_path / "a.mpk")
    assert not list(tmp_path.iterdir())


@SKIPS
@pytest.mark.slow
def test_products_in_float8_are_in_float8_again(tmp_path):
    """The loss is finite, and the scaled gradient is not: the loss says which numbers were multiplied."""
    parts = [layers.Dense(width, "relu", name=f"part{width}") for width in (32, 48, 64, 80)]
    model = keras.Sequential([keras.Input((16,)), *parts, layers.Dense(16, name="last")], name="net")
    policy = mpkeras.Policy("mixed_float8", keep_16_bits=("first", "last", "path:part64"))
    x = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
    model.compile("adam", "mse")
    mpkeras.prepare(model, policy, loss_scale=mpkeras.FixedLossScale(2.0**125))
    box = BlackBox(tmp_path)
    model.fit(x, np.full((8, 16), 100.0, "float32"), batch_size=8, epochs=1, verbose=0, callbacks=[box])
    (path,) = box.capsules
    capsule = mpkeras.load_capsule(path)
    run = capsule.run()
    assert run["same_bits"] and run["skipped"], run["different"]
    assert np.isfinite(run["loss"])
    assert [multiplies_in_float8(layer) for layer in capsule.model.layers] == [False, True, False, True, False]
    assert capsule.model is not model
    # Of other scales that mpkeras 0.2 had the policy says that they are gone.
    content, arrays = capsule_file.read(path)
    layers_then = [[*row, "delayed"] if "float8" in row else row for row in content["layers"]]
    capsule_file.write(tmp_path / "delayed.mpk", {**content, "layers": layers_then}, arrays)
    with pytest.raises(ValueError, match="float8='delayed'. Use 'current': 'delayed' was removed"):
        mpkeras.load_capsule(tmp_path / "delayed.mpk")
    # A model that multiplies in bfloat16 is another one.
    other = mpkeras.apply_policy(keras.models.clone_model(model), "mixed_bfloat16")
    other.compile("adam", "mse")
    with pytest.raises(ValueError, match="same layers in the same dtypes"):
        mpkeras.load_capsule(path, model=other).run()


def test_how_far_arrays_are_from_their_references():
    """By hand; what is not finite where the reference is is infinitely far, be it NaN or infinity."""
    reference = np.array([2.0, -4.0, np.inf])
    for array, share in (
        ([2.0, -3.0, np.inf], 0.25),
        ([2.0, -4.0, np.nan], 0.0),
        ([np.nan, -4.0, np.inf], np.inf),
        ([2.0, np.inf, np.inf], np.inf),
    ):
        assert comparison._deviation([np.array(array)], [reference]) == share
        assert comparison._deviation([None, 8.0 * np.array(array)], [None, reference], scale=8.0) == share
