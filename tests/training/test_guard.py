"""G2: a run with bad batches is, bit for bit, the run without them."""

import keras
import numpy as np
import pytest

from mpkeras.callbacks import MixedPrecision
from mpkeras.policies.loss_scaling import DynamicLossScale
from mpkeras.training.prepare import prepare
from tests.sixteen_bits import without_outputs
from tests.step_modes import FIT_MODES, snapshot

rng = np.random.default_rng(3)
X = rng.normal(size=(8, 4, 6)).astype("float32")
Y = rng.normal(size=(8, 4, 2)).astype("float32")


def batchnorm_dropout_model():
    keras.utils.set_random_seed(11)
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, activation="relu")(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dropout(0.5, seed=5)(x)
    return keras.Model(inputs, keras.layers.Dense(2)(x))


def all_variables(model):
    optimizer = model.optimizer
    return model.variables + optimizer.inner_optimizer.variables


def train(model, batches, **compile_options):
    """One `train_on_batch` a batch; returns the losses."""
    return [float(model.train_on_batch(x, y)) for x, y in batches]


def spoiled(x):
    x = x.copy()
    x[1, 2] = np.inf
    return x


@pytest.mark.slow
@pytest.mark.parametrize("options", FIT_MODES)
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_bad_batches_leave_no_trace(policy, options):
    def run(with_faults):
        model = batchnorm_dropout_model()
        model.compile(keras.optimizers.Adam(0.01, use_ema=True), "mse", **options)
        scale = 256.0 if policy == "mixed_float16" else None
        prepare(model, policy, loss_scale=scale)
        batches = []
        for i in range(4):
            if with_faults and i in (0, 2, 3):
                batches.append((spoiled(X[i + 4]), Y[i]))
            batches.append((X[i], Y[i]))
        losses = train(model, batches)
        return snapshot(all_variables(model)), losses, int(model.optimizer.skipped_steps)

    with_faults, losses, skipped = run(True)
    without, clean_losses, none_skipped = run(False)
    assert (skipped, none_skipped) == (3, 0)
    assert with_faults == without
    # the three spoiled batches computed no finite loss, the others the same one
    assert [losses[i] for i in (1, 2, 4, 6)] == clean_losses
    assert np.isnan([losses[i] for i in (0, 3, 5)]).all()


@pytest.mark.slow
def test_a_skipped_batch_leaves_no_trace_in_dropout_without_a_seed():
    """On torch such a layer draws from torch's own generator."""

    def run(batches):
        keras.utils.set_random_seed(11)
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dropout(0.5), keras.layers.Dense(2)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
        prepare(model, "mixed_bfloat16")
        train(model, batches)
        return snapshot(all_variables(model)), int(model.optimizer.skipped_steps)

    with_fault, skipped = run([(X[0], Y[0]), (X[1] * np.inf, Y[1]), (X[2], Y[2])])
    without, none_skipped = run([(X[0], Y[0]), (X[2], Y[2])])
    assert (skipped, none_skipped) == (1, 0)
    assert with_fault == without


@pytest.mark.slow
@pytest.mark.parametrize("options", FIT_MODES)
def test_a_frozen_layer_that_the_model_updates_itself_is_put_back(options):
    """A target network: its weights are not trained, but follow others in the forward pass."""

    class Averaging(keras.Model):
        def __init__(self):
            super().__init__()
            self.online = keras.layers.Dense(2)
            self.target = keras.layers.Dense(2, trainable=False)
            self.online.build((None, 6))
            self.target.build((None, 6))

        def call(self, x, training=False):
            if training:
                for slow, fast in zip(self.target.weights, self.online.weights, strict=True):
                    slow.assign(0.5 * slow.value + 0.5 * fast.value + keras.ops.sum(x) * 0.0)
            return self.online(x)

    model = Averaging()
    model.compile(keras.optimizers.SGD(0.1), "mse", **options)
    prepare(model, "float32")
    model.train_on_batch(X[0], Y[0])
    before = snapshot(model.variables)
    model.train_on_batch(spoiled(X[1]), Y[1])
    assert snapshot(model.variables) == before
    model.train_on_batch(X[2], Y[2])
    assert snapshot(model.target.variables) != before[2:4]
    assert all(np.isfinite(keras.ops.convert_to_numpy(v.value)).all() for v in model.variables)


@pytest.mark.slow
@pytest.mark.parametrize("options", FIT_MODES)
def test_without_rollback_only_the_weights_are_kept(options):
    model = batchnorm_dropout_model()
    model.compile(keras.optimizers.SGD(0.01), "mse", **options)
    prepare(model, "mixed_float16", loss_scale=256.0, rollback=False)
    model.train_on_batch(X[0], Y[0])
    weights = snapshot(model.trainable_variables)
    model.train_on_batch(spoiled(X[1]), Y[1])
    assert snapshot(model.trainable_variables) == weights
    statistics = [keras.ops.convert_to_numpy(v) for v in model.non_trainable_weights]
    assert not all(np.isfinite(v).all() for v in statistics)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:1 of 3 steps skipped in epoch 1:UserWarning")
@pytest.mark.parametrize("options", FIT_MODES)
def test_an_epochs_loss_is_that_of_its_applied_steps(options):
    def run(xs, ys):
        model = batchnorm_dropout_model()
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"], **options)
        history = model.fit(
            np.concatenate(xs),
            np.concatenate(ys),
            batch_size=4,
            shuffle=False,
            verbose=0,
            callbacks=[MixedPrecision("mixed_float16", loss_scale=64.0)],
        )
        return history.history, snapshot(all_variables(model))

    faulty, faulty_state = run([X[0], spoiled(X[1]), X[2]], [Y[0], Y[1], Y[2]])
    clean, clean_state = run([X[0], X[2]], [Y[0], Y[2]])
    assert faulty_state == clean_state
    assert faulty["loss"] == clean["loss"]
    assert faulty["mae"] == clean["mae"]
    assert faulty["skipped_steps"] == [1]


@pytest.mark.parametrize("options", FIT_MODES)
def test_batchnorm_statistics_never_become_non_finite_even_on_an_applied_step(options):
    """Inputs of 1e25 have a float32 variance of inf; the loss here does not depend on them."""
    x = np.ones((4, 3), "float32")

    class SideStatistics(keras.Model):
        def __init__(self):
            super().__init__()
            self.side = keras.layers.BatchNormalization(center=False, scale=False)
            self.head = keras.layers.Dense(1)

        def call(self, x, training=False):
            large = keras.ops.convert_to_tensor([[1e25], [-1e25], [1e24], [0.0]], "float32")
            self.side(large * keras.ops.cast(x, "float32"), training=training)
            return self.head(x)

    model = SideStatistics()
    model.compile(keras.optimizers.SGD(0.1), "mse", **options)
    model(x)
    prepare(model, "float32")
    before = [keras.ops.convert_to_numpy(v.value) for v in model.head.trainable_variables]
    model.train_on_batch(x, np.ones((4, 1), "float32"))
    assert int(model.optimizer.skipped_steps) == 0
    after = [keras.ops.convert_to_numpy(v.value) for v in model.head.trainable_variables]
    assert any((a != b).any() for a, b in zip(after, before, strict=True))
    for v in model.side.non_trainable_variables:
        assert np.isfinite(keras.ops.convert_to_numpy(v.value)).all(), v.path


@pytest.mark.parametrize("options", FIT_MODES)
def test_a_loss_that_is_not_finite_leaves_the_scale_alone(options):
    """P7: the forward pass is at fault; gradients that overflow alone do lower the scale."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.1), "mse", **options)
    prepare(model, without_outputs("mixed_float16"), loss_scale="dynamic")
    good, target = np.ones((2, 4), "float32"), np.full((2, 1), 0.1, "float32")
    model.train_on_batch(good, target)
    for _ in range(3):
        model.train_on_batch(np.full((2, 4), np.inf, "float32"), target)
    assert float(model.optimizer.dynamic_scale) == 2.0**15
    assert int(model.optimizer.consecutive_skips) == 3
    # a loss of about 1e8, finite, times 2**15 is beyond float16 in the backward pass
    model.train_on_batch(good, target + 1e4)
    assert float(model.optimizer.dynamic_scale) == 2.0**14
    assert int(model.optimizer.skipped_steps) == 4


@keras.saving.register_keras_serializable("tests")
def infinite(y_true, y_pred):
    del y_true
    return keras.ops.cast(keras.ops.full(keras.ops.shape(y_pred)[:1], np.inf), "float32")


@pytest.mark.slow
@pytest.mark.parametrize("options", FIT_MODES)
def test_a_metric_whose_name_ends_in_loss_has_no_say_in_why_a_step_was_skipped(options):
    """The loss is finite, so the scale is at fault and comes down."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    aux_loss = keras.metrics.MeanMetricWrapper(infinite, name="aux_loss")
    model.compile(keras.optimizers.SGD(0.0), "mse", metrics=[aux_loss], **options)
    prepare(model, without_outputs("mixed_float16"), loss_scale=DynamicLossScale(2.0**24, max_scale=2.0**24))
    # Its gradient is 0, and counts: from then on no batch is taken again.
    model.train_on_batch(np.full((4, 4), 0.01, "float32"), np.zeros((4, 1), "float32"))
    # The loss is 1e4, its gradient at the output of each of four rows is -2 * 100 / 4 = -50, at the bias their sum.
    for _ in range(20):
        model.train_on_batch(np.full((4, 4), 0.01, "float32"), np.full((4, 1), 100.0, "float32"))
    # 200 * 2^8 = 51200 is below the largest float16, 65504, and twice that is not.
    assert float(model.optimizer.loss_scale) == 2.0**8
    assert int(model.optimizer.skipped_steps) == 16
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
        x, y = data[:2]

        def scaled_loss(trainable, x, y):
            y_pred, _ = self.stateless_call(trainable, non_trainable, x)
            loss = keras.ops.mean((keras.ops.cast(y_pred, "float32") - y) ** 2)
            with keras.StatelessScope(list(zip(self.optimizer.variables, optimizer_values, strict=True))):
                return self.optimizer.scale_loss(loss), loss

        grads, loss = self.differentiate(scaled_loss, trainable, x, y)
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

    def jit_of_the_loss(f, *args):
        return value_and_grad(jax.jit(f), *args)

    def vjp(f, trainable, x, y):
        _, pull, loss = jax.vjp(lambda trainable: f(trainable, x, y), trainable, has_aux=True)
        return pull(jnp.ones(()))[0], loss

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

    seen = (value_and_grad, vjp, second_order)
    unseen = (checkpoint, inner_jit, jit_of_the_loss, micro_batches, examples)
    return {way.__name__: (way, way in seen) for way in seen + unseen}


@pytest.mark.backends("jax")
@pytest.mark.parametrize("options", FIT_MODES)
@pytest.mark.parametrize(
    "name",
    ["value_and_grad", "vjp", "second_order", "checkpoint", "inner_jit", "jit_of_the_loss"]
    + ["micro_batches", "examples"],
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
    assert all(np.isfinite(keras.ops.convert_to_numpy(v)).all() for v in model.variables)


@pytest.mark.backends("tensorflow")
def test_user_written_train_step_is_honoured_and_unscaled_gradients_are_taken_as_they_are():
    """P3: this step, as many guides write it, never scales the loss."""
    import tensorflow as tf

    class Model(keras.Model):
        def train_step(self, data):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                loss = self.compute_loss(y=y, y_pred=self(x, training=True))
            grads = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(grads, self.trainable_variables)
            return {"loss": loss, "mine": tf.constant(3.0)}

    def run(policy):
        keras.utils.set_random_seed(2)
        inputs = keras.Input((6,))
        model = Model(inputs, keras.layers.Dense(2)(inputs))
        model.compile(keras.optimizers.SGD(0.05), "mse")
        if policy != "float32":
            with pytest.warns(UserWarning, match="not scaled since the last step: its gradients are taken as"):
                prepare(model, without_outputs(policy))
                model.train_on_batch(X[0], Y[0])
        else:
            model.train_on_batch(X[0], Y[0])
        for i in range(1, 5):
            logs = model.train_on_batch(X[i], Y[i], return_dict=True)
        assert logs["mine"] == 3.0
        return [keras.ops.convert_to_numpy(v) for v in model.trainable_variables]

    for half, single in zip(run("mixed_float16"), run("float32"), strict=True):
        np.testing.assert_allclose(half, single, rtol=1e-2, atol=2e-3)  # float16 has 11 significant bits


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
            scale = optimizer.scale_loss if self.unscales() is not None else lambda loss: loss
            if keras.backend.backend() == "tensorflow":
                import tensorflow as tf

                with tf.GradientTape() as tape:
                    loss = self.loss_of(i, x, y)
                    scaled_loss = scale(loss)
                grads = tape.gradient(scaled_loss, variables)
            else:
                self.zero_grad()
                loss = self.loss_of(i, x, y)
                scale(loss).backward()
                grads = [variable.value.grad for variable in variables]
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
    model = batchnorm_dropout_model()
    model.compile("sgd", "mse")
    prepare(model, "mixed_bfloat16")
    model.optimizer = keras.optimizers.SGD(0.1)
    with pytest.warns(UserWarning, match="call `mpkeras.prepare\\(model\\)` again"):
        model.train_on_batch(X[0], Y[0])
