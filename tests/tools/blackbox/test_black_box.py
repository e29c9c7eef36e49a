"""`BlackBox`: which skipped steps of `fit` it keeps, and what it leaves alone."""

import copy
import gc
import importlib
import pickle
import threading
from types import SimpleNamespace

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.callbacks import BlackBox, Float32Fallback, MixedPrecision, NumericsMonitor
from mpkeras.seams import ModelInFit
from tests.cases import first_quick
from tests.sixteen_bits import without_outputs
from tests.step_modes import snapshot
from tests.tools.blackbox import faults

TENSORFLOW_AND_JAX = pytest.mark.backends("tensorflow", "jax")
SKIPS = pytest.mark.filterwarnings(
    "ignore:.*was skipped",
    "ignore:.* steps skipped in epoch",
    "ignore:All .* steps",
    "ignore:The outputs of layer .* are inf or NaN",
    "ignore:.*is given numbers beyond float16",
)


def compiled(loss_scale=1.0, optimizer=None, **options):
    model = faults.model_with()
    inner = keras.optimizers.SGD(1e-3) if optimizer is None else optimizer
    model.compile(mpkeras.LossScaleOptimizer(inner, loss_scale=loss_scale), "mse", **options)
    return model


def fit(model, *callbacks, bad=(), large=(), steps=6, **options):
    """Six batches of four rows: in `bad` ones the loss is not finite, in `large` ones only gradients are."""
    # On torch Dropout draws from its generator.
    keras.utils.set_random_seed(3)
    x, y = faults.batch(rows=4 * steps)
    for step in bad:
        x[4 * step] = np.nan
    for step in large:
        y[4 * step] = 1e6
    options = {"batch_size": 4, "verbose": 0, "shuffle": False, **options}
    return model.fit(x, y, callbacks=[MixedPrecision("mixed_float16"), *callbacks], **options)


def steps_of(box):
    return [(capsule.epoch, capsule.step) for capsule in map(mpkeras.load_capsule, box.capsules)]


@SKIPS
@pytest.mark.slow
def test_the_first_failures_are_kept_and_finite_losses_give_way(tmp_path):
    box = BlackBox(tmp_path / "a" / "b", keep=2)
    fit(compiled(), box, large=[0, 1, 2], bad=[4])
    assert steps_of(box) == [(0, 0), (0, 4)]
    names = sorted(path.name for path in (tmp_path / "a" / "b").iterdir())
    assert names == ["net-epoch1-step0.mpk", "net-epoch1-step4.mpk"]
    # Full of finite ones: the first stay, as what comes after often follows from them.
    box = BlackBox(tmp_path / "b", keep=2)
    fit(compiled(), box, large=[0, 1, 3, 4])
    assert steps_of(box) == [(0, 0), (0, 1)]
    # Full of losses that were not finite: nothing gives way any more.
    box = BlackBox(tmp_path / "c", keep=2)
    fit(compiled(), box, bad=[0, 1, 2], large=[3], epochs=2)
    assert steps_of(box) == [(0, 0), (0, 1)] and len(list((tmp_path / "c").iterdir())) == 2


@pytest.mark.slow
@SKIPS
def test_files_of_an_earlier_training_stay(tmp_path):
    for _ in range(2):
        box = BlackBox(tmp_path)
        fit(compiled(), box, bad=[1], steps=2, validation_data=faults.batch(rows=8))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net-epoch1-step1-2.mpk", "net-epoch1-step1.mpk"]
    # The last step of an epoch, with validation behind it.
    assert [path.name for path in box.capsules] == ["net-epoch1-step1-2.mpk"]
    assert mpkeras.load_capsule(box.capsules[0]).run()["same_bits"]


ONE_OR_SEVERAL = [
    pytest.param({}, id="default"),
    pytest.param({"steps_per_execution": 3}, id="several", marks=TENSORFLOW_AND_JAX),
]


@SKIPS
@pytest.mark.slow
@pytest.mark.parametrize("options", ONE_OR_SEVERAL)
@pytest.mark.parametrize("bad", [(), (1, 5)], ids=["clean", "with failures"])
def test_training_is_left_alone(tmp_path, options, bad):
    watched, alone = compiled(**options), compiled(**options)
    box = BlackBox(tmp_path / "none")
    history = fit(watched, box, epochs=2, bad=bad)
    expected = fit(alone, epochs=2, bad=bad)
    assert (box.capsules == [] and list(tmp_path.iterdir()) == []) == (not bad)
    assert history.history == expected.history
    assert snapshot(watched.variables) == snapshot(alone.variables)
    assert snapshot(watched.optimizer.variables) == snapshot(alone.optimizer.variables)
    assert watched.train_function is None or not hasattr(watched.train_function, "mpkeras_kept_batches")


@SKIPS
@pytest.mark.slow
def test_steps_of_a_window_run_again_with_the_same_bits(tmp_path):
    box = BlackBox(tmp_path)
    model = compiled(optimizer=keras.optimizers.SGD(1e-3, gradient_accumulation_steps=3))
    fit(model, box, bad=[1, 5])
    first, last = map(mpkeras.load_capsule, box.capsules)
    assert first.is_exact and first.run()["same_bits"]
    # The sixth call ends the second window: the update of the other two has moved the weights.
    assert not last.is_exact


@SKIPS
@pytest.mark.slow
# The box runs steps one by one: the monitor behind it is to see each execution as a whole.
@pytest.mark.parametrize("order", [-1, 1], ids=["monitor first", "box first"])
@pytest.mark.parametrize("options", ONE_OR_SEVERAL[::-1])
def test_beside_a_numerics_monitor(tmp_path, order, options):
    box, monitor = BlackBox(tmp_path), NumericsMonitor()
    fit(compiled(**options), *[box, monitor][::order], bad=[1, 4], epochs=2)
    assert steps_of(box) == [(0, 1), (0, 4), (1, 1)]
    assert len(monitor.findings) == 4 and {found.culprit.side for found in monitor.findings} == {"input"}


def _that_overflows():
    keras.utils.set_random_seed(5)
    layers = [keras.layers.Dense(8, kernel_initializer="ones", name="wide"), keras.layers.Dense(1, name="head")]
    model = keras.Sequential([keras.Input((4,)), *layers], name="net")
    model.compile(mpkeras.LossScaleOptimizer(keras.optimizers.SGD(1e-12), loss_scale=1.0), "mse")
    return model


@pytest.mark.slow
@SKIPS
@pytest.mark.filterwarnings("ignore:Layer 'net/.*' has moved")
def test_beside_a_fallback_that_moves_layers_every_step_is_seen(tmp_path):
    x, y = np.full((32, 4), 3e4, "float32"), np.ones((32, 1), "float32")
    # The last of eight batches, long after the layers have moved.
    x[28] = np.nan
    seen, states = [], []
    for with_box in (1, -1, 0):
        box, fallback = BlackBox(tmp_path / str(with_box), keep=9), Float32Fallback(patience=1)
        callbacks = [fallback] if not with_box else [box, fallback][::with_box]
        model = _that_overflows()
        options = {"batch_size": 4, "verbose": 0, "shuffle": False}
        model.fit(x, y, callbacks=[MixedPrecision(without_outputs("mixed_float16")), *callbacks], **options)
        assert fallback.moved == ["net/wide", "net/head"]
        seen.append(steps_of(box))
        states.append(snapshot(model.variables) + snapshot(model.optimizer.variables))
    # On JAX a layer moves a step later.
    skipped = int(keras.ops.convert_to_numpy(model.optimizer.skipped_steps))
    assert 3 <= skipped <= 5 and seen == [[(0, step) for step in (*range(skipped - 1), 7)]] * 2 + [[]]
    assert states[0] == states[1] == states[2]


@pytest.mark.parametrize("order", first_quick([1, -1]), ids=["box first", "monitor first"])
def test_nothing_stays_in_front_of_the_train_function_of_a_prepared_model(tmp_path, order):
    model = compiled(run_eagerly=True)
    mpkeras.prepare(model, "mixed_float16")
    x, y = faults.batch(rows=4)
    for _ in range(2):
        model.fit(x, y, verbose=0, callbacks=[BlackBox(tmp_path), NumericsMonitor()][::order])
        assert not hasattr(model.train_function, "mpkeras_kept_batches")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* steps skipped in epoch")
def test_alone_in_a_plain_fit(tmp_path):
    model = faults.model_with(policy="float32")
    model.compile("sgd", "mse")
    x, y = faults.batch(rows=8)
    # Of the labels: TensorFlow's relu makes 0 of NaN.
    y[5] = np.inf
    box = BlackBox(tmp_path)
    with pytest.warns(UserWarning, match="Step 1 of epoch 1 was skipped, as its loss was not finite.*mpkeras replay"):
        model.fit(x, y, batch_size=4, verbose=0, shuffle=False, callbacks=[box])
    assert steps_of(box) == [(0, 1)] and mpkeras.load_capsule(box.capsules[0]).run()["same_bits"]


@pytest.mark.slow
def test_what_cannot_be_written_is_told_once_and_training_goes_on(tmp_path):
    (tmp_path / "file").write_text("no folder")
    box = BlackBox(tmp_path / "file")
    with pytest.warns(UserWarning) as warned:
        history = fit(compiled(), box, bad=[0, 1], steps=3)
    told = [str(w.message) for w in warned if "could not be written" in str(w.message)]
    assert len(told) == 1 and "Step 0 of epoch 1" in told[0] and "file" in told[0]
    assert box.capsules == [] and history.history["skipped_steps"] == [2]


def counted_reads(monkeypatch):
    """Returns a list that grows by one whenever the host reads a tensor."""
    reads = []

    def count(owner, name):
        function = getattr(owner, name)

        def counting(tensor, *args, **options):
            # What Keras hands to callbacks it reads in a thread of its own, some time or other.
            if keras.ops.is_tensor(tensor) and threading.current_thread() is threading.main_thread():
                reads.append(name)
            return function(tensor, *args, **options)

        monkeypatch.setattr(owner, name, counting)

    count(np, "array")
    count(np, "asarray")
    if keras.backend.backend() == "tensorflow":
        count(type(keras.ops.zeros(())), "numpy")
    elif keras.backend.backend() == "torch":
        for name in ("numpy", "item", "__int__", "__bool__"):
            count(type(keras.ops.zeros(())), name)
    return reads


@pytest.mark.slow
def test_of_a_step_without_a_failure_single_numbers_are_read(tmp_path, monkeypatch):
    reads = counted_reads(monkeypatch)

    def count(steps, *callbacks):
        # At the first steps each optimizer that there is is looked at, those of other tests included.
        gc.collect()
        reads.clear()
        fit(compiled(), *callbacks, steps=steps, epochs=2)
        return len(reads)

    model = compiled()
    fit(model, steps=1)
    numbers = sum(len(v.shape) == 0 for v in [*model.optimizer.variables, *model.metrics_variables])
    # Before each step all of them, and behind it the count of skipped steps; 8 at the first steps, in which weights are
    # looked at by the guard that is there for it.
    steps, calls_of_a_read = 20, 2 if keras.backend.backend() == "torch" else 1
    assert count(steps, BlackBox(tmp_path)) - count(steps) <= calls_of_a_read * 2 * steps * (numbers + 1) + 8


class _Counting(keras.metrics.Metric):
    """Counts its updates, whatever they are of; on JAX as on the others."""

    def __init__(self, name="updates", dtype=None):
        super().__init__(dtype=dtype, name=name)
        self.updates = self.add_variable((2,), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.updates.assign_add([1.0, 2.0])

    def result(self):
        return self.updates[1]


def _schedule():
    return keras.optimizers.schedules.ExponentialDecay(1e-2, 2, 0.5)


@SKIPS
@pytest.mark.slow
@pytest.mark.backends("jax")
@pytest.mark.parametrize(
    "make, options",
    [
        (lambda: keras.optimizers.Adam(_schedule()), {}),
        (lambda: keras.optimizers.SGD(1e-2, momentum=0.9, use_ema=True, ema_overwrite_frequency=2), {}),
        (lambda: keras.optimizers.Adam(1e-2, clipnorm=0.5), {"steps_per_execution": 2}),
        (lambda: keras.optimizers.SGD(1e-2, gradient_accumulation_steps=2), {}),
        (lambda: keras.optimizers.Adam(1e-2), {"run_eagerly": True, "jit_compile": False}),
    ],
    ids=["schedule", "moving average", "two an execution", "accumulation", "eager"],
)
def test_training_is_the_same_without_it(tmp_path, make, options):
    # One, two in a row, the last one of an epoch; a scale that moves; only gradients, and the loss, too.
    faults_of = {"bad": [1, 4, 7], "large": [5], "steps": 8, "epochs": 2}
    histories, states = [], []
    box = BlackBox(tmp_path, keep=8)
    for callbacks in ([box], []):
        model = compiled(loss_scale=2.0**12, optimizer=make(), weighted_metrics=[_Counting()], **options)
        histories.append(fit(model, *callbacks, **faults_of).history)
        states.append([snapshot(v) for v in (model.variables, model.optimizer.variables, model.metrics_variables)])
    assert histories[0] == histories[1] and states[0] == states[1]
    assert {(0, 1), (0, 4), (0, 7), (1, 1), (1, 4), (1, 7)} <= set(steps_of(box))
    capsules = [mpkeras.load_capsule(path, custom_objects={"_Counting": _Counting}) for path in box.capsules]
    assert all(capsule.run()["same_bits"] for capsule in capsules if capsule.is_exact)


@SKIPS
@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "options"),
    [
        ("predict", {}),
        ("evaluate", {"run_eagerly": True}),
        ("train_on_batch", {}),
    ],
)
def test_what_a_callback_computes_between_steps_leaves_all_there(does, options, tmp_path):
    """On JAX such a call overwrites what the step has left."""
    x, y = faults.batch(rows=4)

    class Computing(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch in (1, 2, 5):
                y_of_call = {} if "predict" in does else {"y": y}
                quiet = {"verbose": 0} if "_on_batch" not in does else {}
                getattr(self.model, does)(x, **y_of_call, **quiet)

    def fitted(*callbacks):
        model = compiled(**options)
        fit(model, *callbacks, Computing(), bad=[2, 5])
        return snapshot(model.variables + model.optimizer.variables)

    box = BlackBox(tmp_path)
    assert fitted(box) == fitted()
    assert steps_of(box) == [(0, 2), (0, 5)]
    assert all(mpkeras.load_capsule(path).run()["same_bits"] for path in box.capsules)


@pytest.mark.slow
@SKIPS
def test_what_a_callback_sets_in_the_end_stays(tmp_path):
    class Setting(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 5:
                self.model.layers[-1].bias.assign([0.25] * self.model.layers[-1].bias.shape[0])

    model, box = compiled(), BlackBox(tmp_path)
    fit(model, box, Setting(), bad=[5])
    assert steps_of(box) == [(0, 5)]
    assert set(keras.ops.convert_to_numpy(model.layers[-1].bias).tolist()) == {0.25}


@pytest.mark.slow
@SKIPS
def test_what_a_callback_sets_between_steps_is_seen(tmp_path):
    class Resetting(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            if batch == 3:
                self.model.optimizer.skipped_steps.assign(0)

    box = BlackBox(tmp_path)
    fit(compiled(), box, Resetting(), bad=[1, 3])
    # After the fourth step the count is 1, as it was after the third.
    assert steps_of(box) == [(0, 1), (0, 3)]
    capsule = mpkeras.load_capsule(box.capsules[1])
    (count,) = [value for name, value in capsule.state.items() if name.endswith("skipped_steps")]
    assert count == 0 and capsule.run()["same_bits"]


def test_numbers_are_those_of_before_the_step_bit_for_bit():
    model = compiled()
    model.optimizer.build(model.trainable_variables)
    values = {"float32": np.uint32(0x7FC01234).view("float32"), "int32": np.int32(2**31 - 5)}
    numbers = [v for v in model.optimizer.variables if len(v.shape) == 0 and v.dtype in values]
    # `fit` on JAX hands on the state of `model.optimizer` alone; a GAN's other one is updated in a step without `jit`.
    numbers.append(keras.Variable(0, dtype="int32", trainable=False))
    for variable in numbers:
        variable.assign(values[variable.dtype])

    def held():
        optimizer, metrics = model.optimizer, model.metrics_variables
        groups = (model.trainable_variables, model.non_trainable_variables, optimizer.variables, metrics)
        state = [[variable.value for variable in group] for group in groups]
        return ModelInFit(model).held_state([state] if keras.backend.backend() == "jax" else [])

    read = [held().read(variable) for variable in numbers]
    for variable in numbers:
        variable.assign(0)
    assert [held().number(variable) for variable in numbers] == [0] * len(numbers)
    for variable, (value,) in zip(numbers, read, strict=True):
        expected = values[variable.dtype]
        assert value.shape == () and value.dtype == variable.dtype and value.tobytes() == expected.tobytes()


class _WithItsOwnOptimizer(keras.Model):
    """As a GAN: `super().compile()` gives it a third optimizer that nothing uses, and that is the first to be found."""

    def __init__(self):
        super().__init__(name="own")
        self.part = keras.layers.Dense(1)

    def call(self, x):
        return self.part(x)

    def compile(self, own_optimizer):
        super().compile(jit_compile=False)
        self.own_optimizer = own_optimizer

    def train_step(self, data):
        import tensorflow as tf

        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.cast(self(x, training=True), "float32") - y) ** 2)
            scaled = self.own_optimizer.scale_loss(loss)
        self.own_optimizer.apply(tape.gradient(scaled, self.trainable_variables), self.trainable_variables)
        return {"error": loss}


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
def test_any_optimizer_may_have_skipped_the_step(tmp_path):
    def made():
        model = _WithItsOwnOptimizer()
        model.compile(keras.optimizers.SGD(0.1))
        model(np.ones((1, 2), "float32"))
        return model

    model, box = made(), BlackBox(tmp_path)
    x = np.where(np.arange(16).reshape(8, 2) == 9, np.inf, 1.0).astype("float32")
    callbacks = [mpkeras.callbacks.MixedPrecision("mixed_float16"), box]
    with pytest.warns(UserWarning):
        model.fit(x, np.ones((8, 1), "float32"), batch_size=4, shuffle=False, verbose=0, callbacks=callbacks)
    assert len(box.capsules) == 1
    again = mpkeras.prepare(made(), "mixed_float16")
    again.own_optimizer.build(again.trainable_variables)
    found = mpkeras.load_capsule(box.capsules[0], again).run()
    assert found["skipped"] and found["same_bits"], found["different"]


def test_without_rollback_there_is_no_state_to_keep(tmp_path):
    model = compiled()
    mpkeras.prepare(model, rollback=False)
    x, y = faults.batch()
    with pytest.raises(ValueError, match="undoes skipped steps.*rollback=False"):
        model.fit(x, y, verbose=0, callbacks=[BlackBox(tmp_path)])


@pytest.mark.backends("jax")
@pytest.mark.parametrize("length", [3, 0])
def test_loops_are_run_as_jax_runs_them(length):
    """The step of a black box is taken again operation by operation, rounds of loops included."""
    import jax
    import jax.numpy as jnp

    interpreting = importlib.import_module("mpkeras.tools.blackbox._jax")

    def loop(factor, rows, columns):
        def one_round(carried, slices):
            total, count = carried
            row, column = slices
            return (total * factor + row, count + 1), (total - row, column[::-1])

        return jax.lax.scan(one_round, (jnp.ones(2), 0), (rows, columns), reverse=True)

    rows, columns = np.arange(2.0 * length).reshape(length, 2), np.arange(4.0 * length).reshape(length, 4)
    arguments = (jnp.float32(0.5), jnp.asarray(rows, "float32"), jnp.asarray(columns, "float32"))
    program = jax.make_jaxpr(loop)(*arguments)
    nobody = SimpleNamespace(**dict.fromkeys(("enter", "note", "know_constant"), lambda *arguments: None))
    found = interpreting._Interpreter(nobody, []).run(program.jaxpr, program.consts, arguments)
    expected = jax.tree_util.tree_leaves(loop(*arguments))
    assert len(found) == len(expected) == 4
    for own, of_jax in zip(found, expected, strict=True):
        np.testing.assert_array_equal(own, of_jax)


@pytest.mark.slow
@SKIPS
@pytest.mark.parametrize("again", [copy.copy, lambda box: pickle.loads(pickle.dumps(box))])
def test_a_copy_keeps_the_failures_of_its_own_training(again, tmp_path):
    """The steps of the copy were given to the box that it was copied from, which had no model."""
    first = BlackBox(tmp_path)
    box = again(first)
    fit(compiled(), box, bad=[1], steps=3)
    assert steps_of(box) == [(0, 1)]
    assert not first.capsules
    fit(compiled(), first, bad=[2], steps=3)
    assert steps_of(first) == [(0, 2)]
