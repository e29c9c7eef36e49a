"""What the logs say while no step of an epoch has counted: never 0.0, which looks like a perfect loss."""

import csv

import keras
import numpy as np
import pytest
from keras import ops

import mpkeras
from mpkeras.callbacks import MixedPrecision
from mpkeras.training import metric_states
from mpkeras.training.prepare import prepare
from tests.cases import first_quick
from tests.sixteen_bits import without_outputs
from tests.step_modes import FIT_MODES
from tests.training.models import COMPILED, loss_and_gradients, scaled_losses

BACKEND = keras.backend.backend()

# With a kernel of zeros the loss is the square of the target. At a scale of 2^10 the gradient at the bias is
# 2 * target * 2^10: beyond float16, whose largest number is 65504, for targets from 32 on.
SCALE = 2.0**10
NAN = float("nan")


class BatchLogs(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.seen = []

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append({name: float(value) for name, value in logs.items()})


def zero_model(learning_rate=0.0, **options):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(learning_rate), "mse", metrics=["mae"], **options)
    return model


def data(targets, rows=4):
    """`rows` rows with each of the targets; a target of inf has finite inputs, and a loss of inf."""
    y = np.repeat(np.asarray(targets, "float32"), rows)[:, None]
    return np.ones((len(y), 3), "float32"), y


def fit(model, x, y, **options):
    logs = BatchLogs()
    callbacks = [MixedPrecision(without_outputs("mixed_float16"), loss_scale=SCALE), logs]
    history = model.fit(x, y, batch_size=4, shuffle=False, verbose=0, callbacks=callbacks, **options)
    return history.history, logs.seen


def column(logs, name):
    return [entry[name] for entry in logs]


IGNORES = pytest.mark.filterwarnings("ignore:.* steps? .*skipped:UserWarning")


@pytest.mark.slow
@IGNORES
@pytest.mark.parametrize("options", FIT_MODES)
def test_until_a_step_counts_the_losses_are_those_of_the_skipped_steps(options):
    """Their mean, the finite ones; and anew in each epoch. From the first counted step on, those that counted."""
    x, y = data([np.inf, 100.0, 200.0, 3.0, 100.0, 1.0])
    history, logs = fit(zero_model(**options), x, y, epochs=2)
    one_epoch = [np.nan, 1e4, 2.5e4, 9.0, 9.0, 5.0]
    np.testing.assert_array_equal(column(logs, "loss"), one_epoch + one_epoch)
    np.testing.assert_array_equal(column(logs, "mae"), ([np.nan] * 3 + [3.0, 3.0, 2.0]) * 2)
    assert column(logs, "skipped_steps") == [1, 2, 3, 3, 4, 4, 5, 6, 7, 7, 8, 8]
    assert history["loss"] == [5.0, 5.0] and history["mae"] == [2.0, 2.0]


@pytest.mark.slow
@IGNORES
@pytest.mark.parametrize("options", FIT_MODES)
def test_an_epoch_of_skipped_steps_reports_their_mean_by_rows(options):
    x, y = data([100.0, 200.0])
    x, y = x[:6], y[:6]
    model = zero_model(**options)
    history, _ = fit(model, x, y, epochs=2, validation_data=data([2.0]))
    assert history["loss"] == [(4 * 1e4 + 2 * 4e4) / 6] * 2
    assert np.isnan(history["mae"]).all()
    assert history["val_loss"] == [4.0, 4.0] and history["val_mae"] == [2.0, 2.0]
    assert set(history) == {"loss", "mae", "val_loss", "val_mae", "loss_scale", "skipped_steps"}
    assert [metric.name for metric in model.metrics] == ["loss", "compile_metrics"]
    assert len(model.metrics_variables) == 4


@pytest.mark.slow
@pytest.mark.parametrize("options", FIT_MODES)
def test_train_on_batch_says_what_its_own_batch_did(options):
    model = zero_model(**options)
    prepare(model, without_outputs("mixed_float16"), loss_scale=SCALE)
    losses = [model.train_on_batch(*data([target])) for target in (100.0, np.inf, 200.0, 3.0, 100.0)]
    np.testing.assert_array_equal(losses, [[1e4, np.nan], [np.nan, np.nan], [4e4, np.nan], [9.0, 3.0], [1e4, np.nan]])


@pytest.mark.slow
@IGNORES
@pytest.mark.parametrize("options", FIT_MODES)
def test_the_losses_of_several_outputs_are_shown_each(options):
    inputs = keras.Input((3,))
    outputs = {name: keras.layers.Dense(1, kernel_initializer="zeros", name=name)(inputs) for name in "ab"}
    model = keras.Model(inputs, outputs)
    model.compile(keras.optimizers.SGD(0.0), {"a": "mse", "b": "mae"}, **options)
    x, y = data([100.0, 100.0, 3.0])
    _, logs = fit(model, x, {"a": y, "b": y})
    assert column(logs, "loss") == [10100.0, 10100.0, 12.0]
    assert column(logs, "a_loss") == [1e4, 1e4, 9.0]
    assert column(logs, "b_loss") == [100.0, 100.0, 3.0]


class Seen(keras.metrics.Metric):
    """Keeps the targets in a list of Python, as metrics around other libraries do, and counts steps in a variable."""

    def __init__(self, counts_steps):
        super().__init__(name="seen")
        self.targets = []
        self.steps = self.add_weight(name="steps", initializer="zeros") if counts_steps else None

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.targets.append(ops.max(y_true))
        if self.steps is not None:
            self.steps.assign(self.steps + 1)

    def result(self):
        steps = ops.convert_to_tensor(0.0 if self.steps is None else self.steps)
        # An error for an empty list.
        largest = ops.max(ops.stack(self.targets))
        return {"seen": ops.convert_to_tensor(float(len(self.targets))), "steps": steps, "largest": largest}

    def reset_state(self):
        self.targets.clear()
        if self.steps is not None:
            self.steps.assign(0)


@pytest.mark.slow
@IGNORES
@pytest.mark.parametrize("counts_steps", first_quick([False, True]))
def test_what_a_metric_keeps_in_python_is_not_emptied_by_a_step(counts_steps):
    """A list of Python holds what a skipped step has put there, unless no step had counted; a variable does not."""
    model = zero_model()
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[Seen(counts_steps)], run_eagerly=True)
    history, logs = fit(model, *data([90.0, 7.0, 300.0, 6.0]), epochs=2)
    np.testing.assert_array_equal(column(logs, "seen"), [np.nan, 1, 2, 3] * 2)
    np.testing.assert_array_equal(column(logs, "steps"), [np.nan, *([1, 1, 2] if counts_steps else [0] * 3)] * 2)
    np.testing.assert_array_equal(column(logs, "largest"), [np.nan, 7, 300, 300] * 2)
    assert column(logs, "skipped_steps") == [1, 1, 2, 2, 3, 3, 4, 4] and history["seen"] == [3, 3]


class SinceTheStart(keras.metrics.Metric):
    """Counts rows: those of the epoch, all since training began, and the most of an epoch, which a reset looks up."""

    def __init__(self):
        super().__init__(name="rows")
        self.rows = self.add_weight(name="rows", initializer="zeros")
        self.all_rows = self.add_variable((), "zeros", name="all_rows")
        self.most_rows = self.add_variable((), "zeros", name="most_rows")

    def update_state(self, y_true, y_pred, sample_weight=None):
        count = ops.cast(ops.shape(y_true)[0], "float32")
        self.rows.assign_add(count)
        self.all_rows.assign_add(count)

    def result(self):
        return {name: ops.convert_to_tensor(getattr(self, name)) for name in ("rows", "all_rows", "most_rows")}

    def reset_state(self):
        self.most_rows.assign(ops.maximum(self.most_rows, self.rows))
        self.rows.assign(0)


@pytest.mark.slow
@IGNORES
@pytest.mark.parametrize("options", FIT_MODES)
def test_what_a_reset_leaves_alone_goes_on_from_epoch_to_epoch(options):
    model = zero_model()
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[SinceTheStart()], **options)
    history, logs = fit(model, *data([7.0, 90.0, 300.0, 6.0, 5.0]), epochs=2)
    assert column(logs, "rows") == [4, 4, 4, 8, 12] * 2
    assert column(logs, "all_rows") == [4, 4, 4, 8, 12, 16, 16, 16, 20, 24]
    assert (history["rows"], history["all_rows"], history["most_rows"]) == ([12, 12], [12, 24], [0, 12])


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
@IGNORES
@pytest.mark.parametrize("options", [{"jit_compile": True}, {"jit_compile": False}, {"run_eagerly": True}])
def test_a_variable_of_tensorflow_in_a_metric_is_that_of_a_run_without_the_skipped_steps(options):
    import tensorflow as tf

    class Total(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="total")
            self.native = tf.Variable(0.0)

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.native.assign_add(tf.reduce_sum(y_true))

        def result(self):
            return tf.identity(self.native)

        def reset_state(self):
            self.native.assign(0.0)

    model = zero_model()
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[Total()], **options)
    history, logs = fit(model, *data([7.0, 300.0, np.inf, 6.0, 1.0]), epochs=2)
    assert column(logs, "total") == [28, 28, 28, 52, 56] * 2 and history["total"] == [56, 56]


@pytest.mark.slow
@IGNORES
def test_callbacks_that_look_at_the_loss_do_not_take_nothing_learned_for_the_best(tmp_path):
    """Two epochs of skipped steps show a loss of 1e4, that of the untrained model; then the scale fits."""
    model = zero_model(0.1)
    best, log = tmp_path / "best.weights.h5", tmp_path / "log.csv"
    callbacks = [
        MixedPrecision(without_outputs("mixed_float16"), loss_scale=mpkeras.DynamicLossScale(2.0**10)),
        keras.callbacks.ModelCheckpoint(best, monitor="loss", save_best_only=True, save_weights_only=True),
        keras.callbacks.EarlyStopping(monitor="loss", patience=4, restore_best_weights=True),
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.CSVLogger(log),
    ]
    # A step that counts and moves nothing: behind it no batch is taken again.
    model.fit(*data([0.0]), verbose=0, callbacks=callbacks[:1])
    # The gradient at the bias, -200, overflows at scales of 2^10 and 2^9.
    x, y = data([100.0])
    history = model.fit(x, y, epochs=6, verbose=0, callbacks=callbacks).history
    assert history["skipped_steps"][:3] == [1, 2, 2] and len(history["loss"]) == 6
    assert history["loss"][:3] == [1e4, 1e4, 1e4]
    assert history["loss"][-1] == min(history["loss"]) < 1e3
    with log.open() as file:
        assert [float(row["loss"]) for row in csv.DictReader(file)] == history["loss"]
    trained = model.get_weights()
    assert np.abs(trained[0]).min() > 1
    model.load_weights(best)
    for saved, weight in zip(model.get_weights(), trained, strict=True):
        assert np.array_equal(saved, weight)


class OwnStep(keras.Model):
    """Its train step, as guides write it, keeps trackers of its own; `train_step` is that of the backend."""

    def __init__(self, returns):
        super().__init__()
        self.returns = returns
        self.dense = keras.layers.Dense(1, kernel_initializer="zeros")
        self.total = keras.metrics.Mean(name="total")
        self.penalty = keras.metrics.Mean(name="penalty")
        self.largest = keras.metrics.Sum(name="largest")
        self.dense.build((None, 3))

    def call(self, x):
        return self.dense(x)

    def losses_of(self, x, y):
        error = keras.ops.mean((keras.ops.cast(self(x), "float32") - y) ** 2)
        return error, 0.5 * error

    def logs(self, error, penalty):
        self.total.update_state(error + penalty)
        self.penalty.update_state(penalty)
        self.largest.update_state(error)
        if self.returns == "results":
            return self.get_metrics_result()
        if self.returns == "each":
            given_to_compile = next(metric for metric in self.metrics if metric.name == "compile_metrics")
            given_to_compile.update_state(ops.zeros((1, 1)), ops.reshape(error, (1, 1)))
            return {metric.name: metric.result() for metric in self.metrics}
        return {"total": self.total.result(), "largest": self.largest.result(), "error": error, "seven": 7}

    def stateless_step(self, state, data):
        import jax

        trainable, non_trainable, optimizer_values, metric_values = state

        def losses_of(trainable):
            with keras.StatelessScope(list(zip(self.trainable_variables, trainable, strict=True))):
                return self.losses_of(*data[:2])

        grad = jax.grad(scaled_losses(losses_of, self.optimizer, optimizer_values), has_aux=True)
        grads, losses = grad(trainable)
        trainable, optimizer_values = self.optimizer.stateless_apply(optimizer_values, grads, trainable)
        with keras.StatelessScope(list(zip(self.metrics_variables, metric_values, strict=True))) as scope:
            logs = self.logs(*losses)
        metric_values = [scope.get_current_value(v) for v in self.metrics_variables]
        return logs, (trainable, non_trainable, optimizer_values, metric_values)

    def step(self, data):
        error, grads = loss_and_gradients(
            lambda: self.losses_of(*data[:2])[0],
            self.trainable_variables,
            lambda error: self.optimizer.scale_loss(1.5 * error),
        )
        self.optimizer.apply(grads, self.trainable_variables)
        return self.logs(error, 0.5 * error)

    train_step = stateless_step if BACKEND == "jax" else step


@pytest.mark.slow
@IGNORES
@pytest.mark.parametrize("options", FIT_MODES)
@pytest.mark.parametrize("returns", ["results", "some"])
def test_trackers_of_a_users_own_step_show_the_losses_of_skipped_steps(returns, options):
    """All that `get_metrics_result` says, or some of it among other entries, which are reported as they are."""
    model = OwnStep(returns)
    model.compile(keras.optimizers.SGD(0.0), **options)
    _, logs = fit(model, *data([100.0, np.inf, 200.0, 2.0, 100.0]))
    assert column(logs, "total") == [1.5e4, 1.5e4, 3.75e4, 6.0, 6.0]
    np.testing.assert_array_equal(column(logs, "largest"), [np.nan] * 3 + [4.0, 4.0])
    if returns == "results":
        assert column(logs, "penalty") == [0.5e4, 0.5e4, 1.25e4, 2.0, 2.0]
    else:
        assert column(logs, "error") == [1e4, np.inf, 4e4, 4.0, 1e4]
        assert column(logs, "seven") == [7] * 5


@pytest.mark.slow
@IGNORES
@pytest.mark.parametrize(
    ("is_decorated", "options"),
    [
        *(pytest.param(False, *mode.values, id=mode.id) for mode in FIT_MODES),
        pytest.param(True, {"jit_compile": False}, id="a tf.function", marks=pytest.mark.backends("tensorflow")),
    ],
)
def test_what_each_of_the_metrics_says_is_that_of_a_run_without_the_skipped_steps(is_decorated, options):
    """As the guides of Keras report metrics: those that were given to `compile` say theirs in one dictionary."""
    step = OwnStep.train_step
    if is_decorated:
        import tensorflow as tf

        # Keras makes the metrics in this function: the one around it, with the guard, makes none.
        step = tf.function(step)
    model = type("DecoratedStep", (OwnStep,), {"train_step": step})("each")
    model.compile(keras.optimizers.SGD(0.0), metrics=["mae"], **options)
    history, logs = fit(model, *data([100.0, 2.0, np.inf, 4.0, 200.0]))
    np.testing.assert_array_equal(column(logs, "mae"), [np.nan, 4.0, 4.0, 10.0, 10.0])
    assert history["mae"] == [10.0] and history["largest"] == [20.0]


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", COMPILED)
def test_metrics_of_make_train_step_are_nan_until_a_step_counts(jit_compile):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    metrics = [keras.metrics.MeanAbsoluteError(name="mae"), keras.metrics.RootMeanSquaredError(name="rmse")]
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.0), loss_scale=SCALE)
    mpkeras.apply_policy(model, without_outputs("mixed_float16"))
    step = mpkeras.make_train_step(model, optimizer, "mse", metrics=metrics, jit_compile=jit_compile)
    results = [step(*data([target])) for target in (100.0, np.inf, 3.0, 100.0)]
    metrics[0].reset_state()
    metrics[1].reset_state()
    results += [step(*data([target])) for target in (200.0, 5.0)]
    for name, expected in (
        ("loss", [1e4, np.inf, 9.0, 1e4, 4e4, 25.0]),
        ("mae", [np.nan, np.nan, 3.0, 3.0, np.nan, 5.0]),
        ("rmse", [np.nan, np.nan, 3.0, 3.0, np.nan, 5.0]),
    ):
        np.testing.assert_array_equal([float(result[name]) for result in results], expected)
    assert [bool(result["skipped"]) for result in results] == [True, True, False, True, True, False]


@pytest.mark.parametrize(
    ("counts", "last_mae", "expected"),
    [
        pytest.param((2.0,), 7.0, {"loss_0": 3.0, "mae": 0.5}, id="it has counted"),
        pytest.param((0.0,), 7.0, {"loss_0": 9.0, "mae": 0.5}, id="a tracker that the step never updates"),
        pytest.param((0.0,), NAN, {"loss_0": 9.0, "mae": NAN}, id="nothing has counted, as the step says"),
        pytest.param((-2.0,), 7.0, {"loss_0": 3.0, "mae": 7.0}, id="nothing has counted, as the tracker says"),
        pytest.param((-2.0, 2.0), 7.0, {"loss_0": 3.0, "loss_1": 3.0, "mae": 0.5}, id="one of two has counted"),
    ],
)
def test_the_log_of_an_epoch_is_what_a_metric_says_that_has_counted(counts, last_mae, expected):
    metrics = [keras.metrics.Mean(name=f"loss_{i}") for i in range(len(counts))]
    for tracker, count in zip(metrics, counts, strict=True):
        tracker.total.assign(3.0 * count)
        tracker.count.assign(count)
    metrics.append(keras.metrics.MeanAbsoluteError(name="mae"))
    results = dict.fromkeys(expected, 3.0) | {"mae": 0.5}
    said = metric_states.of_epoch(metrics, results, dict.fromkeys(expected, 9.0) | {"mae": last_mae})
    assert said == pytest.approx(expected, nan_ok=True)


class ListedTwice(keras.Sequential):
    """A model whose author lists a metric that Keras lists, too."""

    def __init__(self, *args):
        super().__init__(*args)
        self.height = keras.metrics.Mean(name="height")

    @property
    def metrics(self):
        return [*super().metrics, self.height]

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        self.height.update_state(y)
        return super().compute_loss(x, y, y_pred, sample_weight, training)


@pytest.mark.slow
def test_a_metric_that_is_listed_twice_is_put_back():
    def trained(targets):
        model = ListedTwice([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
        assert [id(metric) for metric in model.metrics].count(id(model.height)) == 2
        model.compile(keras.optimizers.SGD(0.0), "mse")
        mpkeras.prepare(model, "mixed_float16")
        return model.fit(*data(targets), batch_size=4, shuffle=False, verbose=0).history

    assert trained([1.0, 5.0])["height"] == [3.0]
    with pytest.warns(UserWarning, match="1 of 3 steps skipped"):
        history = trained([1.0, float("inf"), 5.0])
    assert history["height"] == [3.0] and history["skipped_steps"] == [1.0]
