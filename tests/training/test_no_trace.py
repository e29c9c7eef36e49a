"""G2 at full width: whatever holds state, a run with bad batches is bit for bit the run without them."""

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.callbacks import MixedPrecision
from tests.step_modes import snapshot

BACKEND = keras.backend.backend()
COMPILED = {"tensorflow": [True, False], "jax": [True], "torch": [False]}[BACKEND]
WAYS = ["fit", "make_train_step"]
TIMESTEPS, FEATURES = 5, 4


@keras.saving.register_keras_serializable("tests")
class Lookahead(keras.optimizers.SGD):
    """Every third step the weights go half-way back to slow weights: averaged weights of a user's own."""

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.slow = self.add_optimizer_variables(variables, "slow")

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate)
        slow = self.slow[self._get_variable_index(variable)]
        is_due = keras.ops.equal(keras.ops.mod(self.iterations + 1, 3), 0)
        fast, slow_value = keras.ops.convert_to_tensor(variable), keras.ops.convert_to_tensor(slow)
        mean = (fast + slow_value) / 2
        self.assign(variable, keras.ops.where(is_due, mean, fast))
        self.assign(slow, keras.ops.where(is_due, mean, slow_value))


class TakesPart(keras.layers.Layer):
    """Counts its calls and averages its inputs, as layers of users do."""

    def build(self, input_shape):
        self.calls = self.add_weight(shape=(), dtype="int32", trainable=False, initializer="zeros")
        self.mean = self.add_weight(shape=(), dtype="float32", trainable=False, initializer="zeros", autocast=False)

    def call(self, x, training=False):
        if training:
            self.calls.assign(self.calls + 1)
            mean = keras.ops.mean(keras.ops.cast(x, "float32"))
            self.mean.assign(keras.ops.convert_to_tensor(self.mean) * 0.9 + mean * 0.1)
        return x


LAYERS = {
    "dense": lambda: keras.layers.Dense(6, activation="gelu"),
    "batch normalization": lambda: keras.layers.BatchNormalization(momentum=0.5),
    "dropout": lambda: keras.layers.Dropout(0.3, seed=3),
    "noise": lambda: keras.layers.GaussianNoise(0.1, seed=4),
    "layer normalization": lambda: keras.layers.LayerNormalization(),
    "lstm": lambda: keras.layers.LSTM(4, return_sequences=True, recurrent_dropout=0.2, dropout=0.1, seed=5),
    "gru": lambda: keras.layers.GRU(4, return_sequences=True, seed=6),
    "stateful": lambda: keras.layers.SimpleRNN(4, return_sequences=True, stateful=True, seed=7),
    "convolution": lambda: keras.layers.Conv1D(4, 3, padding="same"),
    "spectral normalization": lambda: keras.layers.SpectralNormalization(keras.layers.Dense(4)),
    "state of its own": lambda: TakesPart(),
}
OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=1.0),
    "momentum": lambda: keras.optimizers.SGD(0.01, momentum=0.9, nesterov=True, clipvalue=0.5),
    "averages": lambda: keras.optimizers.SGD(0.01, use_ema=True, ema_momentum=0.5),
    "overwriting averages": lambda: keras.optimizers.Adam(
        0.01, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2
    ),
    "lookahead": lambda: Lookahead(0.01),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, centered=True, momentum=0.5),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "lion": lambda: keras.optimizers.Lion(0.01),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
}


def model_of(names):
    keras.utils.set_random_seed(11)
    inputs = keras.Input(batch_shape=(4, TIMESTEPS, FEATURES))
    x = inputs
    for name in names:
        x = LAYERS[name]()(x)
    return keras.Model(inputs, keras.layers.Dense(2)(keras.layers.GlobalAveragePooling1D()(x)))


def batches(count, seed):
    rng = np.random.default_rng(seed)
    return [
        (rng.normal(size=(4, TIMESTEPS, FEATURES)).astype("float32"), rng.normal(size=(4, 2)).astype("float32"))
        for _ in range(count)
    ]


def spoiled(batch, fault):
    x, y = batch[0].copy(), batch[1].copy()
    if fault == "gradient":
        # The loss stays finite; times the scale its gradient is beyond float16.
        y += 1e4
    elif fault == "target":
        y[1] = np.inf
    else:
        # All of a sample: Dropout may leave out single numbers.
        x[1] = np.nan
    return x, y


def train(model, optimizer, sequence, *, way, jit_compile, policy):
    """Trains on `(x, y)` batches; returns the bytes of everything that training changes, and the skips.

    Each `train_on_batch` starts its metrics anew, so the last batch must be a good one to compare them.
    """
    scale = 2.0**10 if policy == "mixed_float16" else None
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=jit_compile)
    mpkeras.prepare(model, policy, loss_scale=scale)
    metrics = list(model.metrics_variables)
    if way == "fit":
        for x, y in sequence:
            model.train_on_batch(x, y)
        metrics = list(model.metrics_variables)
    else:
        metric = keras.metrics.MeanAbsoluteError()
        step = mpkeras.make_train_step(model, model.optimizer, "mse", jit_compile=jit_compile, metrics=[metric])
        for x, y in sequence:
            step(x, y)
        metrics = list(metric.variables)
    optimizer = model.optimizer
    return snapshot(model.variables + optimizer.inner_optimizer.variables + metrics), int(optimizer.skipped_steps)


def assert_no_trace(make_model, make_optimizer, sequence, faults, **options):
    """`faults`: by position, what spoils an additional batch before that position."""
    with_faults = []
    for i, batch in enumerate(sequence):
        if i in faults:
            with_faults.append(spoiled(sequence[-1 - i], faults[i]))
        with_faults.append(batch)
    state, skipped = train(make_model(), make_optimizer(), with_faults, **options)
    clean_state, clean_skipped = train(make_model(), make_optimizer(), sequence, **options)
    assert (skipped, clean_skipped) == (len(faults), 0)
    assert state == clean_state


@pytest.mark.parametrize("seed", range(12))
def test_random_models_optimizers_and_faults(seed):
    """Property: drawn by the seed; each layer and each optimizer comes up."""
    rng = np.random.default_rng(seed)
    names, optimizers = list(LAYERS), list(OPTIMIZERS)
    # In turn, so that none is left out, and others beside them.
    layers = [names[seed % len(names)], *rng.choice(names, size=2)]
    policy = ["mixed_float16", "mixed_bfloat16", "float32"][seed % 3]
    faults = ["input", "target"] + (["gradient"] if policy == "mixed_float16" else [])
    positions = rng.choice(5, size=2, replace=False)
    assert_no_trace(
        lambda: model_of(layers),
        OPTIMIZERS[optimizers[seed % len(optimizers)]],
        batches(5, seed),
        {int(position): faults[rng.integers(len(faults))] for position in positions},
        way=WAYS[(seed // 3) % 2],
        jit_compile=COMPILED[(seed // 2) % len(COMPILED)],
        policy=policy,
    )


@pytest.mark.backends("tensorflow", "jax")
@pytest.mark.parametrize("jit_compile", COMPILED)
@pytest.mark.parametrize("way", WAYS)
def test_float8_layers(way, jit_compile):
    """Their scales and histories are overwritten with their gradients, which are no gradients."""

    def make():
        model = model_of(["dense"])
        model.layers[-1].quantize("float8")
        return model

    assert_no_trace(
        make,
        OPTIMIZERS["adam"],
        batches(4, 1),
        {1: "target", 3: "input"},
        way=way,
        jit_compile=jit_compile,
        policy="mixed_bfloat16",
    )


@pytest.mark.parametrize("jit_compile", COMPILED)
@pytest.mark.parametrize("way", WAYS)
def test_accumulating_optimizers(way, jit_compile):
    """With windows that end where they began, the update takes the mean over the finite batches: the sums of the
    window without the spoiled one are the same, bit for bit."""
    sequence = batches(5, 2)

    def run(with_fault):
        model = model_of(["batch normalization", "dropout"])
        optimizer = mpkeras.LossScaleOptimizer(
            keras.optimizers.SGD(0.01, gradient_accumulation_steps=3), loss_scale=2.0**10
        )
        bad = [spoiled(sequence[4], "input")] if with_fault else []
        used = [*sequence[:3], *bad, sequence[3]]
        state, _ = train(model, optimizer, used, way=way, jit_compile=jit_compile, policy="mixed_float16")
        return state, [np.asarray(keras.ops.convert_to_numpy(v.value)) for v in optimizer.window.sums]

    (state, sums), (clean_state, clean_sums) = run(True), run(False)
    assert state == clean_state
    for a, b in zip(sums, clean_sums, strict=True):
        assert a.tobytes() == b.tobytes()
    assert any(np.abs(total).max() > 0 for total in sums)


@pytest.mark.backends("tensorflow", "jax")
@pytest.mark.filterwarnings("ignore:2 of 8 steps skipped in epoch 1:UserWarning")
@pytest.mark.parametrize("jit_compile", COMPILED)
@pytest.mark.parametrize("steps", [2, 4])
def test_steps_per_execution(steps, jit_compile):
    sequence = batches(8, 3)

    def run(with_faults):
        model = model_of(["batch normalization", "dropout"])
        model.compile("adam", "mse", metrics=["mae"], jit_compile=jit_compile, steps_per_execution=steps)
        used = list(sequence)
        if with_faults:
            used[2] = spoiled(used[2], "input")
            used[5] = spoiled(used[5], "target")
        else:
            used = [batch for i, batch in enumerate(used) if i not in (2, 5)]
        history = model.fit(
            np.concatenate([x for x, _ in used]),
            np.concatenate([y for _, y in used]),
            batch_size=4,
            shuffle=False,
            verbose=0,
            callbacks=[MixedPrecision("mixed_float16", loss_scale=2.0**10)],
        )
        return history.history, snapshot(model.variables + model.optimizer.inner_optimizer.variables)

    (history, state), (clean_history, clean_state) = run(True), run(False)
    assert state == clean_state
    assert history["skipped_steps"] == [2]
    assert history["loss"] == clean_history["loss"] and np.isfinite(history["loss"]).all()
    assert history["mae"] == clean_history["mae"]


@pytest.mark.parametrize("jit_compile", COMPILED)
def test_an_epoch_of_only_skipped_steps_says_so_and_reports_no_nan(jit_compile):
    model = model_of(["dense"])
    model.compile("adam", "mse", jit_compile=jit_compile)
    x, y = spoiled(batches(1, 0)[0], "input")
    with pytest.warns(UserWarning, match="All 1 steps of epoch 1 were skipped.*loss itself was not finite"):
        history = model.fit(x, y, batch_size=4, verbose=0, callbacks=[MixedPrecision("mixed_float16")])
    assert history.history["loss"] == [0.0]
    assert history.history["skipped_steps"] == [1]
