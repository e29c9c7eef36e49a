"""G18: while no step has counted, a batch for which only the guessed loss scale is too large is taken again."""

import random
import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

import mpkeras
from mpkeras.callbacks import BlackBox, Float32Fallback, MixedPrecision, NumericsMonitor
from mpkeras.policies.loss_scaling import DynamicLossScale, number
from mpkeras.training import retake
from tests.cases import first_quick
from tests.scaling.gan import Gan
from tests.step_modes import FIT_MODES
from tests.training.models import WAYS, AddsNoise, loss_and_gradients, scaled_losses, without_gradients

BACKEND = keras.backend.backend()
BATCH, BATCHES = 8, 4
RNG = np.random.default_rng(3)
X = RNG.normal(size=(BATCH * BATCHES, 6)).astype("float32")
SERIES = RNG.normal(size=(BATCH * BATCHES, 5, 3)).astype("float32")
WORDS = RNG.integers(0, 12, size=(BATCH * BATCHES, 5))
CLASSES = RNG.integers(0, 3, size=BATCH * BATCHES)
# A scale of 32768 brings gradients of size 2 to 65536, more than float16 holds; these are of several hundreds.
Y = (400 * X[:, :1] + 100).astype("float32")
EAGER = {"run_eagerly": True} if BACKEND != "torch" else {}


def model_of(*stack, shape=(6,)):
    keras.utils.set_random_seed(5)
    return keras.Sequential([keras.Input(shape), *stack])


def everything():
    """A model with all that a skipped step must leave alone."""
    keras.utils.set_random_seed(5)
    stack = [layers.Dense(8, "relu"), layers.BatchNormalization(momentum=0.5), layers.Dropout(0.25, seed=9)]
    return model_of(*stack, layers.GaussianNoise(0.1, seed=8), layers.Dense(1))


def prepared(model=None, policy="mixed_float16", optimizer=None, loss_scale=None, rollback=True, **options):
    model = everything() if model is None else model
    optimizer = keras.optimizers.Adam(0.02) if optimizer is None else optimizer
    options = {"loss": "mse", "metrics": ["mae"], **options}
    model.compile(optimizer, **options)
    return mpkeras.prepare(model, policy, loss_scale=loss_scale, rollback=rollback)


def fit(model, x=X, y=Y, **options):
    return model.fit(x, y, **{"batch_size": BATCH, "shuffle": False, "verbose": 0, **options}).history


def counters(optimizer):
    names = ("iterations", "skipped_steps", "consecutive_skips", "nonfinite_losses", "last_step_skipped")
    return [int(number(ops.convert_to_tensor(getattr(optimizer, name)))) for name in names]


def two_inputs():
    keras.utils.set_random_seed(5)
    first, second = keras.Input((6,)), keras.Input((6,))
    return keras.Model([first, second], layers.Dense(1)(layers.Concatenate()([first, layers.Dense(4)(second)])))


class OfTheUsersOwn(keras.Model):
    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(5)
        self.hidden, self.head = layers.Dense(8, "silu"), layers.Dense(1)

    def call(self, x):
        return self.head(self.hidden(x))


def dense(*units):
    return lambda: model_of(*[layers.Dense(n, "relu") for n in units], layers.Dense(1))


# What makes a model; inputs, targets, loss and optimizer.
HEALTHY = {
    "one layer": (dense(), X, Y, "mse", "sgd"),
    "four layers": (dense(8, 8, 8), X, 3 * Y, "mse", "adamw"),
    "a sum": (dense(8), X, Y / 10, keras.losses.MeanSquaredError(reduction="sum"), "adam"),
    "everything": (everything, X, Y, "mse", "adam"),
    "of the user's own": (OfTheUsersOwn, X, Y, "mse", "adam"),
    "two inputs": (two_inputs, [X, X[::-1]], Y, "mse", "adagrad"),
    "classifier": (lambda: model_of(layers.Dense(3, "softmax")), X, CLASSES, "sparse_categorical_crossentropy", "adam"),
    "recurrent": (
        lambda: model_of(layers.GRU(4, dropout=0.2, seed=2), layers.Dense(1), shape=(5, 3)),
        SERIES,
        Y,
        "mse",
        "adam",
    ),
    "embedding": (
        lambda: model_of(layers.Embedding(12, 4), layers.GlobalAveragePooling1D(), layers.Dense(1), shape=(5,)),
        WORDS,
        Y,
        "mse",
        "adam",
    ),
}


def optimizer_of(name):
    # So slow that gradients stay what they are: whether a rate is too high is another question.
    optimizer = keras.optimizers.get(name)
    optimizer.learning_rate = 1e-5 if name == "sgd" else 1e-3
    return optimizer


@pytest.mark.slow
@pytest.mark.parametrize("name", HEALTHY)
def test_no_batch_of_a_healthy_model_is_lost(name):
    make, x, y, loss, optimizer = HEALTHY[name]
    model = prepared(make(), optimizer=optimizer_of(optimizer), loss=loss, metrics=None, **EAGER)
    history = fit(model, x, y)
    assert (history["skipped_steps"], int(model.optimizer.iterations)) == ([0], BATCHES)


@pytest.fixture(scope="module", autouse=True)
def warmed_up():
    """The first products of a process are rounded in another way by torch on a CPU."""
    if BACKEND == "torch":
        everything()(X[:BATCH], training=True)
        fit(prepared(), X[:BATCH], Y[:BATCH])


def bits(state):
    return {name: value.tobytes() for name, value in state.items() if "scale" not in name}


def first_step(way, options, loss_scale=None):
    """Returns the state after a step on the first batch, what the step tells, and the optimizer."""
    model, optimizer = everything(), keras.optimizers.Adam(0.02)
    if way == "fit":
        history = fit(prepared(model, optimizer=optimizer, loss_scale=loss_scale, **options), X[:BATCH], Y[:BATCH])
        state, told, optimizer = mpkeras.state_dict(model), {key: history[key][0] for key in history}, model.optimizer
    else:
        optimizer = mpkeras.LossScaleOptimizer(optimizer, loss_scale=loss_scale or "dynamic")
        step = step_of(model, optimizer, metrics=[keras.metrics.MeanAbsoluteError()], **options)
        told = {name: float(value) for name, value in step(X[:BATCH], Y[:BATCH]).items()}
        state = step.state_dict()
    assert told.pop("loss_scale") == number(optimizer.loss_scale)
    return bits(state), told, optimizer


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:All 1 steps of epoch 1 were skipped")
@pytest.mark.parametrize(("way", "options"), WAYS)
def test_nothing_is_left_of_an_attempt_but_the_smaller_scale(way, options):
    """The first batch trains as in a model whose scale begins where this one's came to."""
    state, told, optimizer = first_step(way, options)
    found = number(optimizer.loss_scale) * retake.HEADROOM
    assert 2.0 < found < 2.0**13
    assert counters(optimizer) == [1, 0, 0, 0, 0]
    assert (state, told) == first_step(way, options, DynamicLossScale(found))[:2]
    # And twice the scale would have been too much.
    assert int(first_step(way, options, found * 2)[2].skipped_steps) == 1


def step_of_gradient_x(loss=lambda y, y_pred: ops.mean(y_pred), **scale):
    """Returns a step in which the gradient of the mean of `kernel * x` by the kernel is `x`, and its optimizer."""
    model = model_of(layers.Dense(1, use_bias=False, kernel_initializer=keras.initializers.Constant(1e-3)), shape=(1,))
    mpkeras.apply_policy(model, mpkeras.Policy("mixed_float16", keep_float32=()))
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(1e-12), **scale)
    step = mpkeras.make_train_step(model, optimizer, loss, jit_compile=False)
    return lambda x: step(np.array([[x]], "float32"), np.ones((1, 1), "float32")), optimizer


@pytest.mark.parametrize(
    ("rule", "gradient", "expected"),
    first_quick(
        [
            # 256 counts, and the rule grows in the first step: from the guess. 128 counts, and a quarter of it is 32.
            (DynamicLossScale(64.0, dynamic_growth_steps=1), 200.0, 128.0),
            (DynamicLossScale(64.0, dynamic_growth_steps=1), 300.0, 32.0),
            # float16 ends at 65504: 16, 2 and 1 count, and a quarter of the last two is below 1.
            (DynamicLossScale(64.0), 4e3, 4.0),
            (DynamicLossScale(64.0), 2e4, 1.0),
            (DynamicLossScale(64.0), 4e4, 1.0),
            # Above the guess there is nothing in its bounds, so the guess is all that is tried.
            (DynamicLossScale(64.0, max_scale=128.0), 300.0, 64.0),
            # 256 counts not, 25.6 is below the guess, which counts; no step of the rule down is within a quarter.
            (DynamicLossScale(64.0, backoff_factor=0.1), 300.0, 64.0),
            # 256 counts not, 192 does; then 144, 108, 81, 60.75 and 48 = 192 / 4 lies between two of the rule's own.
            (DynamicLossScale(64.0, backoff_factor=0.75), 300.0, 60.75),
        ]
    ),
)
def test_training_goes_on_a_quarter_below_the_scale_that_counted_as_far_as_the_rule_has_it(rule, gradient, expected):
    step, optimizer = step_of_gradient_x(loss_scale=rule)
    assert float(step(gradient)["loss_scale"]) == number(optimizer.loss_scale) == expected
    assert counters(optimizer) == [1, 0, 0, 0, 0]


def test_a_first_batch_leaves_room_for_the_next_ones():
    """The scale of the first is found at 128, and a quarter of that is used: 2000 would overflow at 64."""
    step, optimizer = step_of_gradient_x(initial_scale=64.0)
    assert [float(step(gradient)["loss_scale"]) for gradient in (500.0, 2000.0, 500.0)] == [32.0] * 3
    assert counters(optimizer) == [3, 0, 0, 0, 0]


def test_an_error_in_the_first_step_leaves_the_guess():
    def loss(y, y_pred):
        raise ArithmeticError("of the user's own")

    step, optimizer = step_of_gradient_x(loss, initial_scale=32.0)
    with pytest.raises(ArithmeticError, match="of the user's own"):
        step(1.0)
    assert number(optimizer.loss_scale) == 32.0


def test_a_first_loss_that_is_not_finite_is_skipped_at_the_guess():
    step, optimizer = step_of_gradient_x(initial_scale=32.0)
    assert (float(step(np.nan)["loss_scale"]), counters(optimizer)) == (32.0, [0, 1, 1, 1, 1])
    assert (float(step(1.0)["loss_scale"]), counters(optimizer)) == (32.0, [1, 1, 0, 1, 0])


@pytest.mark.parametrize("is_built", first_quick([True, False]))
def test_of_a_model_that_the_first_step_builds_too(is_built):
    """TensorFlow makes the optimizer, and here the model, while it traces the step."""
    keras.utils.set_random_seed(3)
    head = layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((1,)), head] if is_built else [head])
    scale, policy = DynamicLossScale(64.0), mpkeras.Policy("mixed_float16", keep_float32=())
    model = prepared(model, policy, keras.optimizers.SGD(1e-12), scale, metrics=None, jit_compile=BACKEND == "jax")
    # With x = 1 and a kernel of 0 the gradient is -2 y: 500 fits at 128, and 2000 at 32.
    y = np.repeat([250.0, 1000.0], BATCH)[:, None]
    assert fit(model, np.ones_like(y), y) == {"loss": [531250.0], "loss_scale": [32.0], "skipped_steps": [0]}


def counting(x, y, drawn):
    for i in range(0, len(x), BATCH):
        drawn.append(i)
        yield x[i : i + BATCH], y[i : i + BATCH]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*ran out of data", "ignore:.*shuffle=True")
@pytest.mark.parametrize("options", FIT_MODES)
def test_each_batch_of_a_generator_is_drawn_once(options):
    drawn: list = []
    model = prepared(**options)
    fit(model, counting(X, Y, drawn), None, batch_size=None, steps_per_epoch=BATCHES)
    assert counters(model.optimizer)[:2] == [BATCHES, 0]
    assert drawn[:BATCHES] == list(range(0, len(X), BATCH))
    expected = prepared(**options)
    fit(expected)
    assert bits(mpkeras.state_dict(model)) == bits(mpkeras.state_dict(expected))


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "jax")
@pytest.mark.parametrize("options", FIT_MODES)
def test_the_steps_of_an_execution_are_taken_one_by_one_until_one_counts(options):
    together, alone = (prepared(steps_per_execution=steps, **options) for steps in (3, 1))
    assert fit(together, epochs=2)["skipped_steps"] == [0, 0]
    fit(alone, epochs=2)
    assert bits(mpkeras.state_dict(together)) == bits(mpkeras.state_dict(alone))
    assert counters(together.optimizer) == [2 * BATCHES, 0, 0, 0, 0]


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
def test_a_dataset_of_ragged_rows():
    import tensorflow as tf

    class Bag(keras.Model):
        def __init__(self):
            super().__init__()
            self.embedding, self.head = layers.Embedding(12, 4), layers.Dense(1)

        def call(self, words):
            words = words.to_tensor() if hasattr(words, "to_tensor") else words
            return self.head(ops.mean(self.embedding(words), axis=1))

    rows = tf.ragged.constant([list(range(1 + i % 4)) for i in range(len(Y))])
    data = tf.data.Dataset.from_tensor_slices((rows, Y)).batch(BATCH)
    model = prepared(Bag(), metrics=None, jit_compile=False)
    fit(model, data, None, batch_size=None)
    assert counters(model.optimizer)[:2] == [BATCHES, 0]


class CountsTraces(layers.Layer):
    def __init__(self):
        super().__init__()
        self.traces = 0

    def call(self, x):
        self.traces += 1
        return x


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "jax")
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("options", [mode for mode in FIT_MODES if mode.id in ("graph", "xla", "jit")])
def test_there_is_no_second_program(options, steps):
    traces = []
    for scale in ("dynamic", 4.0):
        model = prepared(
            model_of(CountsTraces(), layers.Dense(1)), loss_scale=scale, steps_per_execution=steps, **options
        )
        fit(model, epochs=2)
        assert counters(model.optimizer)[:2] == [2 * BATCHES, 0]
        traces.append(model.layers[0].traces)
    assert traces[0] == traces[1]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fit", "step"])
def test_nobody_looks_any_more_once_a_step_has_counted(way, monkeypatch):
    looks = []
    take = retake.FirstSteps.take
    monkeypatch.setattr(retake.FirstSteps, "take", lambda self, *args: looks.append(1) or take(self, *args))
    if way == "fit":
        fit(prepared(**EAGER), epochs=2)
    else:
        step = mpkeras.make_train_step(everything(), "sgd", "mse", jit_compile=False)
        for _ in range(3):
            step(X[:BATCH], Y[:BATCH])
    assert len(looks) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:1 of 4 steps skipped in epoch 1")
def test_a_batch_whose_loss_is_not_finite_is_skipped_and_the_next_one_taken_again():
    spoiled = X.copy()
    spoiled[2] = np.nan
    model = prepared(**EAGER)
    assert fit(model, spoiled)["skipped_steps"] == [1]
    assert counters(model.optimizer) == [BATCHES - 1, 1, 0, 1, 0]


def step_of(model, optimizer, **options):
    mpkeras.apply_policy(model, "mixed_float16")
    return mpkeras.make_train_step(model, optimizer, "mse", **{"jit_compile": False, **options})


@pytest.mark.slow
def test_a_batch_without_rows_is_skipped_and_the_next_one_taken_again():
    step = step_of(dense(4)(), keras.optimizers.Adam(0.02))
    assert bool(step(X[:0], Y[:0])["skipped"]) and float(step(X[:0], Y[:0])["loss_scale"]) == 2.0**15
    assert not bool(step(X[:BATCH], Y[:BATCH])["skipped"])


def first_batch_is_skipped(model, scale):
    return fit(model, X[:BATCH], Y[:BATCH])["skipped_steps"] == [1] and number(model.optimizer.loss_scale) == scale


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:All 1 steps of epoch 1 were skipped")
def test_what_is_no_first_step_or_cannot_be_taken_again_is_as_ever():
    assert first_batch_is_skipped(prepared(loss_scale=2.0**15, **EAGER), 2.0**15)
    assert first_batch_is_skipped(prepared(rollback=False, **EAGER), 2.0**14)
    model = prepared(**EAGER)
    fit(model, X[:BATCH], 0 * Y[:BATCH])
    model.optimizer.dynamic_scale.assign(2.0**15)
    model.make_train_function(force=True)
    assert first_batch_is_skipped(model, 2.0**14)
    # A scale that somebody has restored, and that no step has counted at.
    model = prepared(**EAGER)
    model.optimizer.build(model.trainable_variables)
    model.optimizer.dynamic_scale.assign(2.0**13)
    assert first_batch_is_skipped(model, 2.0**12)
    # One at which a step has counted, whose rule is back where it began after each step.
    rule = DynamicLossScale(2.0**15, dynamic_growth_steps=1, max_scale=2.0**15)
    model = prepared(loss_scale=rule, **EAGER)
    fit(model, X[:BATCH], 0 * Y[:BATCH])
    model.optimizer.dynamic_scale.assign(2.0**15)
    model.make_train_function(force=True)
    assert first_batch_is_skipped(model, 2.0**14)


@pytest.mark.slow
def test_steps_that_counted_without_a_scale_leave_it_a_guess(tmp_path):
    """In float32, before `prepare` or in a file; or they are set by hand for a schedule that goes on."""
    model = everything()
    model.compile(keras.optimizers.Adam(0.02), "mse", **EAGER)
    fit(model)
    model.save_weights(tmp_path / "float32.weights.h5")
    from_file = prepared(**EAGER)
    from_file.optimizer.build(from_file.trainable_variables)
    from_file.load_weights(tmp_path / "float32.weights.h5")
    for going_on in (mpkeras.prepare(model, "mixed_float16"), from_file):
        assert fit(going_on)["skipped_steps"] == [0]
        assert counters(going_on.optimizer) == [2 * BATCHES, 0, 0, 0, 0]
    step = step_of(everything(), keras.optimizers.SGD(1e-6))
    step.optimizer.build(step.model.trainable_variables)
    step.optimizer.iterations.assign(90_000)
    assert not any(bool(step(X[i : i + BATCH], Y[i : i + BATCH])["skipped"]) for i in range(0, len(X), BATCH))
    assert int(step.optimizer.iterations) == 90_000 + BATCHES


@keras.saving.register_keras_serializable("tests")
class NoGradient(layers.Layer):
    """Its gradient is infinity times 0 for rows that begin with a negative number, whatever the scale."""

    def call(self, x):
        first = x[:, :1]
        return x + ops.sqrt(first * ops.cast(first > 0, x.dtype))


POSITIVE = np.abs(X)


def incurable():
    return model_of(layers.Dense(4, kernel_initializer="ones"), NoGradient(), layers.Dense(1))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:All 3 steps of epoch 1 were skipped", "ignore:.*its lowest")
def test_a_batch_that_no_scale_cures_is_skipped_and_the_next_one_taken_again():
    model = prepared(incurable(), metrics=None, **EAGER)
    history = fit(model, -POSITIVE[: 3 * BATCH], Y[: 3 * BATCH])
    assert counters(model.optimizer) == [0, 3, 3, 0, 1]
    assert history["skipped_steps"] == [3] and history["loss_scale"] == [2.0**12]
    assert np.isfinite(history["loss"][0])
    x = np.concatenate([-POSITIVE[:BATCH], POSITIVE[: 2 * BATCH]])
    for set_by_hand in (0, 500):
        model = prepared(incurable(), metrics=None, **EAGER)
        model.optimizer.build(model.trainable_variables)
        model.optimizer.iterations.assign(set_by_hand)
        assert fit(model, x, Y[: 3 * BATCH])["skipped_steps"] == [1]
        assert counters(model.optimizer) == [set_by_hand + 2, 1, 0, 0, 0]


@pytest.mark.slow
def test_training_that_stands_still_is_told_at_once():
    model = incurable()
    model.compile("sgd", "mse", **EAGER)
    with pytest.raises(FloatingPointError, match="2 steps in a row were skipped at every loss scale down to its"):
        fit(model, -POSITIVE, callbacks=[MixedPrecision("mixed_float16", on_min_scale="raise")])
    assert counters(model.optimizer)[1] == 2
    with pytest.warns(UserWarning, match="All 4 steps of epoch 1 were skipped"):
        with pytest.warns(UserWarning, match="at every loss scale"):
            fit(prepared(incurable(), **EAGER), -POSITIVE)


@pytest.mark.slow
def test_a_training_that_goes_on_from_a_file_decides_as_one_that_never_stopped(tmp_path):
    steps = [step_of(incurable(), keras.optimizers.SGD(1e-6)) for _ in range(2)]
    assert bool(steps[0](-POSITIVE[:BATCH], Y[:BATCH])["skipped"])
    np.savez(tmp_path / "state.npz", **steps[0].state_dict())
    with np.load(tmp_path / "state.npz") as state:
        steps[1].load_state_dict(state)
    for step in steps:
        assert not bool(step(POSITIVE[:BATCH], Y[:BATCH])["skipped"])
    states = [step.state_dict() for step in steps]
    assert all(states[0][name].tobytes() == states[1][name].tobytes() for name in states[0])


@pytest.mark.slow
@pytest.mark.parametrize("on_overflow", ["drop_micro", "drop_window"])
def test_accumulation(on_overflow):
    step = step_of(everything(), keras.optimizers.SGD(1e-4), accumulate_steps=2, on_overflow=on_overflow)
    skipped = [bool(step(X[i : i + BATCH], Y[i : i + BATCH])["skipped"]) for i in range(0, len(X), BATCH)]
    assert skipped == [False] * BATCHES
    assert counters(step.optimizer)[:2] == [BATCHES // 2, 0] and number(step.optimizer.accepted_steps) == BATCHES

    model = prepared(optimizer=keras.optimizers.SGD(1e-4, gradient_accumulation_steps=2), **EAGER)
    assert fit(model)["skipped_steps"] == [0]
    assert number(model.optimizer.accepted_steps) == BATCHES


@keras.saving.register_keras_serializable("tests")
class Thirds(mpkeras.LossScale):
    """A rule of a user's own, with a count of its own, that backs off at every second bad step."""

    def initial_state(self):
        return {"dynamic_scale": 3.0**10, "bad": 0}

    def next_state(self, state, is_finite):
        bad = ops.where(is_finite, 0, state["bad"] + 1)
        backs_off = ops.equal(bad, 2)
        scale = ops.where(backs_off, state["dynamic_scale"] / 3.0, state["dynamic_scale"])
        return {"dynamic_scale": scale, "bad": ops.where(backs_off, 0, bad)}

    def get_config(self):
        return {}


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule", [Thirds(), DynamicLossScale(2.0**20, hysteresis=3), DynamicLossScale(2.0**15, backoff_factor=0.75)]
)
def test_other_rules(rule):
    model = prepared(loss_scale=rule, **EAGER)
    assert fit(model)["skipped_steps"] == [0]
    assert counters(model.optimizer) == [BATCHES, 0, 0, 0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 2] if BACKEND != "torch" else [1])
def test_what_was_taken_again_is_no_fault(steps, tmp_path):
    box, monitor, fallback = BlackBox(tmp_path), NumericsMonitor(), Float32Fallback(patience=1)
    options = {"jit_compile": False} if BACKEND == "tensorflow" else {}
    for callbacks in ([box], [monitor], [box, monitor, fallback]):
        model = everything()
        model.compile(keras.optimizers.Adam(0.02), "mse", steps_per_execution=steps, **options)
        history = fit(model, callbacks=[MixedPrecision("mixed_float16"), *callbacks])
        assert history["skipped_steps"] == [0]
    assert (box.capsules, monitor.findings, fallback.findings, fallback.moved) == ([], [], [], [])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:All 2 steps of epoch 1 were skipped", "ignore:.*its lowest")
def test_a_capsule_of_a_first_step_is_run_once(tmp_path):
    box = BlackBox(tmp_path)
    model = incurable()
    model.compile("sgd", "mse", **EAGER)
    fit(model, -POSITIVE[: 2 * BATCH], Y[: 2 * BATCH], callbacks=[MixedPrecision("mixed_float16"), box])
    run = mpkeras.load_capsule(box.capsules[0]).run()
    assert (bool(run["skipped"]), run["loss_scale"], run["same_bits"]) == (True, 2.0**14, True)


class Divides(OfTheUsersOwn):
    def __init__(self):
        super().__init__()
        self.head = layers.Dense(3)

    def build(self, input_shape):
        self.hidden.build(input_shape)
        self.head.build((None, 8))

    def call(self, x):
        x /= 4.0  # on torch in place
        return super().call(x)


@pytest.mark.backends("torch")  # elsewhere nobody can write into a batch
@pytest.mark.parametrize("takes_again", [True, False])
@pytest.mark.filterwarnings("ignore:All 4 steps of epoch 1 were skipped", "ignore:.*was skipped")
def test_a_batch_stays_as_it_was_given_whoever_writes_into_it(takes_again, tmp_path):
    """The user's `call`, and Keras' losses: they multiply sample weights by the mask of `ignore_class`."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=2)
    # 131072 is too large for the gradients of such losses, and 65536 is, too.
    weights = RNG.uniform(1000, 3000, size=BATCH * BATCHES).astype("float32")
    data = [X, CLASSES, weights]
    model, box = Divides(), BlackBox(tmp_path)
    model.compile(keras.optimizers.SGD(0.0), loss)
    expected = [model.test_on_batch(*(array[i : i + BATCH] for array in data)) for i in range(0, len(X), BATCH)]
    rule = None if takes_again else mpkeras.FixedLossScale(2.0**16)
    mpkeras.prepare(model, "mixed_float16", loss_scale=rule)
    batches = [[ops.convert_to_tensor(array[i : i + BATCH]) for array in data] for i in range(0, len(X), BATCH)]
    history = fit(model, X, CLASSES, sample_weight=weights, callbacks=[box])
    np.testing.assert_allclose(history["loss"], [np.mean(expected)], rtol=1e-2)  # float16 in the hidden layer
    for path, batch in zip(box.capsules, batches, strict=False):
        kept = mpkeras.load_capsule(path).batch
        assert all(np.array_equal(a, ops.convert_to_numpy(b)) for a, b in zip(kept, batch, strict=True))
    assert len(box.capsules) == 0 if takes_again else len(box.capsules) > 1
    step = mpkeras.make_train_step(model, model.optimizer, loss)
    for i, batch in enumerate(batches):
        np.testing.assert_allclose(number(step(*batch)["loss"]), expected[i], rtol=1e-2)
        given = [array[i * BATCH : (i + 1) * BATCH] for array in data]
        assert all(np.array_equal(a, ops.convert_to_numpy(b)) for a, b in zip(given, batch, strict=True))


class UpdatesNothing(keras.Sequential):
    """Its steps only look at their batch, as those do that sum gradients for the update of a later one."""

    def train_step(self, *arguments):
        *state, (x, _) = arguments
        if BACKEND != "jax":
            self(x, training=True)
            return {}
        trainable, non_trainable, *others = state[0]
        _, non_trainable = self.stateless_call(trainable, non_trainable, x, training=True)
        return {}, (trainable, non_trainable, *others)


@pytest.mark.parametrize("options", first_quick(FIT_MODES))
def test_a_step_that_updates_nothing_is_run_once(options):
    normalization = layers.BatchNormalization(momentum=0.5)
    model = prepared(UpdatesNothing([keras.Input((6,)), normalization, layers.Dense(1)]), metrics=None, **options)
    fit(model, X[: 2 * BATCH], Y[: 2 * BATCH])
    first, second = X[:BATCH].mean(axis=0), X[BATCH : 2 * BATCH].mean(axis=0)
    np.testing.assert_allclose(normalization.moving_mean.numpy(), first / 4 + second / 2, rtol=1e-5, atol=1e-6)
    # Of the first attempt: gradients that such a step sums have it in them.
    assert number(model.optimizer.loss_scale) == 4 * 2.0**15


class UpdatesTwice(keras.Sequential):
    """Each step learns its targets, and then ten times its targets, with one optimizer."""

    def train_step(self, *arguments):
        *state, (x, y) = arguments
        if BACKEND == "jax":
            return self.stateless_step(*state[0], x, y)
        for factor in (1.0, 10.0):
            loss, grads = loss_and_gradients(
                lambda f=factor: ops.mean(ops.square(self(x, training=True) - f * y)),
                self.trainable_variables,
                self.optimizer.scale_loss,
            )
            with without_gradients():
                self.optimizer.apply(grads, self.trainable_variables)
        return {"last_loss": loss}

    def stateless_step(self, trainable, non_trainable, optimizer_variables, metrics_variables, x, y):
        import jax

        for factor in (1.0, 10.0):

            def loss_of(trainable, factor=factor, non_trainable=non_trainable):
                outputs, _ = self.stateless_call(trainable, non_trainable, x, training=True)
                return [ops.mean(ops.square(outputs - factor * y))]

            scaled = scaled_losses(loss_of, self.optimizer, optimizer_variables)
            (_, (loss,)), grads = jax.value_and_grad(scaled, has_aux=True)(trainable)
            trainable, optimizer_variables = self.optimizer.stateless_apply(optimizer_variables, grads, trainable)
        return {"last_loss": loss}, (trainable, non_trainable, optimizer_variables, metrics_variables)


@pytest.mark.slow
@pytest.mark.parametrize("options", FIT_MODES)
def test_a_step_that_updates_twice_loses_no_update(options):
    trained = []
    for policy in ("float32", "mixed_float16"):
        keras.utils.set_random_seed(5)
        # The gradients of the second update are ten times those of the first, which counts at a scale too large for it.
        model = UpdatesTwice([keras.Input((6,)), layers.Dense(4, "silu"), layers.Dense(1)])
        prepared(model, policy, optimizer_of("adam"), metrics=None, **options)
        fit(model)
        assert counters(model.optimizer) == [2 * BATCHES, 0, 0, 0, 0]
        trained.append(model.get_weights())
    for weights in zip(*trained, strict=True):
        np.testing.assert_allclose(*weights, rtol=0, atol=1e-4)  # of eight updates of 1e-3


class SumsByHand(keras.Sequential):
    """Each third step updates with the gradients of three, as they come: with the loss scale in them."""

    def built_with(self, optimizer, policy, **options):
        self.sums = [
            self.add_weight(shape=weight.shape, initializer="zeros", trainable=False, name=f"sum_{i}")
            for i, weight in enumerate(self.trainable_variables)
        ]
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="calls")
        return prepared(self, policy, optimizer, metrics=None, **options)

    def train_step(self, *arguments):
        *state, (x, y, *_) = arguments
        if BACKEND == "jax":
            return self.stateless_step(*state[0], x, y)
        loss, grads = loss_and_gradients(
            lambda: ops.mean(ops.square(self(x, training=True) - y)),
            self.trainable_variables,
            self.optimizer.scale_loss,
        )

        def update():
            self.optimizer.apply([total / 3 for total in self.sums], self.trainable_variables)
            for total in self.sums:
                total.assign(ops.zeros_like(total))

        with without_gradients():
            for total, grad in zip(self.sums, grads, strict=True):
                total.assign_add(grad)
            self.calls.assign_add(1)
            ops.cond(ops.equal(self.calls % 3, 0), update, lambda: None)
        return {"last_loss": loss}

    def stateless_step(self, trainable, non_trainable, optimizer_variables, metrics_variables, x, y):
        import jax

        def loss_of(trainable):
            return [ops.mean(ops.square(self.stateless_call(trainable, non_trainable, x, training=True)[0] - y))]

        scaled = scaled_losses(loss_of, self.optimizer, optimizer_variables)
        (_, (loss,)), grads = jax.value_and_grad(scaled, has_aux=True)(trainable)
        *sums, calls = non_trainable
        sums, calls = [total + grad for total, grad in zip(sums, grads, strict=True)], calls + 1

        def update(values):
            trainable, optimizer_variables, sums = values
            new = self.optimizer.stateless_apply(optimizer_variables, [total / 3 for total in sums], trainable)
            return *map(list, new), [total * 0 for total in sums]

        values = list(trainable), list(optimizer_variables), sums
        trainable, optimizer_variables, sums = jax.lax.cond(calls % 3 == 0, update, lambda values: values, values)
        return {"last_loss": loss}, (trainable, [*sums, calls], optimizer_variables, metrics_variables)


@pytest.mark.slow
@pytest.mark.parametrize("options", FIT_MODES)
def test_steps_that_sum_gradients_for_the_update_of_a_later_one_are_taken_again_with_it(options):
    trained = {}
    for policy in ("float32", "mixed_float16"):
        keras.utils.set_random_seed(5)
        model = SumsByHand([keras.Input((6,)), layers.Dense(4, "silu"), layers.Dense(1)])
        model.built_with(keras.optimizers.SGD(1e-3), policy, **options)
        # Gradients of the first batch are some times larger than those of the third one, which updates.
        fit(model, X[: 3 * BATCH], Y[: 3 * BATCH] * np.repeat([[1.0], [1.0], [1.2]], BATCH, axis=0))
        assert counters(model.optimizer) == [1, 0, 0, 0, 0]
        trained[policy] = model.get_weights()
    assert number(model.optimizer.loss_scale) < 2.0**13
    for weights in zip(*trained.values(), strict=True):
        np.testing.assert_allclose(*weights, rtol=0, atol=1e-3)  # an update of about 1


@pytest.mark.slow
def test_steps_that_sum_gradients_are_not_taken_again_where_somebody_has_written_between_them():
    """A callback that moves the learning rate at every batch, which nobody would put back."""
    model = SumsByHand([keras.Input((6,)), layers.Dense(4, "silu"), layers.Dense(1)])
    model.built_with(keras.optimizers.SGD(1e-3), "mixed_float16")
    for rate, rows in ((0.5, slice(0, 8)), (0.25, slice(8, 16)), (0.125, slice(16, 24))):
        model.optimizer.learning_rate = rate
        model.train_on_batch(*map(ops.convert_to_tensor, (X[rows], Y[rows])))
        assert float(model.optimizer.learning_rate) == rate
    assert counters(model.optimizer)[:2] == [0, 1]


@pytest.mark.slow
@pytest.mark.parametrize("options", FIT_MODES[:2])
def test_of_sums_for_a_later_update_a_batch_is_in_all_or_in_none(options):
    """In the second batch one gradient of four overflows, that of the kernel whose inputs are large."""
    x, y = (np.repeat(np.float32(rows), BATCH)[:, None] for rows in ((0.5, 8000.0, -1.0), (1.0, -2.0, 0.25)))
    model = SumsByHand([keras.Input((1,)), layers.Dense(1), layers.Dense(1)])
    model.built_with(keras.optimizers.SGD(0.125), "mixed_float16", loss_scale=64.0, **options)
    weights = np.array([2.0**-10, 0.5, 1.0, 0.25])
    for layer, (kernel, bias) in zip(model.layers, weights.reshape(2, 2), strict=True):
        layer.set_weights([np.float32([[kernel]]), np.float32([bias])])
    fit(model, x, y)
    assert counters(model.optimizer) == [1, 0, 0, 0, 0]
    # By hand, the sums of the first and the third batch.
    kernel, bias, kernel_of_head, bias_of_head = weights
    inputs, wanted = np.array([0.5, -1.0]), np.array([1.0, 0.25])
    hidden = inputs * kernel + bias
    errors = 2 * (hidden * kernel_of_head + bias_of_head - wanted)
    sums = [errors * kernel_of_head @ inputs, (errors * kernel_of_head).sum(), errors @ hidden, errors.sum()]
    trained = [number(variable) for variable in model.trainable_variables]
    np.testing.assert_allclose(np.ravel(trained), weights - 0.125 * np.array(sums) / 3, rtol=0, atol=1e-3)


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "torch")
@pytest.mark.parametrize("options", FIT_MODES[:2])
# TensorFlow's `fit` never builds a model whose step runs its parts alone.
@pytest.mark.parametrize("is_built", [False, True])
def test_of_two_optimizers_each_finds_its_scale(options, is_built):
    rng = np.random.default_rng(4)
    noise, real = rng.normal(size=(24, 6)).astype("float32"), rng.normal(size=(24, 8, 8, 1)).astype("float32")
    weight = np.full(24, 300.0, "float32")
    trained = {}
    for policy in ("float32", "mixed_float16"):
        keras.utils.set_random_seed(11)
        gan = Gan()
        gan.built = is_built
        d_optimizer = keras.optimizers.SGD(1e-4, momentum=0.5)
        gan.compile_with(d_optimizer, keras.optimizers.Adagrad(0.01, initial_accumulator_value=0.3))
        for name, value in options.items():
            setattr(gan, name, value)
        mpkeras.prepare(gan, policy)
        fit(gan, noise, real, sample_weight=weight)
        trained[policy] = gan
    d, g = (trained["mixed_float16"].optimizers[name] for name in "dg")
    assert counters(d) == counters(g) == [3, 0, 0, 0, 0]
    assert number(d.loss_scale) < number(g.loss_scale) == 2.0**15
    for weights in zip(*(gan.get_weights() for gan in trained.values()), strict=True):
        np.testing.assert_allclose(*weights, rtol=0, atol=2e-3)  # weights of 0.1 to 1; float16 has 11 bits


class MakesItsHead(keras.Model):
    """Has a layer that is built, and makes another one, large enough that a batch overflows, in its first step."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = model_of(layers.Dense(4, "relu"), layers.Dense(4)), None

    def train_step(self, data):
        x, y, *_ = map(ops.convert_to_tensor, data)
        if self.head is None:
            self.head = layers.Dense(1, kernel_initializer=keras.initializers.Constant(3.0))
            self.head.build((None, 4))
        loss, grads = loss_and_gradients(
            lambda: ops.mean(ops.square(self.head(self.hidden(x)) - y)),
            self.trainable_variables,
            self.optimizer.scale_loss,
        )
        with without_gradients():
            self.optimizer.apply(grads, self.trainable_variables)
        return {"last_loss": loss}


@pytest.mark.slow
@pytest.mark.backends("tensorflow")  # elsewhere a step makes no layers in `fit`
def test_a_layer_that_the_first_step_makes_keeps_its_weights_when_the_step_is_taken_again():
    model = MakesItsHead()
    model.compile(keras.optimizers.SGD(0.0))
    mpkeras.prepare(model, "mixed_float16")
    fit(model, X[:BATCH], Y[:BATCH])
    assert counters(model.optimizer)[:2] == [1, 0] and number(model.optimizer.loss_scale) < 2.0**12
    assert model.head.kernel.numpy().tolist() == [[3.0]] * 4


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "torch")  # JAX refuses such functions in a step
@pytest.mark.parametrize("options", FIT_MODES)
@pytest.mark.parametrize("noise", [AddsNoise, None])
def test_random_functions_without_a_seed_draw_what_they_draw_in_float32(noise, options):
    def run(policy):
        model = model_of(*[layer() for layer in (noise,) if layer], layers.Dense(4, "relu"), layers.Dense(1))
        model.compile(keras.optimizers.SGD(1e-6), "mse", **options)
        keras.utils.set_random_seed(17)
        mpkeras.prepare(model, policy)
        fit(model, X[:BATCH], 3 * Y[:BATCH])
        if policy == "mixed_float16":
            assert counters(model.optimizer)[:2] == [1, 0] and number(model.optimizer.loss_scale) < 2.0**15
        return ops.convert_to_numpy(keras.random.uniform((3,))).tolist(), random.random()

    assert run("mixed_float16") == run("float32")


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "torch")
def test_so_they_do_where_one_of_two_optimizers_finds_its_scale():
    def run(policy):
        keras.utils.set_random_seed(12)
        gan = Gan()
        gan.generator.add(AddsNoise())
        gan.compile_with(keras.optimizers.SGD(1e-4), keras.optimizers.SGD(1e-4))
        gan.run_eagerly = True
        mpkeras.prepare(gan, policy)
        rows = np.ones((BATCH, 6), "float32"), np.ones((BATCH, 8, 8, 1), "float32")
        fit(gan, *rows, sample_weight=np.full(BATCH, 400.0, "float32"))
        scales = [number(gan.optimizers[name].loss_scale) for name in "dg"]
        return ops.convert_to_numpy(keras.random.uniform((3,))).tolist(), scales

    drawn, scales = run("mixed_float16")
    assert drawn == run("float32")[0] and scales[0] < scales[1]


def weighted(policy=None):
    keras.utils.set_random_seed(0)
    model = model_of(layers.Dense(8, "selu"), layers.Dense(1))
    model.compile(keras.optimizers.AdamW(0.02), "mse", **EAGER)
    callbacks = [] if policy is None else [MixedPrecision(policy)]
    weights = np.full(len(X), 1e6, "float32")
    return fit(model, X, X[:, :1] * 2, sample_weight=weights, epochs=8, callbacks=callbacks)


@pytest.mark.slow
def test_a_scale_below_one_is_told_once_and_trains():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = weighted("mixed_float16")
    told = [str(w.message) for w in caught if "loss scale" in str(w.message)]
    assert len(told) == 1 and "has come down to" in told[0] and "mixed_bfloat16" in told[0]
    assert history["skipped_steps"][-1] == 0 and history["loss_scale"][-1] < 1
    np.testing.assert_allclose(history["loss"], weighted()["loss"], rtol=0.02)
