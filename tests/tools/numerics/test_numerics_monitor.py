"""P1, P16, P27: a skipped step is named by layer and side, in `fit`, however it is compiled."""

import keras
import numpy as np
import pytest
from keras import layers

import mpkeras
from mpkeras.callbacks import MixedPrecision, NumericsMonitor
from mpkeras.tools.numerics import numerics_monitor
from mpkeras.tools.numerics.numerics import trace_numerics
from mpkeras.training import guard
from tests.cases import first_quick
from tests.sixteen_bits import Weighted, without_outputs
from tests.step_modes import snapshot
from tests.tools.numerics.test_numerics import Times, name, stack_of_six

rng = np.random.default_rng(0)
X = rng.normal(size=(12, 8)).astype("float32")
Y = rng.normal(size=(12, 8)).astype("float32")

TENSORFLOW = pytest.mark.backends("tensorflow")
TENSORFLOW_AND_JAX = pytest.mark.backends("tensorflow", "jax")
# The default is graph mode on TensorFlow (on a CPU), XLA on JAX, and eager on torch.
MODES = [
    pytest.param({}, id="default"),
    pytest.param({"run_eagerly": True}, id="eager", marks=TENSORFLOW_AND_JAX),
    pytest.param({"jit_compile": True}, id="xla", marks=TENSORFLOW),
    pytest.param({"steps_per_execution": 3}, id="several steps", marks=TENSORFLOW_AND_JAX),
    pytest.param({"jit_compile": True, "steps_per_execution": 3}, id="xla, several steps", marks=TENSORFLOW),
]
SKIPS = pytest.mark.filterwarnings(
    "ignore:.*was skipped",
    "ignore:All .* steps of epoch",
    "ignore:.* steps skipped in epoch",
    "ignore:The outputs of layer .* are inf or NaN",
)


def six_layers(k=None, options=(), learning_rate=0.01, **fault):
    model = stack_of_six(k, **fault)
    model.compile(keras.optimizers.SGD(learning_rate), "mse", **dict(options))
    return model


def fit(model, monitor, x=X, y=Y, loss_scale=1.0, **options):
    precision = MixedPrecision(without_outputs("mixed_float16"), loss_scale=loss_scale)
    options = {"batch_size": 4, "verbose": 0, "shuffle": False, **options}
    return model.fit(x, y, callbacks=[precision, monitor], **options)


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 4, 6])
def test_p1_the_layer_that_overflows_is_named(k):
    monitor = NumericsMonitor(max_findings=4)
    with pytest.warns(UserWarning) as warned:
        fit(six_layers(k, up=1e3), monitor, epochs=2)
    # It warns once of each culprit.
    named = [str(w.message) for w in warned if "was skipped: the output of layer" in str(w.message)]
    assert len(named) == 1 and "Step 0 of epoch 1 was skipped" in named[0] and "keep it in float32" in named[0]
    # Of six skipped steps.
    assert len(monitor.findings) == 4
    assert {(found.culprit.side, name(found.culprit.path)) for found in monitor.findings} == {("output", f"layer_{k}")}


@pytest.mark.slow
@SKIPS
@pytest.mark.parametrize("bad", [(3,), (1, 2), (0, 5)], ids=str)
def test_each_skipped_step_of_an_epoch_is_found_once_wherever_it_is(bad):
    # The last step has no next one, at whose beginning JAX would look.
    x, y = np.tile(X, (2, 1)), np.tile(Y, (2, 1))
    for step in bad:
        x[4 * step] = np.inf
    monitor = NumericsMonitor()
    model = six_layers(learning_rate=1e-3)
    fit(model, monitor, x, y, epochs=2)
    steps = [(found.epoch, found.batch) for found in monitor.findings]
    assert steps == [(epoch, step) for epoch in range(2) for step in bad]
    assert {found.culprit.side for found in monitor.findings} == {"input"}
    assert int(model.optimizer.skipped_steps) == len(steps)


@pytest.mark.slow
@SKIPS
@pytest.mark.parametrize("mode", MODES)
def test_p1_however_the_step_is_compiled(mode):
    # One bad batch among three: the second. The small scale keeps the gradients of the others finite.
    x = X.copy()
    x[4:8] *= 100
    monitor = NumericsMonitor()
    fit(six_layers(5, mode, learning_rate=0.0, up=30.0), monitor, x=x, loss_scale=2.0**-8)
    (found,) = monitor.findings
    assert (found.culprit.side, name(found.culprit.path)) == ("output", "layer_5")


@pytest.mark.slow
@SKIPS
def test_gradients_that_overflow_are_found_at_the_scale_of_the_step():
    monitor = NumericsMonitor()
    # At 4, where the scale begins and to which it falls, they are far below 65504; at 4096 many times over it.
    rule = mpkeras.DynamicLossScale(4.0, growth_factor=2.0**10, backoff_factor=2.0**-10, dynamic_growth_steps=1)
    fit(six_layers(4, down=20.0, learning_rate=0.0), monitor, loss_scale=rule)
    (found, *_) = monitor.findings
    assert (found.batch, found.culprit.side, name(found.culprit.path)) == (1, "gradient", "layer_4")
    assert (found.report.loss_scale, found.loss_scale) == (4096.0, 4.0)


class Norm(layers.Layer):
    """The slope of a root at 0 is not finite."""

    def call(self, x):
        return keras.ops.sqrt(keras.ops.sum(x**2, axis=-1, keepdims=True))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* steps of epoch")
@pytest.mark.parametrize(("policy", "is_told"), [("mixed_bfloat16", True), ("mixed_float16", False)])
def test_gradients_that_are_not_finite_are_told_at_once_where_no_scale_has_to_settle(policy, is_told, recwarn):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2), Norm(name="norm")])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    mpkeras.prepare(model, policy)
    monitor = NumericsMonitor()
    model.fit(np.zeros((2, 3)), np.ones((2, 1)), verbose=0, callbacks=[monitor])
    assert [name(found.culprit.path) for found in monitor.findings] == ["norm"]
    assert any("the gradient of layer" in str(warning.message) for warning in recwarn) is is_told


@pytest.mark.slow
def test_nothing_is_reported_of_a_clean_model_and_training_is_the_same(backend):
    monitored, alone = six_layers(), six_layers()
    monitor = NumericsMonitor()
    history = fit(monitored, monitor, epochs=2, batch_size=5)
    precision = MixedPrecision(without_outputs("mixed_float16"), loss_scale=1.0)
    expected = alone.fit(X, Y, batch_size=5, epochs=2, verbose=0, shuffle=False, callbacks=[precision])
    assert monitor.findings == [] and monitor.last_report is None
    assert snapshot(monitored.variables) == snapshot(alone.variables)
    assert history.history["loss"] == expected.history["loss"]


@pytest.mark.slow
def test_every_so_many_steps(monkeypatch):
    seen = []

    def trace(model, x, *arguments, **options):
        seen.append(np.asarray(keras.ops.convert_to_numpy(x)))
        return trace_numerics(model, x, *arguments, **options)

    monkeypatch.setattr(numerics_monitor, "trace_numerics", trace)
    monitor = NumericsMonitor(every=2)
    fit(six_layers(), monitor, epochs=2)
    assert monitor.findings == [] and monitor.last_report.culprit is None and len(monitor.last_report.layers) == 6
    # Of twice three batches the second, the fourth and the sixth.
    np.testing.assert_array_equal(seen, [X[4:8], X[:4], X[8:]])


class Shifted(Weighted):
    def call(self, x):
        return (x + 512) - 512


@pytest.mark.slow
@pytest.mark.parametrize("first", [8.0, 1.0])
def test_a_layer_that_loses_finite_outputs_is_warned_of_once(first):
    """By the first batch, or by the monitor where that one loses nothing."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), Shifted(name="shifted"), layers.Dense(1)], name="net")
    model.compile("sgd", "mse")
    callbacks = [MixedPrecision("mixed_bfloat16"), NumericsMonitor(every=2)]
    # 513 is 512 in bfloat16, and 520 is 520.
    x = np.repeat([[first], [1.0]], [2, 6], axis=0) * np.ones(2)
    options = {"batch_size": 2, "epochs": 2, "shuffle": False, "verbose": 0, "callbacks": callbacks}
    with pytest.warns(UserWarning, match="outputs (in|of layer)") as caught:
        model.fit(x, np.ones((8, 1)), **options)
    (message,) = {str(warning.message) for warning in caught if "shifted" in str(warning.message)}
    if first == 1.0:
        assert message.startswith("The outputs of layer 'net/shifted' in bfloat16 are off by 100%")
    else:
        assert message == (
            "Step 1 of epoch 1: Layer 'net/shifted': its outputs in bfloat16 are off by 100 % from those in float32 on "
            "the same inputs: keep it in float32 with `keep_float32=(..., 'path:^net/shifted$')`."
        )


@pytest.mark.slow
@pytest.mark.parametrize("loss_scale", [1.0, 8.0])
def test_gradient_statistics_in_the_logs_are_those_of_numpy(loss_scale):
    kernel = np.array([[1.0, 0.0], [0.0, 1.0]], "float32")
    model = keras.Sequential([keras.Input((2,)), layers.Dense(2, use_bias=False)])
    model.layers[0].set_weights([kernel])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    history = fit(
        model, NumericsMonitor(gradients=True), x=np.eye(2) * [3.0, 0.0], y=np.zeros((2, 2)), loss_scale=loss_scale
    )
    # Outputs [[3, 0], [0, 0]]; by output 2 * 3 / 4 = 1.5; by kernel [[4.5, 0], [0, 0]].
    assert history.history["grad_norm"] == [pytest.approx(4.5)]
    assert history.history["zero_grad_fraction"] == [pytest.approx(0.75)]


@pytest.mark.slow
def test_p27_lost_gradients_show_and_a_scale_recovers_them():
    def zeros(loss_scale):
        model = six_layers()
        model.compile(keras.optimizers.SGD(0.01), lambda y, p: 1e-9 * keras.losses.mean_squared_error(y, p))
        return fit(model, NumericsMonitor(gradients=True), loss_scale=loss_scale).history["zero_grad_fraction"][0]

    assert zeros(1.0) > 0.99
    assert zeros(2.0**20) < 0.05


def plainly_fitted(policy, callbacks, *, after_global_policy=None):
    """A model that Keras made under `policy` and fitted with callbacks only, its second batch of three bad."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(policy)
    stack = [layers.Dense(8, name="hidden"), Times(name="boom", up=30.0), layers.Dense(8, "softmax", name="head")]
    model = keras.Sequential([keras.Input((8,)), *stack])
    optimizer = keras.optimizers.SGD(1e-3)
    if policy == "mixed_float16":
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=4.0)
    model.compile(optimizer, "mse")
    keras.config.set_dtype_policy("float32")
    if after_global_policy is not None:
        mpkeras.set_global_policy(after_global_policy)
    x = X.copy()
    x[4:8] *= 1e38 if policy == "float32" else 100
    history = model.fit(x, Y, batch_size=4, epochs=2, verbose=0, shuffle=False, callbacks=callbacks).history
    return model, history


@pytest.mark.slow
@SKIPS
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_alone_it_names_the_layer_and_training_goes_on(policy):
    monitor = NumericsMonitor()
    # A global policy that came later converts nothing.
    model, history = plainly_fitted(policy, [monitor], after_global_policy="mixed_bfloat16")
    assert [(found.epoch, found.batch) for found in monitor.findings] == [(0, 1), (1, 1)]
    assert {name(found.culprit.path) for found in monitor.findings} == {"boom"}
    assert history["skipped_steps"] == [1, 2] and np.isfinite(history["loss"]).all()
    half = "float32" if policy == "float32" else "float16"
    assert [layer.compute_dtype for layer in model.layers] == [half, half, "float32"]
    assert all(np.isfinite(weights).all() for weights in model.get_weights())
    # Afterwards the step is the model's own again, as behind `MixedPrecision`.
    assert "train_step" not in vars(model)
    keras.config.set_dtype_policy("float32")
    expected, expected_history = plainly_fitted(policy, [MixedPrecision(policy)])
    assert snapshot(model.variables) == snapshot(expected.variables)
    assert history == expected_history


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*was skipped")
@pytest.mark.parametrize("order", [1, -1])
def test_beside_the_callback_that_prepares_the_order_does_not_matter(order):
    monitor = NumericsMonitor()
    callbacks = [MixedPrecision("mixed_float16", loss_scale=4.0), monitor][::order]
    with pytest.warns(UserWarning) as warned:
        model, history = plainly_fitted("float32", callbacks)
    assert history["loss_scale"] == [4.0, 4.0] and model.layers[0].compute_dtype == "float16"
    assert {name(found.culprit.path) for found in monitor.findings} == {"hidden"}
    # Each tells what it tells once.
    assert sum("steps skipped in epoch" in str(w.message) for w in warned) == 1


@pytest.mark.parametrize("order", first_quick([1, -1]))
def test_where_nobody_checks_the_steps_it_does(order):
    callbacks = [MixedPrecision("float32", rollback=False), NumericsMonitor()][::order]
    model = six_layers(options={"run_eagerly": True})
    assert model.fit(X[:2], Y[:2], verbose=0, callbacks=callbacks).history["skipped_steps"] == [0]


@pytest.mark.slow
def test_a_guard_of_its_own_goes_after_evaluate_and_predict_and_with_the_next_fit():
    class Boom(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise RuntimeError("boom")

    model, monitor = six_layers(), NumericsMonitor()
    model.evaluate(X, Y, verbose=0, callbacks=[monitor])
    assert not guard.is_guarded(model)
    model.predict(X, verbose=0, callbacks=[monitor])
    assert not guard.is_guarded(model)
    with pytest.raises(RuntimeError, match="boom"):
        model.fit(X, Y, verbose=0, callbacks=[monitor, Boom()])
    if keras.backend.backend() == "jax":
        model.jax_state_sync()
    model.fit(X, Y, verbose=0, callbacks=[monitor])
    assert not guard.is_guarded(model)


def test_a_guard_that_was_taken_away_is_an_error():
    class Takes(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            guard.uninstall(self.model)

    with pytest.raises(ValueError, match="Received: model 'sequential.*, whose guard was taken away. Put"):
        six_layers().fit(X, Y, verbose=0, callbacks=[Takes(), NumericsMonitor()])


@pytest.mark.slow
@TENSORFLOW
def test_several_steps_per_execution_stay_one_call():
    """Of seven steps Keras runs three, three and one in one graph, if it may read the data itself."""
    import tensorflow as tf

    def fitted(*callbacks):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((8,)), layers.Dense(8, "relu"), layers.Dropout(0.5), layers.Dense(8)])
        model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=True, steps_per_execution=3)
        make, alone = model.make_train_function, []

        def make_counting(force=False):
            make(force)
            function = model.train_function

            def counting(data):
                if tf.executing_eagerly() and not isinstance(data, tf.data.Iterator):
                    data = list(data)
                    alone.extend(data)
                return function(iter(data) if isinstance(data, list) else data)

            if function.__name__ != "counting":
                model.train_function = counting

        model.make_train_function = make_counting
        x, y = np.tile(X, (3, 1))[:27], np.tile(Y, (3, 1))[:27]
        callbacks = [MixedPrecision("float32"), *callbacks]
        history = model.fit(x, y, batch_size=4, epochs=2, verbose=0, shuffle=False, callbacks=callbacks).history
        return snapshot(model.variables), history, len(alone)

    variables, history, alone = fitted(NumericsMonitor())
    expected, expected_history, none_alone = fitted()
    assert variables == expected and history == expected_history
    # The three of the first execution, whose first batch is looked at, and the last of each epoch.
    assert (alone, none_alone) == (3 + 2, 0)


@pytest.mark.slow
@TENSORFLOW
@SKIPS
@pytest.mark.parametrize(("bad", "last"), [(1, 2), (4, 5), (6, 6)])
def test_the_batch_is_found_among_several_of_any_structure(bad, last):
    import tensorflow as tf

    a, b = keras.Input((8,), name="a"), keras.Input((8,), name="b")
    model = keras.Model({"a": a, "b": b}, layers.Dense(8, name="head")(layers.Add()([a, b])))
    model.compile(keras.optimizers.SGD(0.01), "mse", steps_per_execution=3)
    x = np.tile(X, (3, 1))[:27]
    x[4 * bad] = np.inf
    data = tf.data.Dataset.from_tensor_slices(({"a": x, "b": np.zeros_like(x)}, np.tile(Y, (3, 1))[:27])).batch(4)
    monitor = NumericsMonitor()
    model.fit(data, verbose=0, shuffle=False, callbacks=[monitor])
    (found,) = monitor.findings
    assert found.batch == last  # of its execution
    assert found.culprit.side == "input" and "look into the data" in found.culprit.message


@pytest.mark.backends("tensorflow", "jax")
@pytest.mark.filterwarnings("ignore:1 of 2 steps skipped")
def test_of_several_steps_the_one_whose_forward_pass_is_not_finite_is_named():
    body = layers.Dense(1, kernel_initializer="ones", use_bias=False, name="body")
    model = keras.Sequential([keras.Input((1,)), body], name="net")
    model.compile(keras.optimizers.SGD(100.0), "mse", steps_per_execution=2, run_eagerly=True)
    callbacks = [MixedPrecision(without_outputs("mixed_float16"), loss_scale=512.0), NumericsMonitor()]
    # The first batch makes 1 - 100 * 2 = -199 of the weight: only then is its gradient, -400 * 512, too large.
    x, y = np.array([[1.0], [1.0], [np.nan], [1.0]], "float32"), np.zeros((4, 1), "float32")
    with pytest.warns(UserWarning, match="look into the data"):
        history = model.fit(x, y, batch_size=2, shuffle=False, verbose=0, callbacks=callbacks).history
    assert history["skipped_steps"] == [1]
    assert [finding.culprit.side for finding in callbacks[1].findings] == ["input"]


@pytest.mark.slow
@TENSORFLOW_AND_JAX
@pytest.mark.filterwarnings("ignore:.* steps skipped in epoch", "ignore:In validation")
def test_of_several_steps_in_one_execution_none_is_said_to_be_the_skipped_one():
    x, y = np.ones((15, 2), "float32"), np.zeros((15, 1), "float32")
    x[7] = np.nan
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse", steps_per_execution=3)
    with pytest.warns(UserWarning) as warned:
        options = {"batch_size": 3, "shuffle": False, "verbose": 0, "validation_data": (x, y)}
        model.fit(x, y, callbacks=[NumericsMonitor()], **options)
    told = [str(w.message).partition(": layer")[0] for w in warned]
    assert "A step from 0 to 2 of epoch 1 was skipped" in told
    assert "Validation is not finite from one of the batches 0 to 2 on" in told


@pytest.mark.slow
@SKIPS
def test_a_model_that_was_trained_before_is_watched_as_well():
    # JAX finds the step that it compiled for the first `fit`, which told nothing of skipped steps.
    model = mpkeras.prepare(six_layers(3, learning_rate=0.0, up=30.0), "mixed_float16", loss_scale=2.0**-8)
    options = {"batch_size": 4, "verbose": 0, "shuffle": False}
    model.fit(X, Y, **options)
    monitor = NumericsMonitor(gradients=True)
    history = model.fit(X * 100, Y, callbacks=[monitor], **options).history
    # The train function that stays is the model's own again, and no batch is held.
    assert model.train_function is not None and not hasattr(model.train_function, "mpkeras_kept_batches")
    assert {name(found.culprit.path) for found in monitor.findings} == {"layer_3"}
    assert {"skipped_steps", "grad_norm"} <= set(history)


class Halves(keras.Model):
    """Has a `train_step` of its own, and no `call`: it takes the two halves of each row to one number each."""

    def __init__(self):
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((4,)), layers.Dense(3, name="shared")])
        self.built = True

    def loss_of(self, x):
        difference = self.encoder(x[:, :4]) - self.encoder(x[:, 4:])
        return keras.ops.mean(keras.ops.square(keras.ops.cast(difference, "float32")))

    def train_step(self, *args):
        weights = self.encoder.trainable_variables
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            with tf.GradientTape() as tape:
                loss = self.loss_of(args[0])
                scaled = self.optimizer.scale_loss(loss)
            self.optimizer.apply(tape.gradient(scaled, weights), weights)
            return {"loss": loss}
        if keras.backend.backend() == "torch":
            self.zero_grad()
            loss = self.loss_of(args[0])
            self.optimizer.scale_loss(loss).backward()
            self.optimizer.apply([variable.value.grad for variable in weights], weights)
            return {"loss": loss}
        import jax

        (trainable, non_trainable, of_optimizer, of_metrics), x = args

        def scaled_loss(values):
            with keras.StatelessScope(state_mapping=list(zip(weights, values, strict=True))):
                loss = self.loss_of(x)
            with keras.StatelessScope(state_mapping=list(zip(self.optimizer.variables, of_optimizer, strict=True))):
                return self.optimizer.scale_loss(loss), loss

        grads, loss = jax.grad(scaled_loss, has_aux=True)(trainable)
        trainable, of_optimizer = self.optimizer.stateless_apply(of_optimizer, grads, trainable)
        return {"loss": loss}, (trainable, non_trainable, of_optimizer, of_metrics)


@pytest.mark.parametrize("bad", first_quick([None, np.nan]))
def test_a_model_without_a_call_is_looked_at_as_far_as_it_can_be(bad, recwarn):
    """A scale that is too large, as it grows, is no fault: it says that `every` gives no report, and nothing else."""
    model = Halves()
    model.compile(keras.optimizers.SGD(0.01), run_eagerly=keras.backend.backend() == "tensorflow")
    x = X.copy()
    if bad is not None:
        x[5, 2] = bad
    monitor = NumericsMonitor(every=1)
    rule = mpkeras.DynamicLossScale(2.0**20) if bad else mpkeras.DynamicLossScale(2.0**12, dynamic_growth_steps=1)
    history = fit(model, monitor, x, None, loss_scale=rule, epochs=1 if bad else 8)
    (no_report,) = [str(warning.message) for warning in recwarn if "gives no report" in str(warning.message)]
    assert no_report.startswith(
        "`every=1` gives no report: the model cannot be run on its batch (ValueError: Expected a model with a `call`"
    )
    told = [str(warning.message) for warning in recwarn if "cannot be said" in str(warning.message)]
    assert history.history["skipped_steps"][-1] > 0 and len(monitor.findings) > 0
    assert all((found.culprit, found.report) == (None, None) for found in monitor.findings)
    assert len(told) == (bad is not None)
    if told:
        assert "Step 1 of epoch 1" in told[0] and "Its batch holds values that are not finite" in told[0]
        assert "BlackBox" in told[0] and "which layer was at fault cannot be said" in told[0]


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("is_built", [True, False], ids=["built", "built by the step"])
def test_gradients_of_a_tf_function_inside_are_said_to_be_out_of_reach(is_built):
    """Where it was built before, the step ended in TensorFlow's error of a tensor out of scope."""
    import tensorflow as tf

    class Regression(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = keras.layers.Dense(1)

        def call(self, x):
            return self.head(x)

        @tf.function
        def train_step(self, data):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x, y, self(x))
                scaled_loss = self.optimizer.scale_loss(loss)
            self.optimizer.apply(tape.gradient(scaled_loss, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    model = Regression()
    model.compile("sgd", "mse", jit_compile=False)
    if is_built:
        model(np.ones((4, 3)))
    mpkeras.prepare(model, "mixed_float16", loss_scale=8.0)
    with pytest.warns(UserWarning, match="without `grad_norm` and `zero_grad_fraction`"):
        history = model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0, callbacks=[NumericsMonitor(gradients=True)])
    assert set(history.history) == {"loss", "loss_scale", "skipped_steps"}
