"""`make_train_step`: against hand-worked numbers, against `fit` of stock Keras in float32, and without the fault."""

import inspect

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.policies.policy import accumulating
from mpkeras.training.step import make_train_step
from tests.cases import first_quick
from tests.step_modes import snapshot
from tests.training.models import BACKEND, COMPILED, GRAPH_FIRST, dropout_model, number, spoiled

rng = np.random.default_rng(3)
X = rng.normal(size=(8, 4, 6)).astype("float32")
Y = rng.normal(size=(8, 4, 2)).astype("float32")


def linear(weights=((1.0,), (2.0,)), **options):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False, **options)])
    model.set_weights([np.array(weights, "float32")])
    return model


@pytest.mark.parametrize("jit_compile", first_quick(GRAPH_FIRST))
def test_one_step_by_hand(jit_compile):
    """y = 1 x1 + 2 x2 for (1, 1) and (2, 0), targets 1 and 4: errors 2 and -2, gradient mean(2 e x)."""
    model = linear()
    step = make_train_step(model, keras.optimizers.SGD(0.5), "mse", metrics=None, jit_compile=jit_compile)
    x, y = np.array([[1.0, 1.0], [2.0, 0.0]]), np.array([[1.0], [4.0]])
    result = step(x, y)
    assert set(result) == {"loss", "loss_scale", "skipped"}
    assert (number(result["loss"]), number(result["loss"]).dtype) == (4.0, "float32")
    assert (number(result["loss_scale"]), number(result["skipped"])) == (1.0, False)
    # gradient: (2*2*1 - 2*2*2) / 2 = -2 and (2*2*1) / 2 = 2
    np.testing.assert_allclose(model.get_weights()[0], [[2.0], [1.0]])


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", COMPILED)
@pytest.mark.parametrize(
    "loss_fn",
    [
        pytest.param(keras.losses.MeanSquaredError(), id="Loss"),
        pytest.param("mean_squared_error", id="name"),
        pytest.param(lambda y, y_pred: keras.ops.square(y - y_pred)[:, 0], id="one loss an example"),
    ],
)
def test_sample_weights_and_metrics_by_hand(loss_fn, jit_compile):
    model = linear()
    metric = keras.metrics.MeanAbsoluteError(name="mae")
    step = make_train_step(model, keras.optimizers.SGD(0.5), loss_fn, jit_compile=jit_compile, metrics=metric)
    x, y = np.array([[1.0, 1.0], [2.0, 0.0]], "float32"), np.array([[1.0], [4.0]], "float32")
    result = step(x, y, np.array([1.0, 3.0]))
    assert number(result["loss"]) == (1 * 4.0 + 3 * 4.0) / 2
    assert number(result["mae"]) == 2.0
    np.testing.assert_allclose(model.get_weights()[0], [[1.0 + 5.0], [2.0 - 1.0]])
    # over both steps, until the loop resets it
    result = step(x, model.predict(x, verbose=0), np.array([1.0, 1.0]))
    np.testing.assert_allclose(number(result["mae"]), 4 * 2.0 / 6, rtol=1e-6)


@pytest.mark.parametrize("jit_compile", first_quick(GRAPH_FIRST))
def test_the_models_own_losses_are_trained(jit_compile):
    model = linear(kernel_regularizer=keras.regularizers.L2(0.5))
    step = make_train_step(model, keras.optimizers.SGD(0.5), None, jit_compile=jit_compile)
    result = step(np.ones((2, 2), "float32"))
    assert number(result["loss"]) == 0.5 * (1 + 4)
    np.testing.assert_allclose(model.get_weights()[0], [[0.5], [1.0]])


class Following(keras.losses.Loss):
    """Follows the mean of what it returns."""

    def __init__(self):
        super().__init__()
        self.mean = keras.Variable(0.5, trainable=False)

    def call(self, y, y_pred):
        losses = keras.ops.mean(keras.ops.abs(y - y_pred), axis=-1)
        self.mean.assign(0.75 * self.mean + 0.25 * keras.ops.mean(losses))
        return losses


@pytest.mark.parametrize("is_method", [False, True], ids=["Loss", "method"])
@pytest.mark.parametrize("jit_compile", first_quick(GRAPH_FIRST))
def test_a_skipped_step_leaves_no_trace_in_what_a_loss_holds(jit_compile, is_method):
    loss = Following()
    given = loss.call if is_method else loss
    step = make_train_step(linear(), keras.optimizers.SGD(0.0), given, jit_compile=jit_compile)
    x, means = np.ones((4, 2)), []
    for factor in (1.0, np.inf, 1.0):
        assert bool(number(step(factor * x, np.zeros((4, 1)))["skipped"])) == (factor == np.inf)
        means.append(float(loss.mean))
    # The error is 3.
    assert means == [1.125, 1.125, 1.59375]
    state = step.state_dict()
    loss.mean.assign(7.0)
    step.load_state_dict(state)
    assert float(loss.mean) == means[-1]


class Subclassed(keras.Model):
    def __init__(self, heads=1):
        super().__init__()
        self.hidden = keras.layers.Dense(5, activation="tanh")
        self.heads = [keras.layers.Dense(2) for _ in range(heads)]

    def call(self, x):
        x = self.hidden(x)
        return [head(x) for head in self.heads] if len(self.heads) > 1 else self.heads[0](x)


def functional():
    inputs = keras.Input((6,))
    x = keras.layers.Dense(5, activation="tanh")(inputs)
    x = keras.layers.BatchNormalization()(x)
    return keras.Model(inputs, keras.layers.Dense(2)(x))


def sequential():
    return keras.Sequential([keras.layers.Dense(5, activation="tanh"), keras.layers.Dense(2)])


def nested():
    return keras.Sequential([functional(), keras.layers.Dense(2)])


def two_in_two_out():
    a, b = keras.Input((6,), name="a"), keras.Input((6,), name="b")
    x = keras.layers.Dense(5, activation="tanh")(keras.layers.Add()([a, b]))
    return keras.Model({"a": a, "b": b}, {"p": keras.layers.Dense(2)(x), "q": keras.layers.Dense(2)(x)})


KINDS = {
    "functional": (functional, lambda i: (X[i], Y[i]), "mse"),
    "sequential, not built": (sequential, lambda i: (X[i], Y[i]), "mse"),
    "subclassed": (Subclassed, lambda i: (X[i], Y[i]), "mse"),
    "nested": (nested, lambda i: (X[i], Y[i]), "mse"),
    "list of outputs": (lambda: Subclassed(2), lambda i: (X[i], [Y[i], -Y[i]]), ["mse", "mae"]),
    "dictionaries": (
        two_in_two_out,
        lambda i: ({"a": X[i], "b": X[-1 - i]}, {"p": Y[i], "q": -Y[i]}),
        {"p": "mse", "q": "mae"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", COMPILED)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_trains_as_with_stock_keras(kind, jit_compile):
    make, batch, loss = KINDS[kind]
    models = []
    for _ in range(2):
        keras.utils.set_random_seed(5)
        models.append(make())
    step = make_train_step(models[0], keras.optimizers.Adam(0.01), loss, jit_compile=jit_compile)
    models[1].compile(keras.optimizers.Adam(0.01), loss, jit_compile=False)
    for i in range(3):
        models[1].reset_metrics()
        # The order of sums differs between programs.
        expected = models[1].train_on_batch(*batch(i), return_dict=True)["loss"]
        np.testing.assert_allclose(number(step(*batch(i))["loss"]), expected, rtol=1e-5)
    for a, b in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)


def keras_optimizers():
    left_out = ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")
    classes = [c for c in vars(keras.optimizers).values() if inspect.isclass(c) and c.__name__ not in left_out]
    return sorted({c for c in classes if issubclass(c, keras.optimizers.Optimizer)}, key=lambda c: c.__name__)


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", COMPILED[:1])
@pytest.mark.parametrize("make", keras_optimizers(), ids=lambda c: c.__name__)
def test_every_optimizer_trains_as_with_stock_keras(make, jit_compile):
    def run(with_our_step):
        keras.utils.set_random_seed(5)
        model = functional()
        options = {"use_ema": True, "ema_momentum": 0.5} if make is keras.optimizers.SGD else {}
        optimizer = make(learning_rate=0.01, **options)
        if with_our_step:
            # Powers of two scale without rounding.
            optimizer = mpkeras.LossScaleOptimizer(optimizer, loss_scale=2.0**10)
            step = make_train_step(model, optimizer, "mse", jit_compile=jit_compile)
            for i in range(4):
                step(spoiled(X[5]), Y[5]) if i == 2 else step(X[i], Y[i])
        else:
            # Built in the first trace, as stock Keras would, ScheduleFreeAdamW starts from zeros on TensorFlow.
            optimizer.build(model.trainable_variables)
            model.compile(optimizer, "mse", jit_compile=False)
            for i in (0, 1, 3):
                model.train_on_batch(X[i], Y[i])
        return model.get_weights()

    try:
        expected = run(False)
    except AttributeError as error:
        pytest.skip(f"stock Keras {keras.version()} cannot: {error}")
    for a, b in zip(run(True), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-5)


@pytest.mark.parametrize("jit_compile", first_quick(GRAPH_FIRST))
def test_without_rollback_a_float32_model_is_not_checked(jit_compile):
    model = linear()
    optimizer = keras.optimizers.SGD(0.5)
    step = make_train_step(model, optimizer, "mse", jit_compile=jit_compile, rollback=False)
    assert step.optimizer is optimizer
    result = step(np.full((2, 2), np.inf, "float32"), np.ones((2, 1), "float32"))
    assert not np.isfinite(model.get_weights()[0]).all()
    assert (number(result["skipped"]), number(result["loss_scale"])) == (False, 1.0)


@pytest.mark.parametrize("jit_compile", first_quick(GRAPH_FIRST))
def test_the_scale_is_never_baked_in(jit_compile):
    """P24: with growth at every third step, the effective gradient is the true one at each of 12 steps."""
    model = linear(((0.0,), (0.0,)))
    rule = mpkeras.DynamicLossScale(4.0, dynamic_growth_steps=3)
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(1.0), loss_scale=rule)
    # a loss linear in the weights: its gradient is 1 at every step
    step = make_train_step(model, optimizer, lambda y, y_pred: y_pred[:, 0], jit_compile=jit_compile)
    seen = []
    for _ in range(12):
        before = model.get_weights()[0][0, 0]
        scale = number(step(np.array([[1.0, 0.0]]), np.zeros((1, 1)))["loss_scale"])
        seen.append((float(before - model.get_weights()[0][0, 0]), float(scale)))
    assert seen == [(1.0, 4.0 * 2.0 ** ((i + 1) // 3)) for i in range(12)]


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", COMPILED)
@pytest.mark.parametrize("on_overflow", ["drop_micro", "drop_window"])
@pytest.mark.parametrize("fault", ["loss", "gradient"])
def test_accumulation(fault, on_overflow, jit_compile):
    """P14: three batches to an update, the second of the second window spoiled."""

    def run(batches, steps):
        with mpkeras.policy_scope("mixed_float16"):
            model = dropout_model()
        optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=2.0**8)
        step = make_train_step(
            model, optimizer, "mse", jit_compile=jit_compile, accumulate_steps=steps, on_overflow=on_overflow
        )
        scales = [float(number(step(x, y)["loss_scale"])) for x, y in batches]
        return model, step.optimizer, scales

    bad = (spoiled(X[7]), Y[7]) if fault == "loss" else (X[7], Y[7] + 1e4)
    batches = [(X[i], Y[i]) for i in range(4)] + [bad] + [(X[5], Y[5])]
    model, optimizer, scales = run(batches, 3)
    assert scales == [256.0] * 5 + [256.0 if fault == "loss" else 128.0]
    assert (int(optimizer.skipped_steps), int(optimizer.accepted_steps)) == (1, 5)
    assert int(optimizer.iterations) == (2 if on_overflow == "drop_micro" else 1)
    # The batches before and after it were good: their statistics and random numbers count.
    others, _, _ = run([*batches[:4], batches[5]], 3)
    assert snapshot(model.non_trainable_variables) == snapshot(others.non_trainable_variables)


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", COMPILED)
def test_one_optimizer_in_two_steps_accumulates_in_both(jit_compile):
    """G16: the second step goes on where the first one stopped, scaled and accumulated in the same way."""
    optimizer = keras.optimizers.SGD(0.25, gradient_accumulation_steps=2, loss_scale_factor=8.0)
    model = linear()
    x, y = np.array([[1.0, 1.0], [2.0, 0.0]]), np.array([[1.0], [4.0]])
    for expected in ([[1.5], [1.5]], [[1.5], [1.0]]):
        step = make_train_step(model, optimizer, "mse", jit_compile=jit_compile)
        before = model.get_weights()[0].tolist()
        assert number(step(x, y)["loss_scale"]) == 8.0
        assert model.get_weights()[0].tolist() == before
        step(x, y)
        np.testing.assert_allclose(model.get_weights()[0], expected)
    assert (optimizer.gradient_accumulation_steps, optimizer.loss_scale_factor) == (2, 8.0)


def test_arrays_read_before_a_step_and_two_variables_of_one_array_stay_what_they_were():
    """JAX donates the buffers of the state; an array read from them is the reader's own."""
    model = linear()
    model.extra = first, second = [keras.Variable(np.ones(3), trainable=False) for _ in range(2)]
    second.assign(first.value)
    step = make_train_step(model, keras.optimizers.SGD(0.5), "mse", jit_compile=BACKEND == "jax")
    step(np.ones((2, 2)), np.ones((2, 1)))
    weights = model.layers[0].get_weights()[0]
    kept = weights.copy()
    step(np.ones((2, 2)), np.zeros((2, 1)))
    np.testing.assert_array_equal(weights, kept)
    assert not np.array_equal(model.layers[0].get_weights()[0], kept)
    np.testing.assert_array_equal(number(second.value), [1.0, 1.0, 1.0])


@pytest.mark.slow
@pytest.mark.parametrize("rollback", [True, False])
@pytest.mark.parametrize("jit_compile", COMPILED)
def test_results_kept_from_a_step_stay_what_they_were(jit_compile, rollback):
    class Count(keras.metrics.Metric):
        def __init__(self):
            super().__init__(name="count")
            self.examples = self.add_variable((), "zeros", name="examples")

        def update_state(self, y, y_pred, sample_weight=None):
            self.examples.assign_add(float(y.shape[0]))

        def result(self):
            return keras.ops.cast(self.examples, "float32")

    metrics = [Count()]
    step = make_train_step(
        linear(dtype="mixed_float16"), "sgd", "mse", metrics=metrics, jit_compile=jit_compile, rollback=rollback
    )
    # Without an error the gradients are 0, and overflow at no scale.
    x, y = np.ones((4, 2), "float32"), np.full((4, 1), 3.0, "float32")
    results = [step(batch, y) for batch in (x * np.inf, x, x * np.inf)]
    assert [bool(number(result["skipped"])) for result in results] == [True, False, True]
    # Where nothing has counted yet, a metric is NaN, not 0.
    counted = [np.nan, 4.0, 4.0] if rollback else [4.0, 8.0, 12.0]
    np.testing.assert_array_equal([float(number(result["count"])) for result in results], counted)


class Late(keras.layers.Layer):
    """Makes its layer in `build`, as Keras' own composite layers do."""

    def __init__(self, units, **options):
        super().__init__()
        self.made_with = {"units": units, **options}

    def build(self, input_shape):
        self.inner = keras.layers.Dense(**self.made_with)
        self.inner.build(input_shape)

    def call(self, x):
        return self.inner(x)


@pytest.mark.parametrize("jit_compile", first_quick(GRAPH_FIRST))
def test_a_layer_that_appears_while_building_is_scaled_too(jit_compile):
    """P18."""
    model = keras.Sequential([Late(2, dtype="mixed_float16"), keras.layers.Dense(2)])
    step = make_train_step(model, "sgd", "mse", jit_compile=jit_compile)
    assert not step.optimizer.dynamic
    assert not number(step(X[0], Y[0])["skipped"])
    assert step.optimizer.dynamic
    assert 2.0**8 < float(number(step.optimizer.loss_scale)) <= 2.0**15
    assert model.layers[0].inner.compute_dtype == "float16"


# Finds some of the labels, and of each another share.
KERNEL_OF_F1 = np.eye(6, 2, -3, dtype="float32")


@pytest.mark.parametrize("jit_compile", first_quick(GRAPH_FIRST))
def test_metrics_that_make_their_variables_late(jit_compile):
    """`F1Score` all of them in its first update; `R2Score` sums for each output, beside a counter from the first on."""
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, activation="sigmoid")])
    model.layers[0].kernel.assign(KERNEL_OF_F1)
    metrics = [keras.metrics.F1Score(average="macro", threshold=0.5), keras.metrics.R2Score(class_aggregation=None)]
    step = make_train_step(model, keras.optimizers.SGD(0.0), "mse", jit_compile=jit_compile, metrics=metrics)
    y = (Y > 0).astype("float32")
    skipped, counted = step(X[1] * np.inf, y[1]), step(X[0], y[0])
    assert number(skipped["skipped"]) and not number(counted["skipped"])
    is_found, is_there = X[0] @ KERNEL_OF_F1 > 0, Y[0] > 0
    scores = [2 * (a & b).sum() / (a.sum() + b.sum()) for a, b in zip(is_found.T, is_there.T, strict=True)]
    assert 0 < min(scores) < max(scores)
    np.testing.assert_allclose(number(counted["f1_score"]), np.mean(scores), rtol=1e-6)  # float32
    residuals = ((y[0] - 1 / (1 + np.exp(-X[0] @ KERNEL_OF_F1))) ** 2).sum(axis=0)
    expected = 1 - residuals / ((y[0] - y[0].mean(axis=0)) ** 2).sum(axis=0)
    np.testing.assert_allclose(number(counted["r2_score"]), expected, rtol=1e-4)  # float32 sums


def test_optimizers_by_name_and_stock_loss_scale_optimizers():
    with mpkeras.policy_scope("mixed_float16"):
        model = linear()
    assert isinstance(make_train_step(model, "adam", "mse").optimizer, mpkeras.LossScaleOptimizer)
    stock = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=64.0)
    step = make_train_step(model, stock, "mse")
    assert isinstance(step.optimizer, mpkeras.LossScaleOptimizer)
    assert step.optimizer.initial_scale == 64.0
    ours = mpkeras.LossScaleOptimizer("sgd")
    assert make_train_step(model, ours, "mse").optimizer is ours


class Refusing(keras.layers.Layer):
    def __init__(self):
        super().__init__(name="refusing")
        self.supports_jit = False

    def call(self, x):
        return x


@pytest.mark.backends("tensorflow", "jax")
def test_layers_that_xla_cannot_compile():
    model = keras.Sequential([keras.Input((2,)), Refusing(), keras.layers.Dense(1)])
    with pytest.raises(ValueError, match="refusing.*Leave `jit_compile` out"):
        make_train_step(model, "sgd", "mse", jit_compile=True)
    result = make_train_step(model, "sgd", "mse")(np.ones((2, 2)), np.ones((2, 1)))
    assert not number(result["skipped"])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": "model"}, TypeError, "keras.Model"),
        ({"optimizer": 3}, TypeError, "optimizer=3"),
        ({"optimizer": {}}, ValueError, "optimizer={}.*class_name"),
        ({"loss_fn": 3}, TypeError, "loss_fn=3"),
        ({"loss_fn": keras.losses.Huber}, TypeError, "loss_fn=<class .*Huber.*Pass for example"),
        ({"loss_fn": {}}, ValueError, "at least one loss. Received: loss_fn={}"),
        ({"loss_fn": keras.losses.MeanSquaredError(reduction=None)}, ValueError, "scalar"),
        ({"jit_compile": "yes"}, TypeError, "jit_compile='yes'"),
        ({"rollback": None}, TypeError, "rollback=None"),
        ({"accumulate_steps": 0}, ValueError, "accumulate_steps=0"),
        ({"on_overflow": "x"}, ValueError, "on_overflow='x'"),
        ({"metrics": ["mae"]}, TypeError, "keras.metrics.Metric"),
        ({"metrics": "mae"}, TypeError, "Received: 'mae'"),
        ({"metrics": 3}, TypeError, "Received: 3"),
        ({"metrics": [keras.metrics.Mean(name="loss")]}, ValueError, "Rename"),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        make_train_step(**{"model": linear(), "optimizer": "sgd", "loss_fn": "mse", **arguments})


@pytest.mark.backends("jax")
@pytest.mark.parametrize("transform", ["jit", "vmap"])
def test_a_step_inside_a_traced_function_is_an_error_and_the_model_is_as_before(transform):
    jax = pytest.importorskip("jax")
    model = keras.Sequential([keras.layers.Dense(2)])
    step = mpkeras.make_train_step(model, "sgd", "mse")
    x, y = np.ones((4, 3), "float32"), np.zeros((4, 2), "float32")
    batch = (x[None], y[None]) if transform == "vmap" else (x, y)
    with pytest.raises(ValueError, match=r"under `jax.jit`.*Call the step outside"):
        getattr(jax, transform)(lambda x, y: step(x, y)["loss"])(*batch)
    assert not model.built
    assert float(step(x, y)["loss"]) > 0


def test_float16_variables_are_refused():
    """P26, P40."""
    dtype = "float16"
    built = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, dtype=dtype)])
    for model in (built, keras.Sequential([keras.layers.Dense(1, dtype=dtype)])):
        optimizer = keras.optimizers.SGD(0.1, loss_scale_factor=8.0)
        with pytest.raises(ValueError, match=f"{dtype} variables .*'mixed_{dtype}', float32_variables=True"):
            make_train_step(model, optimizer, "mse")
        assert (optimizer.loss_scale_factor, optimizer.built) == (8.0, False)
        assert model.layers[-1].dtype_policy.name == dtype


def test_losses_that_cannot_be_weighted_or_found_are_named():
    step = make_train_step(linear(), "sgd", lambda y, y_pred: keras.ops.mean(y_pred), jit_compile=False)
    with pytest.raises(ValueError, match="one loss an example"):
        step(np.ones((2, 2)), np.ones((2, 1)), np.ones(2))
    step = make_train_step(two_in_two_out(), "sgd", {"r": "mse"}, jit_compile=False)
    with pytest.raises(ValueError, match=r"\['r'\] for outputs \['p', 'q'\]"):
        step({"a": X[0], "b": X[0]}, {"p": Y[0], "q": Y[0]})
    step = make_train_step(linear(), "sgd", None, jit_compile=False)
    with pytest.raises(ValueError, match="adds no loss"):
        step(np.ones((2, 2)))
    for loss_fn in ("huber", ["huber"], keras.losses.Poisson()):
        step = make_train_step(linear(), "sgd", loss_fn, jit_compile=False)
        with pytest.raises(ValueError, match=r"targets `y`, which .*Received: y=None. Call `step\(x, y\)`"):
            step(np.ones((2, 2)))


@pytest.mark.slow
def test_a_new_step_goes_on_from_the_state_of_another(tmp_path):
    """G6, in the middle of a window, with metrics and random generators; under another global policy."""

    def make():
        with mpkeras.policy_scope("mixed_float16"):
            model = dropout_model()
        optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=2.0**8)
        metrics = [keras.metrics.MeanAbsoluteError()]
        return make_train_step(model, optimizer, "mse", accumulate_steps=2, metrics=metrics)

    def everything(step):
        return snapshot(step.model.variables + step.optimizer.variables + step.metrics[0].variables)

    batches = [(X[i], Y[i]) for i in range(4)] + [(spoiled(X[4]), Y[4]), (X[5], Y[5] + 1e4), (X[6], Y[6])]
    straight, first = make(), make()
    for x, y in [*batches, *batches]:
        straight(x, y)
    for x, y in batches:
        first(x, y)
    np.savez(tmp_path / "state.npz", **first.state_dict())
    with mpkeras.policy_scope("mixed_bfloat16"):
        second = make()
        second.load_state_dict(np.load(tmp_path / "state.npz"))
        assert everything(second) == everything(first)
        for x, y in batches:
            second(x, y)
    assert everything(second) == everything(straight)
    with pytest.raises(ValueError, match="Call it on a batch of data first"):
        make_train_step(sequential(), "sgd", "mse").state_dict()


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "torch")
def test_states_of_stateful_layers_are_in_the_state():
    """On JAX Keras does not carry them from step to step."""

    def make():
        keras.utils.set_random_seed(3)
        layers = [keras.Input(batch_shape=(4, 2, 3)), keras.layers.SimpleRNN(2, stateful=True)]
        return make_train_step(keras.Sequential(layers), "sgd", "mse", jit_compile=False)

    first, second = make(), make()
    batch = X[0].reshape(4, 2, 3), Y[0]
    first(*batch)
    second.load_state_dict(first.state_dict())
    states = [number(state.value) for state in second.model.layers[0].states]
    assert all(np.abs(state).max() > 0 for state in states)
    first(*batch)
    second(*batch)
    for a, b in zip(first.model.layers[0].states, second.model.layers[0].states, strict=True):
        np.testing.assert_array_equal(number(a.value), number(b.value))


@pytest.mark.slow
@pytest.mark.backends("torch")
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torch_compile_takes_the_same_steps():
    """The finite check and the update stay outside of what is compiled."""

    def run(jit_compile):
        keras.utils.set_random_seed(5)
        model = linear()
        optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.1), loss_scale=64.0)
        step = make_train_step(model, optimizer, "mse", jit_compile=jit_compile)
        x, y = np.array([[1.0, 1.0], [2.0, 0.0]], "float32"), np.array([[1.0], [4.0]], "float32")
        results = [step(x, y), step(x * np.nan, y), step(x, y)]
        return [bool(result["skipped"]) for result in results], model.get_weights()[0]

    (skips, weights), (expected_skips, expected) = run(True), run(False)
    assert skips == expected_skips == [False, True, False]
    np.testing.assert_allclose(weights, expected, rtol=1e-5)


# ------------------------------------------------------------------------------ float32 rules


def actor():
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(4, activation="softmax")])


def actor_with_late_head(**options):
    return keras.Sequential([keras.layers.Dense(8), Late(4, activation="softmax", **options)])


def with_whole_numbers(model):
    """Weights of which float16 arithmetic loses nothing: a difference is the head's."""
    whole = np.random.default_rng(8)
    model.set_weights([whole.integers(-2, 3, size=weight.shape).astype("float32") for weight in model.get_weights()])
    return model


WHOLE_X = np.random.default_rng(9).integers(-2, 3, size=(4, 6)).astype("float32")


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", COMPILED)
@pytest.mark.parametrize("make", [actor, actor_with_late_head])
def test_a_probability_head_built_under_the_global_policy_is_float32(make, jit_compile):
    """P4: the probabilities of an actor sum to 1 and its head learns as in float32."""
    actions = np.eye(4, dtype="float32")

    def run(policy):
        with mpkeras.policy_scope(policy):
            model = make()
            optimizer = keras.optimizers.SGD(0.25)
            if policy == "mixed_float16":
                optimizer = mpkeras.LossScaleOptimizer(optimizer, loss_scale=1024.0)
            step = make_train_step(model, optimizer, "categorical_crossentropy", jit_compile=jit_compile)
            model(WHOLE_X)
            with_whole_numbers(model)
            assert not number(step(WHOLE_X, actions)["skipped"])
        return model

    model, expected = run("mixed_float16"), run("float32")
    assert model.layers[0].compute_dtype == "float16"
    probabilities = number(model(X[0]))
    assert probabilities.dtype == "float32"
    np.testing.assert_allclose(probabilities.sum(-1), 1.0, atol=1e-6)
    kernel, bias = model.get_weights()[-2:]
    # 23 bits are lost in the order of sums only
    np.testing.assert_allclose(kernel, expected.get_weights()[-2], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(bias, expected.get_weights()[-1], rtol=1e-5, atol=1e-6)


def zoo():
    inputs = keras.Input((8,))
    x = keras.layers.Dense(64, activation="gelu")(inputs)
    x = keras.layers.LayerNormalization()(x)
    x = keras.layers.BatchNormalization()(x)
    outputs = keras.layers.Dense(5, activation="softmax", name="small")(x)
    return keras.Model(inputs, [outputs, keras.layers.Dense(100, activation="softmax", name="large")(x)])


def compute_dtypes(model):
    return [(layer.compute_dtype, layer.dtype_policy.name) for layer in model.layers]


@pytest.mark.parametrize(
    "policy",
    first_quick(["mixed_float16", "mixed_bfloat16", mpkeras.Policy("mixed_float16", keep_float32=("path:small",))]),
)
def test_layers_compute_in_what_prepare_gives_them(policy):
    with mpkeras.policy_scope(policy):
        model, twin = zoo(), zoo()
        make_train_step(model, "sgd", ["mse", "mse"])
        twin.compile("sgd", ["mse", "mse"])
        mpkeras.prepare(twin)
        assert compute_dtypes(model) == compute_dtypes(twin)
    assert {dtype for dtype, _ in compute_dtypes(model)} == {"float32", mpkeras.get_policy(policy).compute_dtype}


def test_a_float32_model_stays_what_it_is():
    """Whoever wants it converted says so: `apply_policy`."""
    model = linear()
    with mpkeras.policy_scope("mixed_float16"):
        make_train_step(model, "sgd", "mse")
    assert {layer.compute_dtype for layer in model.layers} == {"float32"}


def test_a_model_that_was_converted_keeps_the_rules_it_was_converted_by():
    """Not those of the default policy: its author has left the large head in 16 bits, and given it a scale."""
    policy = mpkeras.Policy("mixed_float16", keep_float32=("path:small",), loss_scale=64.0)
    model, twin = zoo(), zoo()
    step = make_train_step(mpkeras.apply_policy(model, policy), "sgd", ["mse", "mse"])
    twin.compile("sgd", ["mse", "mse"])
    mpkeras.prepare(twin, policy)
    rows = {layer.name.split("_")[0]: layer.compute_dtype for layer in twin.layers}
    assert {name: layer.compute_dtype for layer in model.layers if (name := layer.name.split("_")[0]) in rows} == rows
    assert rows["large"] == "float16" and rows["small"] == "float32"
    assert step.optimizer.loss_scale_rule == twin.optimizer.loss_scale_rule == mpkeras.FixedLossScale(64.0)


def own_attributes(model):
    layers = [model, *model.layers]
    return [(layer.dtype_policy, {name: id(value) for name, value in vars(layer).items()}) for layer in layers]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "options", "expected"),
    [
        (None, {}, (4, "drop_micro")),
        (3, {}, (12, "drop_micro")),
        (3, {"on_overflow": "drop_window"}, (12, "drop_window")),
        (3, {"accumulate_steps": 2}, (2, "drop_micro")),
        (None, {"accumulate_steps": 1}, (1, "drop_micro")),
    ],
)
def test_what_a_plan_says_is_multiplied_and_what_is_passed_is_all(own, options, expected):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4)])
    mpkeras.apply_policy(model, accumulating(mpkeras.Policy("mixed_bfloat16"), 4))
    optimizer = keras.optimizers.SGD(0.5, gradient_accumulation_steps=own)
    for _ in range(2):
        step = make_train_step(model, optimizer, "mse", jit_compile=False, **options)
        step(X[0][:, :6], np.ones((4, 4)))
        said = step._parts.options()
        assert (said["accumulate_steps"], said["on_overflow"]) == expected
        assert (step.optimizer.gradient_accumulation_steps or 1) == expected[0]
        # Its own optimizer means the same in another step.
        optimizer = step.optimizer
    mpkeras.apply_policy(model, "mixed_bfloat16")
    step = make_train_step(model, optimizer, "mse")
    assert step.optimizer.gradient_accumulation_steps == (options.get("accumulate_steps", own) if own else None)


def test_after_an_error_the_layers_are_as_before():
    with mpkeras.policy_scope("mixed_float16"):
        layers = [keras.Input((6,)), keras.layers.Dense(8, activity_regularizer="l2"), keras.layers.Dense(4)]
        model = keras.Sequential([*layers, keras.layers.Softmax()])
        optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.5, gradient_accumulation_steps=3))
        optimizer.build(model.trainable_variables)
        before = own_attributes(model)
        with pytest.raises(ValueError, match="go on accumulating as it does"):
            make_train_step(model, optimizer, "mse", accumulate_steps=2)
    assert own_attributes(model) == before


def test_after_an_error_in_the_first_step_the_new_layers_are_as_before():
    with mpkeras.policy_scope("mixed_float16"):
        model = actor_with_late_head(activity_regularizer="l2")
        optimizer = mpkeras.LossScaleOptimizer("sgd", loss_scale=1.0)
        step = make_train_step(model, optimizer, "mse")
        # Built in the meantime, on something else.
        optimizer.build([keras.Variable(1.0)])
        with pytest.raises(ValueError, match="that the optimizer was built on"):
            step(X[0], np.ones((4, 4)))
        head = model.layers[1].inner
        assert head.compute_dtype == "float16"
        # Not the one that a converted layer has.
        assert type(head.activity_regularizer) is keras.regularizers.L2


# ------------------------------------------------------------------------------ weights frozen and freed


class Factor(keras.layers.Layer):
    """x times one weight. Counts how often Python runs it."""

    runs = 0

    def __init__(self, start, **options):
        super().__init__(**options)
        self.start = start

    def build(self, input_shape):
        self.factor = self.add_weight(shape=(), initializer=keras.initializers.Constant(self.start), name="factor")

    def call(self, x):
        self.runs += 1
        return x * self.factor


def two_factors():
    return keras.Sequential([keras.Input((1,)), Factor(2.0, name="a"), Factor(3.0, name="b")])


def descended(weights, slots, trained):
    """One step of SGD(1/64, momentum=0.5, weight_decay=0.25) on (a b x - y)^2 for x = 1 and y = 0."""
    a, b = weights["a"], weights["b"]
    grads = {"a": 2 * a * b * b, "b": 2 * a * a * b}
    for name in trained:
        decayed = weights[name] - weights[name] * 0.25 / 64
        slots[name] = 0.5 * slots[name] - grads[name] / 64
        weights[name] = decayed + slots[name]


FREEZING = ["ab", "b", "b", "a", "ab", "b"]


@pytest.mark.slow
@pytest.mark.parametrize(("accumulate_steps", "rollback"), [(1, True), (1, False), (2, False)])
@pytest.mark.parametrize("jit_compile", COMPILED)
def test_layers_frozen_and_freed_between_steps_obey_from_the_next_step_on(
    jit_compile, accumulate_steps, rollback, backend
):
    model = two_factors()
    optimizer = keras.optimizers.SGD(1 / 64, momentum=0.5, weight_decay=0.25)
    options = {"rollback": rollback, "accumulate_steps": accumulate_steps}
    step = make_train_step(model, optimizer, "mse", jit_compile=jit_compile, **options)
    x, y = np.ones((2, 1), "float32"), np.zeros((2, 1), "float32")
    weights, slots = {"a": 2.0, "b": 3.0}, {"a": 0.0, "b": 0.0}
    runs_before = model.layers[0].runs
    for trained in FREEZING:
        for layer in model.layers:
            layer.trainable = layer.name in trained
        if rollback:
            variables = model.variables + optimizer.variables
            as_before_the_step = snapshot(variables)
            assert number(step(x * np.inf, y)["skipped"])
            assert snapshot(variables) == as_before_the_step
        for _ in range(accumulate_steps):
            step(x, y)
        descended(weights, slots, trained)
        factors = {layer.name: float(number(layer.factor)) for layer in model.layers}
        assert factors == pytest.approx(weights, rel=1e-5), trained
    if backend == "tensorflow" or jit_compile:
        # One trace for each set of weights, none for one that was there before.
        assert model.layers[0].runs - runs_before == 3


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", COMPILED)
def test_a_layer_freed_in_the_middle_of_a_window_brings_no_gradients_of_an_earlier_one(jit_compile):
    model = two_factors()
    step = make_train_step(model, keras.optimizers.SGD(1 / 64), "mse", jit_compile=jit_compile, accumulate_steps=2)
    a, b = model.layers
    x, y = np.ones((2, 1), "float32"), np.zeros((2, 1), "float32")
    step(x, y)
    step(x, y)
    # 2 a b^2 and 2 a^2 b: 36 and 24
    old_a, old_b = 2.0 - 36 / 64, 3.0 - 24 / 64
    assert float(number(a.factor)) == old_a
    a.trainable = False
    step(x, y)
    a.trainable = True
    step(x, y)
    # The mean over the window's two calls, of which the first brought nothing.
    assert float(number(a.factor)) == pytest.approx(old_a - old_a * old_b**2 / 64, rel=1e-6)


@pytest.mark.parametrize("jit_compile", first_quick(GRAPH_FIRST))
def test_a_freed_layer_that_the_optimizer_does_not_know_is_named(jit_compile):
    """Keras' `fit` raises, too, after `compile` with the same optimizer."""
    model = two_factors()
    model.layers[0].trainable = False
    step = make_train_step(model, keras.optimizers.SGD(1 / 64, momentum=0.5), "mse", jit_compile=jit_compile)
    x, y = np.ones((2, 1), "float32"), np.zeros((2, 1), "float32")
    step(x, y)
    before = snapshot(model.variables + step.optimizer.variables)
    model.layers[0].trainable = True
    with pytest.raises(ValueError, match=r"that the optimizer was built on.*a/factor.*make_train_step"):
        step(x, y)
    assert snapshot(model.variables + step.optimizer.variables) == before
    model.layers[0].trainable = False
    step(x, y)
    assert int(number(step.optimizer.iterations)) == 2


# ------------------------------------------------------------------------------ traces


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("jit_compile", COMPILED)
def test_ten_lengths_are_traced_twice(jit_compile):
    """As in Keras' `fit`: the second length makes a program for all of them."""
    model = keras.Sequential([keras.Input((None, 1)), Factor(2.0), keras.layers.GlobalAveragePooling1D()])
    step = make_train_step(model, keras.optimizers.SGD(0.5), "mse", jit_compile=jit_compile)
    for length in range(2, 12):
        # The mean of `length` ones times the factor: whatever the length, loss 4 at the first factor.
        loss = number(step(np.ones((2, length, 1), "float32"), np.zeros((2, 1), "float32"))["loss"])
        if length == 2:
            assert loss == 4.0
            # Shapes of the graph are computed before the first trace, too.
            with_first_trace = model.layers[0].runs
    assert model.layers[0].runs == with_first_trace + 1
    # A program's text is of one batch, with its shapes.
    if jit_compile:
        assert "f32[2,7,1]" in step.compiler_ir(np.ones((2, 7, 1), "float32"), np.zeros((2, 1), "float32"))


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("jit_compile", first_quick([False, True]))
def test_python_branches_on_tensors_are_refused_as_in_fit(jit_compile):
    """One meaning, whichever door: what trains in the step trains in `fit`."""

    def branching_loss(y, y_pred):
        error = keras.ops.mean(keras.ops.square(y - y_pred))
        if error > 3.0:
            error = 3.0 * keras.ops.sqrt(error)
        return error

    x, y = np.ones((4, 2), "float32"), np.full((4, 1), 5, "float32")
    zeros = [[0.0], [0.0]]
    model = linear(zeros)
    model.compile(keras.optimizers.SGD(0.25), branching_loss, jit_compile=jit_compile)
    with pytest.raises(TypeError, match="symbolic `tf.Tensor` as a Python `bool`"):
        model.train_on_batch(x, y)
    step = make_train_step(linear(zeros), "sgd", branching_loss, jit_compile=jit_compile)
    with pytest.raises(TypeError, match="symbolic `tf.Tensor` as a Python `bool`"):
        step(x, y)

    import tensorflow as tf

    step = make_train_step(linear(zeros), "sgd", tf.function(branching_loss), jit_compile=jit_compile)
    # Zeros predict 0 for 5: an error of 25, and 3 * 5 after the branch.
    assert float(step(x, y)["loss"]) == pytest.approx(15.0)


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "jax")
@pytest.mark.parametrize("policy", first_quick(["mixed_bfloat16", "float32"]))
def test_sparse_batches_train_as_dense_ones_do(policy, backend):
    """`jit_compile` is left out: XLA has no sparse tensors on TensorFlow."""
    rows = np.eye(5, 7, dtype="float32") * 3.0
    if backend == "jax":
        from jax.experimental import sparse

        as_sparse = sparse.BCOO.fromdense
    else:
        import tensorflow as tf

        as_sparse = tf.sparse.from_dense
    losses, weights = [], []
    for given in (rows, as_sparse(rows)):
        keras.utils.set_random_seed(2)
        model = keras.Sequential([keras.Input((7,), sparse=True), keras.layers.Dense(2)])
        mpkeras.apply_policy(model, policy)
        step = mpkeras.make_train_step(model, keras.optimizers.SGD(0.1), "mse")
        losses.append([float(step(given, np.ones((5, 2), "float32"))["loss"]) for _ in range(2)])
        before = model.get_weights()
        bad = np.where(np.eye(5, 7) > 0, np.inf, rows).astype("float32")
        assert step(bad if given is rows else as_sparse(bad), np.ones((5, 2), "float32"))["skipped"]
        assert all(np.array_equal(a, b) for a, b in zip(model.get_weights(), before, strict=True))
        weights.append(before)
    rtol = 1e-5 if policy == "float32" else 2.0**-7  # sums in another order; bfloat16 has 8 significant bits
    np.testing.assert_allclose(losses[0], losses[1], rtol=rtol)
    np.testing.assert_allclose(weights[0][0], weights[1][0], rtol=rtol)


@pytest.mark.parametrize(
    ("rule", "of_the_body"),
    first_quick([("path:net/body$", "float32"), ("path:^body$", "bfloat16")]),
    ids=["path", "name"],
)
def test_path_rules_of_a_model_that_the_first_step_builds_are_matched_by_paths(rule, of_the_body):
    """A layer that is not built has a name and no path: what matched the name alone is in 16 bits after all."""
    with mpkeras.policy_scope(mpkeras.Policy("mixed_bfloat16", keep_float32=(rule,))):
        body, head = keras.layers.Dense(4, name="body"), keras.layers.Dense(2, name="head")
        model = keras.Sequential([body, keras.layers.ReLU(), head], name="net")
    step = mpkeras.make_train_step(model, "sgd", "mse", jit_compile=False)
    with pytest.MonkeyPatch.context() as patch:
        # That a rule matches nothing is told in another test.
        patch.setattr("mpkeras.conversion.converter.unmatched", lambda model, rules, argument: [])
        step(np.ones((3, 5), "float32"), np.zeros((3, 2), "float32"))
    assert (body.compute_dtype, head.compute_dtype) == (of_the_body, "bfloat16")
