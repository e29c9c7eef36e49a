"""G2: a run with bad batches is, bit for bit, the run without them."""

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.policies.loss_scaling import DynamicLossScale
from mpkeras.training.prepare import prepare
from tests.cases import first_quick
from tests.sixteen_bits import without_outputs
from tests.step_modes import FIT_MODES, snapshot
from tests.training.models import (
    WAYS,
    AddsNoise,
    are_finite,
    dropout_model,
    loss_and_gradients,
    scaled_losses,
    spoiled,
    stepper,
)

rng = np.random.default_rng(3)
X = rng.normal(size=(8, 4, 6)).astype("float32")
Y = rng.normal(size=(8, 4, 2)).astype("float32")


@pytest.mark.slow
@pytest.mark.parametrize(("way", "options"), WAYS)
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_bad_batches_leave_no_trace(policy, way, options):
    """Random generators, statistics and averaged weights included."""

    def run(with_faults):
        model = dropout_model()
        scale = 256.0 if policy == "mixed_float16" else None
        step, optimizer = stepper(way, options, model, keras.optimizers.Adam(0.01, use_ema=True), policy, scale)
        losses, of_faults = [], []
        for i in range(4):
            if with_faults and i in (0, 2, 3):
                of_faults.append(step(spoiled(X[i + 4]), Y[i]))
            losses.append(step(X[i], Y[i]))
        assert np.isnan(of_faults).all() and int(optimizer.skipped_steps) == len(of_faults)
        return snapshot(model.variables + optimizer.inner_optimizer.variables), losses

    assert run(with_faults=True) == run(with_faults=False)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "options"), WAYS)
def test_a_skipped_batch_leaves_no_trace_in_what_draws_without_a_seed(way, options, backend):
    """A Dropout, which on torch draws from torch's own generator, and random functions, which JAX refuses in a step."""

    def run(*batches):
        keras.utils.set_random_seed(13)
        drawing = [keras.layers.Dropout(0.5), *([] if backend == "jax" else [AddsNoise()])]
        model = keras.Sequential([keras.Input((6,)), *drawing, keras.layers.Dense(2)])
        step, optimizer = stepper(way, options, model, keras.optimizers.Adam(0.01), "mixed_bfloat16")
        losses = [step(x, y) for x, y in batches]
        state = snapshot(model.variables + optimizer.inner_optimizer.variables)
        return state, losses[-1], int(optimizer.skipped_steps)

    *with_faults, skipped = run((X[3] * np.inf, Y[3]), (X[0], Y[0]), (X[1] * np.inf, Y[1]), (X[2], Y[2]))
    assert (*with_faults, skipped - 2) == run((X[0], Y[0]), (X[2], Y[2]))


@pytest.mark.slow
@pytest.mark.parametrize(("way", "options"), WAYS)
def test_without_rollback_only_the_weights_are_kept(way, options):
    model = dropout_model()
    step, optimizer = stepper(way, options, model, keras.optimizers.SGD(0.01), "mixed_float16", 256.0, rollback=False)
    step(X[0], Y[0])
    weights = snapshot(model.trainable_variables)
    step(spoiled(X[1]), Y[1])
    assert int(optimizer.skipped_steps) == 1
    assert snapshot(model.trainable_variables) == weights
    assert not are_finite(model.non_trainable_weights)


@pytest.mark.parametrize("options", first_quick(FIT_MODES))
def test_batchnorm_statistics_never_become_non_finite_even_on_an_applied_step(options):
    """Inputs of 1e25 have a float32 variance of inf; the loss here does not depend on them."""

    class SideStatistics(keras.Model):
        def __init__(self):
            super().__init__()
            self.side = keras.layers.BatchNormalization(center=False, scale=False)
            self.head = keras.layers.Dense(1)

        def call(self, x, training=False):
            large = keras.ops.convert_to_tensor([[1e25], [-1e25], [1e24], [0.0]], "float32")
            self.side(large * keras.ops.cast(x, "float32"), training=training)
            return self.head(x)

    model, x = SideStatistics(), np.ones((4, 3), "float32")
    model(x)
    step, optimizer = stepper("fit", options, model, keras.optimizers.SGD(0.1), "float32")
    weights = snapshot(model.head.trainable_variables)
    step(x, np.ones((4, 1), "float32"))
    assert int(optimizer.skipped_steps) == 0
    assert snapshot(model.head.trainable_variables) != weights
    assert are_finite(model.side.non_trainable_variables)


@pytest.mark.slow
@pytest.mark.parametrize("options", FIT_MODES)
def test_of_states_of_one_shape_those_alone_keep_their_values_that_became_non_finite(options):
    """In the update that counts: the others move, and what was NaN before is whatever the layer makes of it."""

    class States(keras.layers.Layer):
        def build(self, shape):
            shapes = {"first": (3,), "second": (3,), "nan_before": (3,), "number": (), "large": (2, 40_000)}
            self.states = {
                name: self.add_weight(shape=shape, initializer="ones", trainable=False, name=name)
                for name, shape in shapes.items()
            }

        def call(self, x, training=False):
            if training:
                infinity = keras.ops.exp(keras.ops.cast(keras.ops.sum(x), "float32") + 100.0)
                for name, state in self.states.items():
                    lost = keras.ops.stop_gradient(infinity) if name in ("second", "nan_before", "number") else 1.0
                    # One element is enough.
                    is_first = keras.ops.reshape(keras.ops.arange(keras.ops.size(state)) == 0, state.shape)
                    state.assign(2.0 * state + keras.ops.where(is_first, lost - 1.0, 0.0))
            return x

    model = keras.Sequential([keras.Input((2,)), States(), keras.layers.Dense(1)])
    states = model.layers[0].states
    states["nan_before"].assign([1.0, np.nan, 1.0])
    step, optimizer = stepper("fit", options, model, keras.optimizers.SGD(0.1), "float32")
    step(np.ones((4, 2), "float32"), np.ones((4, 1), "float32"))
    assert int(optimizer.skipped_steps) == 0
    left = {name: keras.ops.convert_to_numpy(state) for name, state in states.items()}
    np.testing.assert_array_equal(left["first"], 2.0)
    np.testing.assert_array_equal(left["large"], 2.0)
    np.testing.assert_array_equal(left["second"], 1.0)
    assert left["number"] == 1.0
    np.testing.assert_array_equal(left["nan_before"], [np.inf, np.nan, 2.0])


@pytest.mark.parametrize(("way", "options"), first_quick(WAYS))
def test_a_loss_that_is_not_finite_leaves_the_scale_alone(way, options):
    """P7: the forward pass is at fault; gradients that overflow alone do lower the scale."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    policy, rule = without_outputs("mixed_float16"), DynamicLossScale(2.0**14)
    step, optimizer = stepper(way, options, model, keras.optimizers.SGD(0.1), policy, rule)
    x, y = np.ones((2, 4), "float32"), np.full((2, 1), 0.1, "float32")
    # From the first step that counts on no batch is taken again.
    step(x, y)
    for _ in range(3):
        step(x * np.inf, y)
    assert float(optimizer.dynamic_scale) == 2.0**14
    assert (int(optimizer.consecutive_skips), int(optimizer.nonfinite_losses)) == (3, 3)
    # A loss of about 1e8, finite, times the scale is beyond float16 in the backward pass.
    assert np.isfinite(step(x, y + 1e4))
    assert float(optimizer.dynamic_scale) == 2.0**13
    assert (int(optimizer.skipped_steps), int(optimizer.nonfinite_losses)) == (4, 3)


@keras.saving.register_keras_serializable("tests")
def infinite(y_true, y_pred):
    del y_true
    return keras.ops.cast(keras.ops.full(keras.ops.shape(y_pred)[:1], np.inf), "float32")


@pytest.mark.slow
@pytest.mark.parametrize("options", FIT_MODES)
def test_a_metric_whose_name_ends_in_loss_has_no_say_in_why_a_step_was_skipped(options):
    """The loss is finite, so the scale is at fault and comes down."""
    # Without a bias, whose gradient is summed in float16 on some backends and in float32 on others.
    dense = keras.layers.Dense(1, kernel_initializer="zeros", use_bias=False)
    model = keras.Sequential([keras.Input((4,)), dense])
    aux_loss = keras.metrics.MeanMetricWrapper(infinite, name="aux_loss")
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[aux_loss], **options)
    prepare(model, without_outputs("mixed_float16"), loss_scale=DynamicLossScale(2.0**24, max_scale=2.0**24))
    # Its gradient is 0, and counts: from then on no batch is taken again.
    model.train_on_batch(np.full((4, 4), 0.01, "float32"), np.zeros((4, 1), "float32"))
    # The loss is 1e4, its gradient at the output of each of four rows is -2 * 100 / 4 = -50.
    for _ in range(20):
        model.train_on_batch(np.full((4, 4), 0.01, "float32"), np.full((4, 1), 100.0, "float32"))
    # 50 * 2^10 = 51200 is below the largest float16, 65504, and twice that is not.
    assert float(model.optimizer.loss_scale) == 2.0**10
    assert int(model.optimizer.skipped_steps) == 14
    assert int(model.optimizer.nonfinite_losses) == 0


class JaxStep(keras.Model):
    """The train step that Keras' guide writes for JAX; `differentiate` says how it takes the gradients."""

    def __init__(self, differentiate):
        super().__init__()
        self.dense = keras.layers.Dense(1, kernel_initializer="zeros")
        self.differentiate = differentiate

    def call(self, x):
        return self.dense(x)

    def train_step(self, state, data):
        trainable, non_trainable, optimizer_values, metric_values = state

        def scaled_loss(trainable, x, y):
            def losses_of(trainable):
                y_pred, _ = self.stateless_call(trainable, non_trainable, x)
                return [keras.ops.mean((keras.ops.cast(y_pred, "float32") - y) ** 2)]

            scaled, (loss,) = scaled_losses(losses_of, self.optimizer, optimizer_values)(trainable)
            return scaled, loss

        grads, loss = self.differentiate(scaled_loss, trainable, *data[:2])
        trainable, optimizer_values = self.optimizer.stateless_apply(optimizer_values, grads, trainable)
        return {"mine": loss}, (trainable, non_trainable, optimizer_values, metric_values)


def jax_ways():
    """How a step may take its gradients; and whether the step then sees the loss."""
    import jax
    import jax.numpy as jnp

    def value_and_grad(f, trainable, x, y):
        (_, loss), grads = jax.value_and_grad(f, has_aux=True)(trainable, x, y)
        return grads, loss

    def checkpoint(f, *args):
        return value_and_grad(jax.checkpoint(f), *args)

    def inner_jit(f, *args):
        return jax.jit(value_and_grad, static_argnums=0)(f, *args)

    def micro_batches(f, trainable, x, y):
        def add(total, micro):
            grads, loss = value_and_grad(f, trainable, *micro)
            return jax.tree_util.tree_map(jnp.add, total, grads), loss

        zeros = jax.tree_util.tree_map(jnp.zeros_like, trainable)
        grads, losses = jax.lax.scan(add, zeros, (x[:, None], y[:, None]))
        return grads, jnp.sum(losses)

    def examples(f, trainable, x, y):
        grads, losses = jax.vmap(lambda x, y: value_and_grad(f, trainable, x, y))(x[:, None], y[:, None])
        return [jnp.sum(grad, 0) for grad in grads], jnp.sum(losses)

    def second_order(f, trainable, x, y):
        def penalized(trainable):
            inner, loss = value_and_grad(f, trainable, x, y)
            return f(trainable, x, y)[0] + 0.0 * sum(jnp.sum(grad) for grad in inner), loss

        return jax.grad(penalized, has_aux=True)(trainable)

    seen = (value_and_grad, second_order)
    unseen = (checkpoint, inner_jit, micro_batches, examples)
    return {way.__name__: (way, way in seen) for way in seen + unseen}


@pytest.mark.backends("jax")
@pytest.mark.parametrize("options", FIT_MODES)
@pytest.mark.parametrize(
    "name", ["value_and_grad", "second_order", "checkpoint", "inner_jit", "micro_batches", "examples"]
)
def test_a_users_jax_step_knows_the_loss_that_it_scaled(name, options):
    """However it is differentiated; out of reach, in a program inside the step, the loss counts as unknown."""
    differentiate, is_seen = jax_ways()[name]
    model = JaxStep(differentiate)
    model(np.ones((2, 4), "float32"))
    model.compile(keras.optimizers.SGD(0.1), "mse", **options)
    prepare(model, without_outputs("mixed_float16"), loss_scale=DynamicLossScale(2.0**10))
    good, target = np.ones((2, 4), "float32"), np.full((2, 1), 0.5, "float32")
    model.train_on_batch(good, target)
    assert int(model.optimizer.skipped_steps) == 0
    model.train_on_batch(np.full((2, 4), np.inf, "float32"), target)
    assert int(model.optimizer.skipped_steps) == 1
    assert int(model.optimizer.nonfinite_losses) == int(is_seen)
    assert float(model.optimizer.loss_scale) == (2.0**10 if is_seen else 2.0**9)
    # A finite loss of about 1e8, whose gradient times the scale is beyond float16.
    model.train_on_batch(good, target + 1e4)
    assert int(model.optimizer.nonfinite_losses) == int(is_seen)
    assert float(model.optimizer.loss_scale) == (2.0**9 if is_seen else 2.0**8)
    assert are_finite(model.variables)


class TwoLosses(keras.Model):
    """Two layers with an optimizer, a loss and trackers each; the step is the user's own."""

    def __init__(self, unscales=lambda: False):
        super().__init__()
        self.parts = [keras.layers.Dense(1, kernel_initializer="zeros") for _ in "ab"]
        self.trackers = [keras.metrics.Mean(name=name) for name in "ab"]
        self.sums = [keras.metrics.Sum(name=f"sum_{name}") for name in "ab"]
        self.unscales = unscales
        for part in self.parts:
            part.build((None, 3))

    def call(self, x):
        return [part(x) for part in self.parts]

    def loss_of(self, i, x, y):
        return keras.ops.mean((keras.ops.cast(self.parts[i](x[:, i]), "float32") - y[:, i]) ** 2)

    def train_step(self, data):
        x, y = (keras.ops.convert_to_tensor(part) for part in data[:2])
        for i, optimizer in enumerate(self.optimizers):
            variables = self.parts[i].trainable_variables
            # The way of tf.keras, then no scaling at all: the gradients are unscaled by both.
            scaling = {} if self.unscales() is None else {"scale_loss": optimizer.scale_loss}
            loss, grads = loss_and_gradients(lambda i=i: self.loss_of(i, x, y), variables, **scaling)
            if self.unscales():
                grads = optimizer.get_unscaled_gradients(grads)
            optimizer.apply(grads, variables)
            for metric in (self.trackers[i], self.sums[i]):
                metric.update_state(keras.ops.stop_gradient(loss))
        return self.get_metrics_result()


def two_losses(**options):
    model = TwoLosses(options.pop("unscales", lambda: False))
    model.compile(**options)
    model.optimizers = [keras.optimizers.SGD(0.0), keras.optimizers.SGD(0.0)]
    return prepare(model, "mixed_float16", loss_scale=2.0**10)


def two_targets(*pairs):
    y = np.asarray(pairs, "float32")
    return np.ones((len(y), 2, 3), "float32"), y[:, :, None]


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "torch")
@pytest.mark.filterwarnings("ignore:1 of 3 steps skipped in epoch 1:UserWarning")
@pytest.mark.parametrize("options", FIT_MODES)
def test_a_metric_that_a_skipped_update_made_non_finite_is_put_back_whole(options):
    """Only one of the two updates of the step is skipped: what is of the other one counts."""
    model = two_losses(**options)
    x, y = two_targets([2.0, 1.0], [np.inf, 5.0], [4.0, 2.0])
    history = model.fit(x, y, batch_size=1, shuffle=False, verbose=0).history
    assert [int(optimizer.skipped_steps) for optimizer in model.optimizers] == [1, 0]
    assert history["a"] == [(4.0 + 16.0) / 2] and history["sum_a"] == [20.0]
    assert history["b"] == [(1.0 + 25.0 + 4.0) / 3] and history["sum_b"] == [30.0]
    # And where nothing of the one has counted yet, its loss is not 0.
    logs = model.train_on_batch(*two_targets([np.inf, 5.0]), return_dict=True)
    assert np.isnan(logs["a"]) and logs["b"] == 25.0


@pytest.mark.backends("tensorflow", "torch")
def test_a_guarded_step_knows_nothing_of_how_the_last_one_unscaled():
    now = [True]
    model = two_losses(unscales=lambda: now[0], run_eagerly=keras.backend.backend() == "tensorflow")
    for optimizer in model.optimizers:
        optimizer.learning_rate = 0.25
    x, y = two_targets([8.0, 8.0])
    model.train_on_batch(x, y)
    # By the gradient at a bias of 0, -2 * 8, it moves to 4, and so do the weights; the output is then 16.
    now[0] = None
    with pytest.warns(UserWarning, match="the loss was not scaled") as warned:
        model.train_on_batch(x, y)
    assert sum("the loss was not scaled" in str(warning.message) for warning in warned) == 2
    # The gradients were unscaled, and taken so: 2 * 8 the other way.
    for part in model.parts:
        np.testing.assert_allclose(keras.ops.convert_to_numpy(part.bias), [0.0])


def test_an_optimizer_put_in_after_prepare_is_named():
    model = dropout_model()
    model.compile("sgd", "mse")
    prepare(model, "mixed_bfloat16")
    model.optimizer = keras.optimizers.SGD(0.1)
    with pytest.warns(UserWarning, match="call `mpkeras.prepare\\(model\\)` again"):
        model.train_on_batch(X[0], Y[0])


# On JAX Keras carries the state of `model.optimizer` alone, and on torch its `fit` builds that one.
@pytest.mark.backends("tensorflow")
def test_logs_tell_of_an_optimizer_that_is_in_use():
    """`super().compile()` gives the model one of its own, which comes first and is never built."""

    class OwnOptimizer(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)
            self.own_optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.1), loss_scale=64.0)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            x, y = (keras.ops.convert_to_tensor(part) for part in data)
            variables, scale_loss = self.dense.trainable_variables, self.own_optimizer.scale_loss
            _, grads = loss_and_gradients(lambda: keras.ops.mean((self(x) - y) ** 2), variables, scale_loss)
            self.own_optimizer.apply(grads, variables)
            return {"seen": keras.ops.sum(x)}

    model = OwnOptimizer()
    model(X[0])
    model.compile(run_eagerly=True)
    prepare(model, "float32", rollback=True)
    assert not model.optimizer.built
    logs = model.fit(X[0], Y[0], batch_size=4, verbose=0).history
    assert (logs["loss_scale"], logs["skipped_steps"]) == ([64.0], [0.0])
