"""G2 at full width: whatever holds state, a run with bad batches is bit for bit the run without them."""

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.callbacks import MixedPrecision
from mpkeras.training.state import load_state_dict, state_dict
from tests.cases import first_quick
from tests.step_modes import FIT_MODES, snapshot
from tests.training.models import GRAPH_FIRST, WAYS, are_finite, loss_and_gradients, number, stepper

# What a skipped step leaves behind is the first of all promises: the whole matrix on the backend that compiles all.
BACKEND = keras.backend.backend()
COMPILED = {"tensorflow": [True, False], "jax": [True], "torch": [False]}[BACKEND]
DOORS = ["fit", "make_train_step"]
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
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=jit_compile)
    mpkeras.prepare(model, policy, loss_scale=2.0**10 if policy == "mixed_float16" else None)
    metric, step = keras.metrics.MeanAbsoluteError(), model.train_on_batch
    if way == "make_train_step":
        step = mpkeras.make_train_step(model, model.optimizer, "mse", jit_compile=jit_compile, metrics=[metric])
    for x, y in sequence:
        step(x, y)
    metrics = model.metrics_variables if way == "fit" else metric.variables
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
        way=DOORS[(seed // 3) % 2],
        jit_compile=COMPILED[(seed // 2) % len(COMPILED)],
        policy=policy,
    )


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "jax")
@pytest.mark.parametrize("jit_compile", COMPILED[:1])
@pytest.mark.parametrize("way", DOORS)
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
@pytest.mark.parametrize("way", DOORS)
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
        return state, snapshot(optimizer.window.sums)

    (state, sums), (clean_state, clean_sums) = run(True), run(False)
    assert state == clean_state
    assert sums == clean_sums and any(np.frombuffer(total, "float32").any() for total in sums)


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
@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("jit_compile", COMPILED)
def test_make_train_step_skips_a_batch_without_rows(jit_compile, reduction):
    """And its loss is unknown, not one that is not finite: the mean over no rows is NaN."""
    norm = keras.layers.BatchNormalization(momentum=0.5)
    model = keras.Sequential([keras.Input((FEATURES,)), norm, keras.layers.Dense(2)])
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.01, momentum=0.9), loss_scale=4.0)
    reduce = getattr(keras.ops, reduction)
    metric = keras.metrics.MeanAbsoluteError(name="mae")
    step = mpkeras.make_train_step(
        model,
        optimizer,
        lambda y, y_pred: reduce(keras.ops.square(y - y_pred)),
        jit_compile=jit_compile,
        metrics=metric,
    )
    # The second length is traced as any length.
    for rows in (2, 4):
        told = step(ROWS_X[:rows], ROWS_Y[:rows])
    variables = model.variables + optimizer.inner_optimizer.variables + metric.variables
    as_before_the_step = snapshot(variables)
    result = step(ROWS_X[:0], ROWS_Y[:0])
    assert np.isnan(float(result["loss"])) and bool(result["skipped"])
    assert (float(result["loss_scale"]), float(result["mae"])) == (4.0, float(told["mae"]))
    assert snapshot(variables) == as_before_the_step
    assert not bool(step(ROWS_X[:1], ROWS_Y[:1])["skipped"])
    assert (int(optimizer.skipped_steps), int(optimizer.nonfinite_losses), int(optimizer.iterations)) == (1, 0, 3)


class Raising(keras.Sequential):
    raises = "nowhere"

    def call(self, inputs, training=None, mask=None):
        outputs = super().call(inputs, training=training, mask=mask)
        if self.raises == "in the forward pass":
            raise RuntimeError("late")
        return outputs

    def train_step(self, *args):
        result = super().train_step(*args)
        if self.raises == "after its update":
            raise RuntimeError("late")
        return result


# On JAX a step that raises returns nothing at all.
AFTER_ITS_UPDATE = pytest.param("after its update", marks=pytest.mark.backends("tensorflow", "torch"))


@pytest.mark.parametrize("where", first_quick(["in the forward pass", AFTER_ITS_UPDATE]))
def test_a_step_that_raises_leaves_no_trace(where):
    """Where steps run op by op. One that raises after its update leaves what it has learned: statistics go with it."""
    sequence = batches(3, 4)
    x, y = sequence[1]

    def run(raises):
        model = model_of(["batch normalization", "dropout", "state of its own", "spectral normalization"])
        model = Raising([keras.Input(batch_shape=(4, TIMESTEPS, FEATURES)), model])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"], run_eagerly=BACKEND != "torch")
        mpkeras.prepare(model, "float32")
        model.train_on_batch(*sequence[0])
        if raises:
            model.raises = where
            with pytest.raises(RuntimeError, match="late"):
                model.train_on_batch(x * np.inf if where == "in the forward pass" else x, y)
            assert are_finite(model.variables)
            model.raises = "nowhere"
        elif where == "after its update":
            model.train_on_batch(x, y)
        model.train_on_batch(*sequence[2])
        return snapshot(model.variables + model.optimizer.variables + model.metrics_variables)

    assert run(raises=True) == run(raises=False)


class Halves(keras.layers.Layer):
    """Times a kernel, which it halves in each forward pass of training."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(), initializer="ones")

    def call(self, x, training=False):
        if training:
            self.kernel.assign(self.kernel.value * 0.5)
        return x * self.kernel.value


def around(layer, step, **options):
    """Returns a prepared model around a prepared part of one layer; `step(whole, data)` is its train step."""

    class Around(keras.Model):
        def __init__(self, part):
            super().__init__()
            self.part = part
            self.calls = self.add_weight(shape=(), dtype="int32", trainable=False, initializer="zeros", name="calls")

        def call(self, x, training=False):
            return self.part(x, training=training)

        def train_step(self, data):
            return step(self, data)

    whole = Around(keras.Sequential([keras.Input((1,)), layer]))
    whole(np.ones((2, 1), "float32"))
    for model in (whole.part, whole):
        model.compile(keras.optimizers.SGD(0.25), "mse", **options)
        mpkeras.prepare(model, "float32", loss_scale=4.0)
    return whole


EAGER = {"run_eagerly": BACKEND == "tensorflow"}
ONES = np.ones((2, 1), "float32")


def weight_of_ones():
    return keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")


@pytest.mark.backends("tensorflow", "torch")
def test_an_inner_guarded_step_leaves_the_outer_ones_watch_alone():
    """A part is trained by a step of its own, and then written by the forward pass of the whole."""

    def step(whole, data):
        whole.part.train_step(data)
        return keras.Model.train_step(whole, data)

    layer = Halves()
    whole = around(layer, step, **EAGER)
    for optimizer in (whole.optimizer, whole.part.optimizer):
        optimizer.learning_rate = 0.0
    layer.kernel.assign(3.0)
    whole.train_on_batch(ONES * np.inf, ONES)
    assert (int(whole.optimizer.skipped_steps), int(whole.part.optimizer.skipped_steps)) == (1, 1)
    assert number(layer.kernel) == 3.0
    assert "assign" not in vars(layer.kernel)
    whole.train_on_batch(ONES, ONES)
    assert number(layer.kernel) == 0.75


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "torch")
def test_a_step_of_a_part_leaves_what_is_known_of_the_step_around_it():
    """The part's loss is scaled, the part is trained by a step of its own, and then the gradients are applied."""

    def step(whole, data):
        kernel, optimizer = whole.part.trainable_variables[0], whole.part.optimizer
        loss, grads = loss_and_gradients(lambda: keras.ops.mean(whole.part(data[0])), [kernel], optimizer.scale_loss)
        # Of no gradient: what the part predicts is what it is to predict.
        whole.part.train_step(data)
        optimizer.apply(grads, [kernel])
        return {"loss": loss}

    whole = around(weight_of_ones(), step)
    # Without what was noted, a warning says that the loss was not scaled, and warnings are errors here.
    whole.train_on_batch(ONES, ONES)
    part = whole.part
    assert number(part.trainable_variables[0]) == 0.75
    assert (int(part.optimizer.iterations), int(part.optimizer.skipped_steps)) == (2, 0)


@pytest.mark.parametrize("is_of_part", [True, False])
@pytest.mark.backends("tensorflow", "torch")
def test_an_update_beside_a_skipped_one_of_a_part_counts_for_the_step_around_it(is_of_part):
    """Both by one optimizer: what the step around has written stays, as not all of its updates were skipped."""

    def step(whole, data):
        optimizer = whole.part.optimizer
        whole.calls.assign(whole.calls + 1)
        if not is_of_part:
            whole.part.train_step(data)
        gradient = keras.ops.ones((1, 1)) * (1.0 if is_of_part else np.inf)
        optimizer.apply([optimizer.scale_loss(gradient)], whole.part.trainable_variables)
        if is_of_part:
            whole.part.train_step(data)
        return {"calls": keras.ops.copy(whole.calls.value)}

    whole = around(weight_of_ones(), step, **EAGER)
    whole.train_on_batch(ONES * (np.inf if is_of_part else 1.0), ONES)
    part = whole.part
    assert (int(part.optimizer.skipped_steps), int(part.optimizer.iterations)) == (1, 1)
    # The part predicts what it is to predict: its own update moves nothing.
    assert number(part.trainable_variables[0]) == (0.75 if is_of_part else 1.0)
    assert int(whole.calls) == 1


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", first_quick(GRAPH_FIRST))
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
    np.testing.assert_array_equal(number(layer.kernel), [[0.0], [0.0]])
    layer.kernel.assign([[0.5], [0.25]])
    model.train_on_batch(x * np.inf, y)
    np.testing.assert_array_equal(number(layer.kernel), [[0.5], [0.25]])
    assert int(model.optimizer.skipped_steps) == 1


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
@pytest.mark.parametrize("way", DOORS)
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


class Average:
    """A helper object: Keras tracks no variables of such."""

    def __init__(self):
        self.value, self.counts = keras.Variable(0.5, trainable=False), [keras.Variable(0.0, trainable=False)]

    def take(self, x):
        self.value.assign(0.75 * self.value + 0.25 * keras.ops.mean(x))
        self.counts[0].assign(self.counts[0] + 1.0)


class Averaging:
    """An activation that is an object."""

    def __init__(self):
        self.average = Average()

    def __call__(self, x):
        self.average.take(x)
        return x * 2.0


class Watching(keras.losses.Loss):
    """A loss with a running mean of its own."""

    def __init__(self):
        super().__init__()
        self.average = Average()

    def call(self, y_true, y_pred):
        losses = keras.ops.mean(keras.ops.abs(y_true - y_pred), axis=-1)
        self.average.take(losses)
        return losses


class Largest(keras.regularizers.Regularizer):
    """An activity regularizer that follows the largest activations."""

    def __init__(self):
        self.highest = keras.Variable(240.0, trainable=False)

    def __call__(self, x):
        self.highest.assign(self.highest + 0.125 * keras.ops.max(keras.ops.abs(x)))
        return 1e-6 * keras.ops.square(self.highest)


class Numbered(keras.layers.Layer):
    """Counts its calls for all layers of its class, in variables that none of them holds."""

    calls, rows = keras.Variable(0.0, trainable=False), {"all": keras.Variable(0, dtype="int32", trainable=False)}

    def call(self, x):
        self.calls.assign_add(1.0)
        self.rows["all"].assign_add(4)
        return x


class Drawing:
    """A helper object with a random generator, a metric and, on TensorFlow and torch, a tensor of the backend's own."""

    def __init__(self):
        self.seeds, self.norm = [keras.random.SeedGenerator(5)], keras.metrics.Mean()
        if keras.backend.backend() == "tensorflow":
            import tensorflow as tf

            self.mean = tf.Variable(0.5, trainable=False)
        else:
            self.mean = keras.ops.ones((2,)) * 0.5


class Helped(keras.layers.Layer):
    """Holds a metric, and an object beside; follows the mean of what it is given there."""

    def __init__(self):
        super().__init__()
        self.helper, self.norm = Drawing(), keras.metrics.Mean(name="norm")

    def call(self, x, training=False):
        if training:
            mean = keras.ops.mean(keras.ops.cast(keras.ops.stop_gradient(x), "float32"))
            for norm in (self.norm, self.helper.norm):
                norm.update_state(mean)
            if keras.backend.backend() == "tensorflow":
                self.helper.mean.assign(0.75 * self.helper.mean + 0.25 * mean)
            else:
                self.helper.mean = 0.75 * self.helper.mean + 0.25 * mean
                self.helper.mean[:1].add_(mean)
        return x + 0.01 * keras.random.normal((4, FEATURES), dtype=x.dtype, seed=self.helper.seeds[0])

    def states(self):
        helper = self.helper
        states = [*self.norm.variables, *helper.norm.variables, helper.seeds[0].state, helper.mean]
        return [keras.ops.convert_to_numpy(state).tolist() for state in states]


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "torch")
@pytest.mark.parametrize(("way", "options"), WAYS)
def test_variables_that_helpers_losses_regularizers_and_classes_hold(way, options):
    """Keras tracks none of them."""

    def run(factors):
        keras.utils.set_random_seed(8)
        Numbered.calls.assign(300.0)
        Numbered.rows["all"].assign(0)
        helped, activation, loss, regularizer = Helped(), Averaging(), Watching(), Largest()
        first, last = keras.layers.Dense(3, activation), keras.layers.Dense(2, activity_regularizer=regularizer)
        model = keras.Sequential([keras.Input((FEATURES,), batch_size=4), helped, first, Numbered(), last])
        step, optimizer = stepper(way, options, model, keras.optimizers.SGD(0.01), "mixed_bfloat16", loss=loss)
        for rows, factor in zip((0, 0, 4, 4, 8), factors, strict=True):
            if factor is not None:
                step(factor * ROWS_X[rows : rows + 4], ROWS_Y[rows : rows + 4])
        averages = [float(x) for of in (activation, loss) for x in (of.average.value, *of.average.counts)]
        numbers = float(Numbered.calls), int(Numbered.rows["all"]), float(regularizer.highest)
        states = [key for key in state_dict(model) if key.startswith("states/")]
        return int(optimizer.skipped_steps), snapshot(model.variables), helped.states(), states, averages, *numbers

    skipped, *with_faults = run([np.inf, 1.0, np.inf, 1.0, 1.0])
    none, *clean = run([None, 1.0, None, 1.0, 1.0])
    assert (skipped, none) == (2, 0) and with_faults == clean
    *_, states, averages, calls, rows, highest = clean
    # Of the helper three, two of each average, of the regularizer and the class three. Of a step of ours the loss is
    # none of the model's.
    assert len(states) == (10 if way == "fit" else 8)
    assert averages[1::2] == [3.0, 3.0] and rows == 12
    # In bfloat16 301 is 302 or 300, and numbers beyond 128 have no fractions.
    assert calls == 303.0 and highest % 1.0 > 0.0


class Counts:
    """A step that counts and follows its loss in numbers of Python, and the mean of outputs in a tensor."""

    def train_step(self, data):
        x, y, *_ = data
        net = (self.nets or [self])[0]
        self.zero_grad()
        y_pred = net(x)
        loss = keras.ops.mean(keras.ops.square(y_pred - self.center - keras.ops.convert_to_tensor(y)))
        self.optimizer.scale_loss(loss).backward()
        self.steps += 1
        self.first = loss.item() if self.first is None else self.first
        self.means["loss"] = 0.75 * self.means["loss"] + 0.25 * loss.item()
        latest = [*self.latest[1:], loss.item()]
        self.latest.clear()
        self.latest.extend(latest)
        self.center = 0.75 * self.center + 0.25 * keras.ops.mean(y_pred.detach(), axis=0)
        self.optimizer.apply([variable.value.grad for variable in net.trainable_weights], net.trainable_weights)
        return {}


class CountsAroundGraph(Counts, keras.Model):
    pass


class CountsWithoutCall(Counts, keras.Model):
    pass


@pytest.mark.backends("torch")
@pytest.mark.parametrize("kind", [CountsAroundGraph, CountsWithoutCall])
def test_what_a_model_with_a_step_of_its_own_keeps(kind):
    def run(factors):
        keras.utils.set_random_seed(6)
        inputs = keras.Input((FEATURES,))
        graph = [inputs, keras.layers.Dense(2)(keras.layers.Dense(3)(inputs))]
        model = kind(*(graph if kind is CountsAroundGraph else []))
        model.nets = [] if kind is CountsAroundGraph else [keras.Model(*graph)]
        model.steps, model.means, model.center = 0, {"loss": 0.5}, keras.ops.zeros((2,))
        model.first, model.latest, model.built = None, [0.0, 0.0], True
        model.compile(keras.optimizers.SGD(1e-4))
        mpkeras.prepare(model, "mixed_float16")
        for factor in factors:
            # The first one is taken again with smaller scales.
            model.train_on_batch(factor * ROWS_X[:4], 5000.0 + ROWS_Y[:4])
        assert model.optimizer.loss_scale < 2.0**15
        return model.steps, model.first, model.means["loss"], list(model.latest), model.center.tolist()

    found = run([np.inf, 1.0, np.inf, 2.0])
    assert found[0] == 2 and found == run([1.0, 2.0])


@pytest.mark.backends("torch")
def test_building_moves_no_statistics_of_a_torch_module():
    import torch

    norm = torch.nn.BatchNorm1d(FEATURES)
    model = keras.Sequential([keras.layers.TorchModuleWrapper(norm), keras.layers.Dense(2)])
    step = mpkeras.make_train_step(model, keras.optimizers.SGD(0.01), "mse")
    step(ROWS_X[:4], ROWS_Y[:4])
    assert norm.num_batches_tracked == 1
    np.testing.assert_allclose(norm.running_mean, 0.1 * ROWS_X[:4].mean(0), rtol=1e-5)


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


class Shakes(keras.layers.Layer):
    """Multiplies by random numbers of a generator that it is given, in training alone."""

    def __init__(self, generator):
        super().__init__()
        self.generator = generator

    def call(self, x, training=False):
        return x * keras.random.uniform(keras.ops.shape(x), 0.5, 1.5, seed=self.generator) if training else x


@pytest.mark.parametrize("door", DOORS)
def test_a_random_generator_that_layers_share_goes_on_and_is_put_back(door):
    generator = keras.random.SeedGenerator(3)
    layers = [Shakes(generator), keras.layers.Dense(4, kernel_initializer="ones"), Shakes(generator)]
    model = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(1, kernel_initializer="ones")])
    if door == "fit":
        model.compile(keras.optimizers.SGD(1e-3), "mse")
        step = mpkeras.prepare(model, "float32").train_on_batch
    else:
        step = mpkeras.make_train_step(model, keras.optimizers.SGD(1e-3), "mse")
    drawn = [keras.ops.convert_to_numpy(generator.state.value)]
    for target in (1.0, np.nan, 1.0):
        step(np.ones((4, 2), "float32"), np.full((4, 1), target, "float32"))
        drawn.append(keras.ops.convert_to_numpy(generator.state.value))
    after_each = drawn[1] - drawn[0]
    assert after_each.any()
    np.testing.assert_array_equal(drawn[2], drawn[1])
    np.testing.assert_array_equal(drawn[3], drawn[1] + after_each)
