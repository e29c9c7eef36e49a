"""G2: a run with bad batches is, bit for bit, the run without them."""

import keras
import numpy as np
import pytest

from mpkeras.callbacks import MixedPrecision
from mpkeras.training.prepare import prepare
from tests.step_modes import snapshot

MODES = {
    "tensorflow": [
        pytest.param({"run_eagerly": True}, id="eager"),
        pytest.param({"jit_compile": False}, id="graph"),
        pytest.param({"jit_compile": True}, id="xla"),
    ],
    "jax": [pytest.param({"run_eagerly": True}, id="eager"), pytest.param({"jit_compile": True}, id="jit")],
    "torch": [pytest.param({}, id="eager")],
}[keras.backend.backend()]

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


@pytest.mark.parametrize("options", MODES)
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
    # the three spoiled batches report no loss, the others the same one
    assert [losses[i] for i in (1, 2, 4, 6)] == clean_losses
    assert np.isfinite(losses).all()


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


@pytest.mark.parametrize("options", MODES)
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


@pytest.mark.parametrize("options", MODES)
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


@pytest.mark.filterwarnings("ignore:1 of 3 steps skipped in epoch 1:UserWarning")
@pytest.mark.parametrize("options", MODES)
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


@pytest.mark.parametrize("options", MODES)
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


@pytest.mark.parametrize("options", MODES)
def test_a_loss_that_is_not_finite_leaves_the_scale_alone(options):
    """P7: the forward pass is at fault; gradients that overflow alone do lower the scale."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.1), "mse", **options)
    prepare(model, "mixed_float16", loss_scale="dynamic")
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
                prepare(model, policy)
                model.train_on_batch(X[0], Y[0])
        else:
            model.train_on_batch(X[0], Y[0])
        for i in range(1, 5):
            logs = model.train_on_batch(X[i], Y[i], return_dict=True)
        assert logs["mine"] == 3.0
        return [keras.ops.convert_to_numpy(v) for v in model.trainable_variables]

    for half, single in zip(run("mixed_float16"), run("float32"), strict=True):
        np.testing.assert_allclose(half, single, rtol=1e-2, atol=2e-3)  # float16 has 11 significant bits


def test_compile_after_prepare_is_named():
    model = batchnorm_dropout_model()
    model.compile("sgd", "mse")
    prepare(model, "mixed_bfloat16")
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="call `mpkeras.prepare\\(model\\)` again"):
        model.train_on_batch(X[0], Y[0])
