"""G2 at full width: whatever holds state, a run with bad batches is bit for bit the run without them."""

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.callbacks import MixedPrecision
from mpkeras.training.state import load_state_dict, state_dict
from tests.step_modes import FIT_MODES, snapshot

# What a skipped step leaves behind is the first of all promises: the whole matrix on the backend that compiles all.
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


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*range(4), *(pytest.param(i, marks=pytest.mark.matrix) for i in range(4, 12))])
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", COMPILED)
def test_an_epoch_of_only_skipped_steps_says_so_and_reports_no_loss_of_0(jit_compile):
    model = model_of(["dense"])
    model.compile("adam", "mse", jit_compile=jit_compile)
    x, y = spoiled(batches(1, 0)[0], "input")
    with pytest.warns(UserWarning, match="All 1 steps of epoch 1 were skipped.*loss itself was not finite"):
        history = model.fit(x, y, batch_size=4, verbose=0, callbacks=[MixedPrecision("mixed_float16")])
    assert np.isnan(history.history["loss"]).all()
    assert history.history["skipped_steps"] == [1]


# ------------------------------------------------------------------------------------- what else a step writes to


rng = np.random.default_rng(8)
ROWS_X = rng.normal(size=(12, FEATURES)).astype("float32")
ROWS_Y = rng.normal(size=(12, 2)).astype("float32")


def norm_model(normalizes, **options):
    """The loss is a sum, 0 where there are no rows; the momentum of the optimizer moves weights all the same."""
    keras.utils.set_random_seed(11)
    inputs = keras.Input((FEATURES,))
    x = keras.layers.Dense(3)(inputs)
    x = keras.layers.BatchNormalization(momentum=0.5)(x) if normalizes else x
    model = keras.Model(inputs, keras.layers.Dense(2)(x))
    loss = keras.losses.MeanSquaredError(reduction="sum")
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, metrics=["mae"], **options)
    return mpkeras.prepare(model, "mixed_bfloat16")


class Batches(keras.utils.PyDataset):
    """Batches of these numbers of rows; on TensorFlow the graph does not know how many."""

    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        start = sum(self.rows[:i])
        return ROWS_X[start : start + self.rows[i]], ROWS_Y[start : start + self.rows[i]]


@pytest.mark.slow
@pytest.mark.parametrize("options", FIT_MODES)
def test_a_batch_without_rows_is_a_skipped_step(options):
    def run(rows):
        # Statistics of no rows are NaN, without them gradients are 0; one of both in each mode.
        model = norm_model(normalizes="jit_compile" not in options, **options)
        history = model.fit(Batches(rows), epochs=2, shuffle=False, verbose=0).history
        state = snapshot(model.variables + model.optimizer.inner_optimizer.variables)
        return state, history["loss"], history["mae"], model.optimizer

    state, loss, mae, optimizer = run([4, 0, 3, 4, 0])
    clean_state, clean_loss, clean_mae, _ = run([4, 3, 4])
    assert state == clean_state
    assert (loss, mae) == (clean_loss, clean_mae)
    assert int(optimizer.skipped_steps) == 4
    assert int(optimizer.iterations) == 6


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", COMPILED)
def test_make_train_step_skips_a_batch_without_rows(jit_compile):
    inputs = keras.Input((FEATURES,))
    model = keras.Sequential([inputs, keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(2)])
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.01, momentum=0.9), loss_scale=4.0)
    loss = keras.losses.MeanSquaredError(reduction="sum")
    metric = keras.metrics.MeanAbsoluteError(name="mae")
    step = mpkeras.make_train_step(model, optimizer, loss, jit_compile=jit_compile, metrics=[metric])
    first = step(ROWS_X[:4], ROWS_Y[:4])
    before = snapshot(model.variables + optimizer.inner_optimizer.variables + metric.variables)
    result = step(ROWS_X[:0], ROWS_Y[:0])
    assert np.isnan(float(result["loss"])) and bool(result["skipped"])
    assert float(result["loss_scale"]) == 4.0
    assert float(result["mae"]) == float(first["mae"])
    assert snapshot(model.variables + optimizer.inner_optimizer.variables + metric.variables) == before
    assert not bool(step(ROWS_X[:4], ROWS_Y[:4])["skipped"])


class Fails(keras.layers.Layer):
    now = False

    def call(self, x):
        if self.now:
            raise RuntimeError("late")
        return x


@pytest.mark.parametrize("options", FIT_MODES[:1])
def test_a_step_that_raises_leaves_no_trace(options):
    """Where steps run op by op; one that is compiled raises before anything ran."""
    sequence = batches(3, 4)

    def run(raises):
        last = Fails()
        model = model_of(["batch normalization", "dropout", "state of its own", "spectral normalization"])
        model = keras.Sequential([keras.Input(batch_shape=(4, TIMESTEPS, FEATURES)), model, last])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **options)
        mpkeras.prepare(model, "float32")
        model.train_on_batch(*sequence[0])
        if raises:
            last.now = True
            with pytest.raises(RuntimeError, match="late"):
                model.train_on_batch(sequence[1][0] * np.inf, sequence[1][1])
            assert all(np.isfinite(keras.ops.convert_to_numpy(v.value)).all() for v in model.variables)
            last.now = False
        model.train_on_batch(*sequence[2])
        return snapshot(model.variables + model.optimizer.variables + model.metrics_variables)

    assert run(raises=True) == run(raises=False)


@pytest.mark.backends("tensorflow", "torch")
def test_an_inner_guarded_step_leaves_the_outer_ones_watch_alone():
    """A part is trained by a step of its own, and then written by the forward pass of the whole."""

    class Halves(keras.layers.Layer):
        def build(self, shape):
            self.kernel = self.add_weight(shape=(), initializer="ones")

        def call(self, x, training=False):
            if training:
                self.kernel.assign(self.kernel.value * 0.5)
            return x * self.kernel.value

    class Whole(keras.Model):
        def __init__(self, part):
            super().__init__()
            self.part, self.dense = part, keras.layers.Dense(1)

        def call(self, x, training=False):
            return self.dense(self.part(x, training=training))

        def train_step(self, data):
            self.part.train_step((data[0], keras.ops.ones((2, 3))))
            return super().train_step(data)

    part = keras.Sequential([keras.Input((3,)), Halves()])
    whole = Whole(part)
    whole(np.ones((2, 3), "float32"))
    for model in (part, whole):
        model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=BACKEND == "tensorflow")
        mpkeras.prepare(model, "float32")
    kernel = part.layers[0].kernel
    kernel.assign(3.0)
    whole.train_on_batch(np.full((2, 3), np.inf, "float32"), np.ones((2, 1), "float32"))
    assert (int(whole.optimizer.skipped_steps), int(part.optimizer.skipped_steps)) == (1, 1)
    assert keras.ops.convert_to_numpy(kernel) == 3.0
    assert "assign" not in vars(kernel)
    whole.train_on_batch(np.ones((2, 3), "float32"), np.ones((2, 1), "float32"))
    assert keras.ops.convert_to_numpy(kernel) == 0.75


@pytest.mark.backends("tensorflow", "torch")
def test_a_step_of_a_part_leaves_what_is_known_of_the_step_around_it():
    """The part's loss is scaled, the part is trained by a step of its own, and then the gradients are applied."""

    class Around(keras.Model):
        def __init__(self, part):
            super().__init__()
            self.part = part

        def call(self, x):
            return self.part(x)

        def train_step(self, data):
            kernel, optimizer = self.part.trainable_variables[0], self.part.optimizer
            if BACKEND == "torch":
                loss = keras.ops.mean(self.part(data[0]))
                self.zero_grad()
                optimizer.scale_loss(loss).backward()
                grad = kernel.value.grad.clone()
            else:
                import tensorflow as tf

                with tf.GradientTape() as tape:
                    loss = keras.ops.mean(self.part(data[0]))
                    scaled_loss = optimizer.scale_loss(loss)
                grad = tape.gradient(scaled_loss, kernel.value)
            # Of no gradient: what the part predicts is what it is to predict.
            self.part.train_step(data)
            optimizer.apply([grad], [kernel])
            return {"loss": loss}

    part = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    whole = Around(part)
    whole(np.ones((2, 1), "float32"))
    for model in (part, whole):
        model.compile(keras.optimizers.SGD(0.25), "mse")
        mpkeras.prepare(model, "float32", loss_scale=4.0)
    # Without what was noted, a warning says that the loss was not scaled, and warnings are errors here.
    whole.train_on_batch(np.ones((2, 1), "float32"), np.ones((2, 1), "float32"))
    assert keras.ops.convert_to_numpy(part.trainable_variables[0]) == 0.75
    assert (int(part.optimizer.iterations), int(part.optimizer.skipped_steps)) == (2, 0)


@pytest.mark.backends("tensorflow", "torch")
def test_an_update_before_the_skipped_step_of_a_part_counts_for_the_step_around_it():
    """Both by one optimizer: what the step around has written stays, as not all of its updates were skipped."""

    class Around(keras.Model):
        def __init__(self, part):
            super().__init__()
            self.part = part
            self.calls = self.add_weight(shape=(), dtype="int32", trainable=False, initializer="zeros", name="calls")

        def call(self, x):
            return self.part(x)

        def train_step(self, data):
            optimizer = self.part.optimizer
            self.calls.assign(self.calls + 1)
            optimizer.apply([optimizer.scale_loss(keras.ops.ones((1, 1)))], self.part.trainable_variables)
            self.part.train_step(data)
            return {"calls": keras.ops.copy(self.calls.value)}

    part = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    around = Around(part)
    for model in (part, around):
        model.compile(keras.optimizers.SGD(0.25), "mse", run_eagerly=BACKEND == "tensorflow")
        mpkeras.prepare(model, "float32")
    around.train_on_batch(np.full((2, 1), np.inf, "float32"), np.ones((2, 1), "float32"))
    assert (int(part.optimizer.skipped_steps), int(part.optimizer.iterations)) == (1, 1)
    assert keras.ops.convert_to_numpy(part.trainable_variables[0]) == 0.75
    assert int(around.calls) == 1


@pytest.mark.parametrize("jit_compile", COMPILED)
def test_what_a_constraint_writes_is_an_update_and_no_write_of_a_layer(jit_compile):
    """On TensorFlow it is written in a branch of the program, from which no old value gets out."""
    layer = keras.layers.Dense(
        1, use_bias=False, kernel_initializer="ones", kernel_constraint=keras.constraints.NonNeg()
    )
    model = keras.Sequential([keras.Input((2,)), layer])
    model.compile(keras.optimizers.SGD(1.0), "mse", jit_compile=jit_compile)
    mpkeras.prepare(model, "float32")
    # The gradient is 2 * (3 - 0) * (1, 2).
    x, y = np.array([[1.0, 2.0]], "float32"), np.zeros((1, 1), "float32")
    model.train_on_batch(x, y)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(layer.kernel), [[0.0], [0.0]])
    layer.kernel.assign([[0.5], [0.25]])
    model.train_on_batch(x * np.inf, y)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(layer.kernel), [[0.5], [0.25]])
    assert int(model.optimizer.skipped_steps) == 1


def test_a_loss_over_no_rows_is_not_a_loss_that_is_not_finite():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    step = mpkeras.make_train_step(
        model,
        keras.optimizers.SGD(0.1),
        lambda y, y_pred: keras.ops.mean(keras.ops.square(y - y_pred)),
        jit_compile=False,
    )
    # The second length is traced as any length.
    for rows in (2, 3, 0, 1):
        step(np.ones((rows, 2)), np.ones((rows, 1)))
    optimizer = step.optimizer
    assert (int(optimizer.skipped_steps), int(optimizer.nonfinite_losses), int(optimizer.iterations)) == (1, 0, 3)


@pytest.mark.backends("tensorflow", "torch")
def test_a_step_that_raises_after_its_update_leaves_what_it_has_learned():
    """Statistics belong to the weights of the same step. On JAX a step that raises returns nothing at all."""

    class RaisesLate(keras.Model):
        raises = False

        def train_step(self, data):
            logs = super().train_step(data)
            if self.raises:
                raise RuntimeError("late")
            return logs

    def run(raises):
        keras.utils.set_random_seed(2)
        inputs = keras.Input((FEATURES,))
        norm = keras.layers.BatchNormalization(momentum=0.5)(inputs)
        model = RaisesLate(inputs, keras.layers.Dense(2)(norm))
        model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=BACKEND == "tensorflow")
        mpkeras.prepare(model, "float32")
        model.train_on_batch(ROWS_X[:4], ROWS_Y[:4])
        model.raises = raises
        try:
            model.train_on_batch(ROWS_X[4:8], ROWS_Y[4:8])
        except RuntimeError:
            pass
        return snapshot(model.variables + model.optimizer.variables + model.metrics_variables)

    assert run(raises=True) == run(raises=False)


@pytest.mark.backends("torch")
def test_a_buffer_that_a_torch_module_replaces_is_put_back():
    import torch

    class Running(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", torch.zeros(FEATURES))

        def forward(self, x):
            # Another tensor under the same name, where `copy_` would write into the one that is there.
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
            return x - self.mean

    module = Running()
    layers = [keras.Input((FEATURES,)), keras.layers.TorchModuleWrapper(module), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    model.compile("sgd", "mse")
    mpkeras.prepare(model, "float32")
    model.train_on_batch(ROWS_X[:4], ROWS_Y[:4])
    before = module.mean.clone()
    model.train_on_batch(np.full_like(ROWS_X[:4], np.inf), ROWS_Y[:4])
    assert int(model.optimizer.skipped_steps) == 1 and torch.equal(module.mean, before)
    model.train_on_batch(ROWS_X[:4], ROWS_Y[:4])
    assert torch.allclose(module.mean, 0.5 * before + 0.5 * torch.from_numpy(ROWS_X[:4]).mean(0))


def wrapped_norm():
    """A batch normalization whose statistics are no Keras variables, and what they start from."""
    if BACKEND == "torch":
        import torch

        return torch.nn.BatchNorm1d(3, momentum=0.5)

    import tensorflow as tf

    class Norm(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.running_mean = tf.Variable(tf.zeros(3), trainable=False, name="running_mean")
            self.counters = {"calls": [tf.Variable(0, trainable=False, name="calls")]}
            self.module = tf.Module()
            self.module.largest = tf.Variable(0.0, trainable=False, name="largest")

        def call(self, x, training=False):
            if training:
                x = tf.cast(x, "float32")
                self.running_mean.assign(0.5 * self.running_mean + 0.5 * tf.reduce_mean(x, 0))
                self.counters["calls"][0].assign_add(1)
                self.module.largest.assign(tf.maximum(self.module.largest, tf.reduce_max(x)))
            return x - self.running_mean

    return Norm()


class AroundNorm(keras.Model):
    def __init__(self):
        super().__init__()
        keras.utils.set_random_seed(4)
        self.first, self.last = keras.layers.Dense(3), keras.layers.Dense(2)
        self.norm = wrapped_norm()
        self.first.build((None, FEATURES))
        self.last.build((None, 3))

    def call(self, x, training=False):
        return self.last(self.norm(self.first(x), training=training))


def native_values(model):
    """By name; of torch modules all that they save, weights included."""
    if BACKEND == "torch":
        return {name: value.detach().numpy().copy() for name, value in model.norm.module.state_dict().items()}
    norm = model.norm
    variables = [norm.running_mean, norm.counters["calls"][0], norm.module.largest]
    return {variable.name.partition(":")[0]: variable.numpy() for variable in variables}


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "torch")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", FIT_MODES)
def test_state_that_is_no_keras_variable(options, way):
    """Buffers of torch modules, and `tf.Variable`s of a user's layer: put back, and part of `state_dict`."""

    def run(with_faults):
        model = AroundNorm()
        model.compile(keras.optimizers.Adam(0.01), "mse", **options)
        mpkeras.prepare(model, "float32")
        step = model.train_on_batch
        if way == "make_train_step":
            step = mpkeras.make_train_step(model, model.optimizer, "mse", jit_compile=options.get("jit_compile", False))
        for i in range(3):
            if with_faults:
                step(ROWS_X[:4] * np.inf, ROWS_Y[:4])
            step(ROWS_X[4 * i : 4 * i + 4], ROWS_Y[4 * i : 4 * i + 4])
        assert int(model.optimizer.skipped_steps) == 3 * with_faults
        return model

    faulty, clean = run(with_faults=True), run(with_faults=False)
    expected = native_values(clean)
    assert snapshot(faulty.variables) == snapshot(clean.variables)
    assert np.abs(expected["running_mean"]).min() > 0
    for name, value in native_values(faulty).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)

    state = state_dict(clean)
    fresh = AroundNorm()
    fresh.compile(keras.optimizers.Adam(0.01), "mse", **options)
    mpkeras.prepare(fresh, "float32")
    fresh(ROWS_X[:4])
    load_state_dict(fresh, state)
    for name, value in native_values(fresh).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)
    assert any(key.startswith("native/") and key.endswith("/running_mean") for key in state)


@pytest.mark.backends("torch")
def test_frozen_weights_are_copied_only_when_a_layer_writes_them():
    import torch

    model = keras.Sequential(
        [keras.Input((64,)), keras.layers.Dense(256), keras.layers.Dense(256), keras.layers.Dense(1)]
    )
    model.layers[0].trainable = model.layers[1].trainable = False
    model.compile(keras.optimizers.SGD(0.01), "mse")
    mpkeras.prepare(model, "float32")
    x, y = np.ones((2, 64), "float32"), np.ones((2, 1), "float32")
    model.train_on_batch(x, y)
    copied = []
    clone = torch.Tensor.clone

    class Watching(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is clone:
                copied.append(args[0].numel())
            return function(*args, **(kwargs or {}))

    with Watching():
        model.train_on_batch(x, y)
    assert copied and max(copied) == 1


class WritesItsWeight(keras.layers.Layer):
    """Multiplies a weight of its own by the largest input, and uses it nowhere."""

    def __init__(self, made):
        super().__init__(autocast=False)
        if made == "by add_weight":
            self.scale = self.add_weight(shape=(), dtype="float32", initializer="ones", autocast=False)
        else:
            self.scale = keras.Variable(1.0, dtype="float32", autocast=False)

    def call(self, x):
        self.scale.assign(self.scale * keras.ops.max(keras.ops.cast(x, "float32")))
        return x


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@pytest.mark.parametrize("options", FIT_MODES)
@pytest.mark.parametrize("made", ["by add_weight", "as an attribute"])
@pytest.mark.parametrize("frozen", [True, False])
def test_a_weight_that_a_layer_writes(options, made, frozen):
    if BACKEND == "jax" and not frozen:
        pytest.skip("Keras' trainer on JAX takes the weights that are trained from the optimizer alone")
    layer = WritesItsWeight(made)
    model = keras.Sequential([keras.Input((2,)), layer, keras.layers.Dense(1)])
    layer.trainable = not frozen
    model.compile(keras.optimizers.SGD(1e-3), "mse", **options)
    mpkeras.prepare(model, "float32")

    def scale_after(largest, target):
        model.train_on_batch(np.array([[largest, 0.5]], "float32"), np.array([[target]], "float32"))
        return float(keras.ops.convert_to_numpy(layer.scale.value))

    assert scale_after(3.0, 1.0) == 3.0
    # The step is skipped: its loss is not finite.
    assert scale_after(5.0, np.nan) == 3.0
    assert scale_after(2.0, 1.0) == 6.0
    if frozen:
        layer.scale.assign(3e38)
        # The step counts, and as a statistic the weight would become infinite.
        assert scale_after(2.0, 1.0) == np.float32(3e38)
    assert int(model.optimizer.skipped_steps.value) == 1
