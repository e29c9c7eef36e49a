"""bfloat16 weights and slots through every door, against the same training in float32 and without the fault."""

import warnings

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras._keras import stored_dtype
from mpkeras.callbacks import MixedPrecision
from tests.step_modes import snapshot

BACKEND = keras.backend.backend()
COMPILED = {"tensorflow": [True, False], "jax": [True], "torch": [False]}[BACKEND]
RNG = np.random.default_rng(0)
X = RNG.standard_normal((96, 8)).astype("float32")
Y = (X[:, 0] + X[:, 1] > 0).astype("int32")
SLOTS = mpkeras.Policy("mixed_bfloat16", slot_dtype="bfloat16")


def classifier():
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(24, name="first"),
            keras.layers.BatchNormalization(momentum=0.5),
            keras.layers.Activation("relu"),
            keras.layers.Dense(2, activation="softmax", name="head"),
        ]
    )


def dtypes(variables):
    return {stored_dtype(v) for v in variables}


def in_float32(variable):
    return keras.ops.convert_to_numpy(variable.value).astype("float32")


def slots(optimizer):
    return [v for v in optimizer.inner_optimizer.variables if len(v.shape) > 0]


def trained(door, policy, *, jit_compile=None, batches=6, fault=None, optimizer=None):
    """Returns the model, its optimizer and the last loss after steps of 32 rows; one more has an infinite input."""
    model = classifier()
    optimizer = optimizer() if optimizer else keras.optimizers.AdamW(0.01, weight_decay=0.1)
    loss = keras.losses.SparseCategoricalCrossentropy()
    steps = []
    for number in range(batches):
        if number == fault:
            bad = X[:32].copy()
            bad[4] = np.inf
            steps.append((bad, Y[:32]))
        rows = slice(32 * (number % 3), 32 * (number % 3) + 32)
        steps.append((X[rows], Y[rows]))
    if door == "make_train_step":
        mpkeras.apply_policy(model, policy)
        run = mpkeras.make_train_step(model, optimizer, loss, jit_compile=jit_compile)
        for x, y in steps:
            result = run(x, y)
        return model, run.optimizer, float(result["loss"])
    model.compile(optimizer, loss, jit_compile=bool(jit_compile))
    if door == "prepare":
        mpkeras.prepare(model, policy)
    callbacks = [MixedPrecision(policy)] if door == "callback" else []
    # The last one alone: `fit` tells the mean of the losses of an epoch.
    for part in (steps[:-1], steps[-1:]):
        x, y = (np.concatenate(arrays) for arrays in zip(*part, strict=True))
        history = model.fit(x, y, batch_size=32, shuffle=False, verbose=0, callbacks=callbacks).history
    return model, model.optimizer, history["loss"][0]


@pytest.mark.slow
@pytest.mark.parametrize("door", ["prepare", "callback", "make_train_step"])
def test_bfloat16_trains_as_float32_does(door):
    """P40: in plain Keras the weights of such a model do not move."""
    _, _, reference = trained(door, "float32", batches=12)
    model, optimizer, loss = trained(door, "bfloat16", batches=12)
    dense, normalization = model.get_layer("first"), model.layers[1]
    assert dtypes(dense.variables) == {"bfloat16"} and dtypes(normalization.variables) == {"float32"}
    assert dtypes(model.get_layer("head").variables) == {"float32"}  # a softmax: a float32 layer
    assert dtypes(slots(optimizer)) == {"bfloat16", "float32"}
    assert dtypes(v for v in slots(optimizer) if "first" in v.name) == {"bfloat16"}
    assert abs(loss - reference) < 0.02 < 0.6 - reference

    model, optimizer, loss = trained(door, SLOTS, batches=12)
    assert dtypes(model.weights) == {"float32"} and dtypes(slots(optimizer)) == {"bfloat16"}
    assert abs(loss - reference) < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", COMPILED)
@pytest.mark.parametrize("policy", ["bfloat16", SLOTS], ids=["weights and slots", "slots"])
@pytest.mark.parametrize("door", ["prepare", "make_train_step"])
@pytest.mark.filterwarnings("ignore:1 of 4 steps skipped:UserWarning")
def test_a_skipped_step_leaves_no_trace(door, policy, jit_compile):
    clean, clean_optimizer, _ = trained(door, policy, jit_compile=jit_compile, batches=4)
    model, optimizer, _ = trained(door, policy, jit_compile=jit_compile, batches=4, fault=2)
    assert int(keras.ops.convert_to_numpy(optimizer.skipped_steps.value)) == 1
    states = [
        snapshot(m.variables + o.inner_optimizer.variables) for m, o in ((clean, clean_optimizer), (model, optimizer))
    ]
    assert states[0] == states[1]


@pytest.mark.slow
def test_a_model_that_trains_is_converted_with_its_optimizer_and_back():
    model, optimizer, _ = trained("prepare", "mixed_bfloat16", batches=3)
    before = {v.path: in_float32(v) for v in model.weights}
    moments = [in_float32(v) for v in slots(optimizer)]
    mpkeras.prepare(model, "bfloat16")
    assert model.optimizer.inner_optimizer is optimizer.inner_optimizer
    first = model.get_layer("first")
    for variable in first.weights:
        np.testing.assert_allclose(
            in_float32(variable), before[variable.path], rtol=2.0**-8
        )  # to the nearest of 8 bits
    for slot, value in zip(slots(model.optimizer), moments, strict=True):
        np.testing.assert_allclose(in_float32(slot), value, rtol=2.0**-8)
    kernel = first.kernel
    model.fit(X, Y, batch_size=32, verbose=0)
    mpkeras.prepare(model, "mixed_bfloat16")
    assert first.kernel is kernel and dtypes(model.weights) == {"float32"} == dtypes(slots(model.optimizer))
    assert np.isfinite(model.fit(X, Y, batch_size=32, verbose=0).history["loss"][0])


def test_the_factors_of_adafactor_follow_their_weights(tmp_path):
    """They stayed in float32, and the file of such a model made bfloat16 ones of them: other numbers than it held."""
    model = classifier()
    model.compile(keras.optimizers.Adafactor(0.02), "sparse_categorical_crossentropy")

    def factors(model):
        return [v for v in slots(model.optimizer) if not v.name.endswith("_velocity")]

    def dtypes_after(policy):
        mpkeras.prepare(model, policy)
        model.optimizer.build(model.trainable_variables)
        for number, variable in enumerate(factors(model)):
            variable.assign(np.full(variable.shape, 0.3 + number))
        return [stored_dtype(v) for v in factors(model)]

    # The head, the second of the two, stays in float32.
    assert dtypes_after("float32") == ["float32"] * 4
    assert dtypes_after("bfloat16") == ["bfloat16"] * 2 + ["float32"] * 2
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert snapshot(factors(loaded)) == snapshot(factors(model))
    assert dtypes_after("mixed_bfloat16") == ["float32"] * 4


@pytest.mark.slow
def test_frozen_weights_and_lora():
    model = classifier()
    mpkeras.apply_policy(model, "bfloat16")
    model.get_layer("first").enable_lora(2)
    first = model.get_layer("first")
    frozen = snapshot([first._kernel])
    step = mpkeras.make_train_step(model, keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    for _ in range(3):
        step(X[:32], Y[:32])
    assert snapshot([first._kernel]) == frozen and stored_dtype(first._kernel) == "bfloat16"
    adapters = [first.lora_kernel_a, first.lora_kernel_b]
    assert dtypes(adapters) <= {"float32", "bfloat16"}  # as this version of Keras makes them
    assert np.abs(in_float32(adapters[1])).max() > 0


@pytest.mark.slow
def test_lora_that_was_there_first_stays_in_float32():
    ids = keras.Input((3,), dtype="int32")
    rows = keras.layers.Embedding(9, 4, name="table")(ids)
    model = keras.Model(ids, keras.layers.Dense(2)(keras.layers.Flatten()(keras.layers.Dense(5, name="inner")(rows))))
    table, inner = model.get_layer("table"), model.get_layer("inner")
    table.enable_lora(1)
    inner.enable_lora(2)
    # Between two numbers of bfloat16, of which the nearer one would be left.
    inner.lora_kernel_b.assign(np.full((2, 5), 1.001, "float32"))
    model.compile(keras.optimizers.SGD(0.0, momentum=0.9), "mse")
    mpkeras.prepare(model, "bfloat16")
    adapters = [table.lora_embeddings_a, table.lora_embeddings_b, inner.lora_kernel_a, inner.lora_kernel_b]
    assert dtypes(adapters) == {"float32"} and dtypes([table._embeddings, inner._kernel]) == {"bfloat16"}
    model.train_on_batch(np.arange(6, dtype="int32").reshape(2, 3), np.ones((2, 2), "float32"))
    assert np.array_equal(in_float32(inner.lora_kernel_b), np.full((2, 5), 1.001, "float32"))
    assert {stored_dtype(v) for v in slots(model.optimizer) if "lora" in v.path} == {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize("is_back", [False, True], ids=["bfloat16", "and back to mixed_bfloat16"])
def test_weights_that_were_frozen_when_they_became_small_train_once_they_are_freed(is_back):
    keras.utils.set_random_seed(4)
    deep, frozen_alone = keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(4)
    base = keras.Sequential([keras.Input((8,)), deep], name="base")
    model = keras.Sequential([keras.Input((8,)), base, frozen_alone, keras.layers.Dense(1)])
    base.trainable = frozen_alone.trainable = False
    model.compile(keras.optimizers.SGD(0.05), "mse")
    mpkeras.prepare(model, "bfloat16")
    if is_back:
        mpkeras.prepare(model, "mixed_bfloat16")
    freed = [deep.kernel, deep.bias, frozen_alone.kernel, frozen_alone.bias]
    weights = snapshot(freed)
    model.fit(X, Y, batch_size=32, verbose=0)
    assert snapshot(freed) == weights
    base.trainable = frozen_alone.trainable = True
    model.compile(keras.optimizers.SGD(0.05), "mse")
    model.fit(X, Y, batch_size=32, verbose=0)
    assert all(now != then for now, then in zip(snapshot(freed), weights, strict=True))
    # Frozen again, they stand still again.
    base.trainable = False
    model.compile(keras.optimizers.SGD(0.05), "mse")
    weights = snapshot(freed)
    model.fit(X, Y, batch_size=32, verbose=0)
    assert [now == then for now, then in zip(snapshot(freed), weights, strict=True)] == [True, True, False, False]


@pytest.mark.slow
def test_without_rollback_it_is_wrapped_all_the_same():
    model = classifier()
    model.compile("adam", "sparse_categorical_crossentropy")
    mpkeras.prepare(model, "bfloat16", rollback=False)
    assert isinstance(model.optimizer, mpkeras.LossScaleOptimizer)
    step = mpkeras.make_train_step(model, "adam", "sparse_categorical_crossentropy", rollback=False)
    step(X[:32], Y[:32])
    assert isinstance(step.optimizer, mpkeras.LossScaleOptimizer)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["bfloat16", SLOTS], ids=["weights and slots", "slots"])
def test_saved_and_resumed_bit_for_bit(policy, tmp_path):
    def made():
        model = classifier()
        model.compile(keras.optimizers.AdamW(0.01, weight_decay=0.1), "sparse_categorical_crossentropy")
        return mpkeras.prepare(model, policy)

    def train(model):
        for rows in (slice(0, 32), slice(32, 64)):
            model.train_on_batch(X[rows], Y[rows])
        return model

    whole, first = train(train(made())), train(made())
    path = str(tmp_path / "model.keras")
    first.save(path)
    loaded = keras.saving.load_model(path)
    assert loaded.optimizer.slot_dtype == ("bfloat16" if policy is SLOTS else "auto")
    assert dtypes(slots(loaded.optimizer)) == dtypes(slots(first.optimizer))
    train(mpkeras.prepare(loaded))
    assert snapshot(loaded.weights) == snapshot(whole.weights)
    assert snapshot(slots(loaded.optimizer)) == snapshot(slots(whole.optimizer))


@pytest.mark.slow
def test_layers_that_begin_orthogonal_come_back_from_a_file(tmp_path):
    """Of the initializer `Orthogonal`, which no backend draws in bfloat16."""
    x = np.random.default_rng(4).standard_normal((8, 2, 5)).astype("float32")
    y = x[:, 0, :2] - x[:, 1, 1:3]

    def trained(model):
        model.train_on_batch(x, y)
        return [in_float32(v) for v in model.trainable_variables]

    keras.utils.set_random_seed(9)
    inputs = keras.Input((2, 5))
    x_1 = keras.layers.SimpleRNN(3, return_sequences=True)(inputs)
    x_2 = keras.layers.Dense(4, "tanh", kernel_initializer="orthogonal")(keras.layers.Flatten()(x_1))
    model = keras.Model(inputs, keras.layers.Dense(2)(x_2))
    model.compile(keras.optimizers.AdamW(0.01), "mse", jit_compile=BACKEND == "jax")
    mpkeras.prepare(model, "bfloat16")
    values = trained(model)
    model.save(tmp_path / "model.keras")
    # As plain Keras reads it: the same values, in float32 where they could not be drawn.
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert all(
        np.array_equal(in_float32(v), value) for v, value in zip(loaded.trainable_variables, values, strict=True)
    )
    mpkeras.prepare(loaded, "bfloat16")
    assert [stored_dtype(v) for v in loaded.trainable_variables] == [stored_dtype(v) for v in model.trainable_variables]
    for ours, expected in zip(trained(loaded), trained(model), strict=True):
        assert np.array_equal(ours, expected)
    mpkeras.apply_policy(model, "float32")
    assert "bfloat16" not in str(model.get_config())


@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.layers.Bidirectional(keras.layers.LSTM(2)),
        lambda: keras.layers.RNN([keras.layers.LSTMCell(3), keras.layers.GRUCell(2)]),
        lambda: keras.layers.ConvLSTM1D(2, 1, data_format="channels_last"),
    ],
    ids=["wrapped", "cells", "convolved"],
)
def test_recurrent_layers_that_are_stored_in_bfloat16_are_made_anew(make):
    layer = make()
    inputs = keras.Input((3, 2, 4) if isinstance(layer, keras.layers.ConvLSTM1D) else (3, 4))
    model = keras.Model(inputs, keras.layers.Dense(2)(keras.layers.Flatten()(layer(inputs))))
    mpkeras.apply_policy(model, "bfloat16")
    assert "bfloat16" in dtypes(layer.trainable_variables)
    again = type(model).from_config(model.get_config())
    assert dtypes(again.layers[1].trainable_variables) == {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize("jit_compile", COMPILED)
@pytest.mark.parametrize(("first", "then"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_a_step_goes_on_with_a_model_that_is_converted_after_it_was_made(first, then, jit_compile):
    """The losses it tells are those of the model, and optimizer state and weights have the new dtype."""
    model = mpkeras.apply_policy(classifier(), first)
    loss = keras.losses.SparseCategoricalCrossentropy()
    step = mpkeras.make_train_step(model, keras.optimizers.Adam(0.02), loss, jit_compile=jit_compile)
    for _ in range(2):
        step(X, Y)
    mpkeras.apply_policy(model, then)
    before = snapshot(model.trainable_variables)
    losses = [float(step(X, Y)["loss"]) for _ in range(20)]
    assert all(a != b for a, b in zip(before, snapshot(model.trainable_variables), strict=True))
    assert dtypes(model.get_layer("first").variables) == {then}
    assert dtypes(v for v in slots(step.optimizer) if "first" in v.name) == {then}
    assert int(step.optimizer.iterations) == 22
    _, _, reference = trained("make_train_step", "float32", batches=1)
    assert losses[-1] < 0.5 * reference
    keras_loss = float(keras.ops.convert_to_numpy(loss(Y, model(X, training=True))))
    assert abs(keras_loss - losses[-1]) < 0.1


@pytest.mark.slow
def test_a_step_of_a_model_that_is_converted_to_float16_scales_its_loss():
    model = classifier()
    step = mpkeras.make_train_step(model, "sgd", keras.losses.SparseCategoricalCrossentropy())
    assert float(step(X, Y)["loss_scale"]) == 1.0
    mpkeras.apply_policy(model, mpkeras.Policy("mixed_float16", loss_scale=256.0))
    assert float(step(X, Y)["loss_scale"]) == 256.0
    assert int(step.optimizer.iterations) == 2


def step_by(door, model, optimizer, policy=None):
    """Returns a function that takes a step on `(x, y)`, and the optimizer; without a policy the model is as it is."""
    loss = keras.losses.SparseCategoricalCrossentropy()
    if door == "prepare":
        model.compile(optimizer, loss)
        mpkeras.prepare(model, policy or "float32")
        return model.train_on_batch, model.optimizer
    model.optimizer = optimizer  # It is the model's: `apply_policy` knows it.
    if policy is not None:
        mpkeras.apply_policy(model, policy)
    step = mpkeras.make_train_step(model, optimizer, loss)
    return step, step.optimizer


@pytest.mark.slow
@pytest.mark.parametrize("door", ["prepare", "make_train_step"])
def test_slots_that_are_made_small_between_steps_are_the_ones_that_move(door):
    step, optimizer = step_by(door, classifier(), keras.optimizers.Adam())
    step(X, Y)
    optimizer.slot_dtype = "bfloat16"
    as_converted = snapshot(slots(optimizer))
    step(X, Y)
    assert dtypes(slots(optimizer)) == {"bfloat16"}
    assert all(a != b for a, b in zip(as_converted, snapshot(slots(optimizer)), strict=True))


def test_an_optimizer_of_an_own_loop_finds_weights_that_are_stored_anew():
    model = classifier()
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.5, momentum=0.5), loss_scale=1.0)
    optimizer.build(model.trainable_variables)
    mpkeras.apply_policy(model, "bfloat16")
    before = [in_float32(v) for v in model.trainable_variables]
    optimizer.apply([keras.ops.ones(v.shape) for v in model.trainable_variables], model.trainable_variables)
    for old, variable in zip(before, model.trainable_variables, strict=True):
        np.testing.assert_allclose(in_float32(variable), old - 0.5, atol=2.0**-6)  # a step of bfloat16 at 2


@pytest.mark.slow
@pytest.mark.parametrize("door", ["prepare", "make_train_step"])
@pytest.mark.parametrize("excluded", ["by name", "as an object"])
def test_what_does_not_decay_is_excluded_before_the_weights_are_stored_anew(excluded, door):
    model = classifier()
    dense = model.get_layer("first")
    dense.bias.assign(keras.ops.full((24,), 8.0))
    optimizer = keras.optimizers.AdamW(1e-3, weight_decay=40.0)
    named = {"var_names": ["bias"]} if excluded == "by name" else {"var_list": [dense.bias]}
    optimizer.exclude_from_weight_decay(**named)
    step, _ = step_by(door, model, optimizer, "bfloat16")
    kernel = np.abs(in_float32(dense.kernel)).mean()
    for _ in range(10):
        step(X, Y)
    # 0.96 of it after each of ten steps: 0.66.
    assert np.abs(in_float32(dense.kernel)).mean() < 0.8 * kernel
    np.testing.assert_allclose(in_float32(dense.bias), 8.0, atol=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "expected"), [("float32", "float32"), ("bfloat16", "bfloat16")])
def test_slots_that_an_earlier_policy_asked_for_follow_the_next_one(policy, expected):
    other = "bfloat16" if expected == "float32" else "float32"
    for is_own in (False, True):
        model = classifier()
        optimizer = mpkeras.LossScaleOptimizer("adam", slot_dtype=other) if is_own else "adam"
        model.compile(optimizer, "sparse_categorical_crossentropy")
        mpkeras.prepare(model, mpkeras.Policy("mixed_bfloat16", slot_dtype="auto" if is_own else other))
        model.train_on_batch(X, Y)
        mpkeras.prepare(model, policy)
        model.train_on_batch(X, Y)
        of_dense = [v for v in slots(model.optimizer) if "first" in v.name]
        # What the user gave the optimizer stays.
        assert dtypes(of_dense) == {other if is_own else expected}


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="not in this Keras")
def test_several_optimizers_in_one_find_the_weights_that_are_stored_anew():
    def run(policy):
        model = classifier()
        head = keras.optimizers.SGD(0.1, momentum=0.5)
        others = keras.optimizers.Adam(0.02)
        optimizer = keras.optimizers.MultiOptimizer(lambda v: head if "head" in v.path else others)
        model.compile(optimizer, "sparse_categorical_crossentropy")
        model.train_on_batch(X, Y)
        mpkeras.prepare(model, policy)
        losses = [float(model.train_on_batch(X, Y)) for _ in range(15)]
        return losses[-1], dtypes(model.get_layer("first").variables)

    (reference, _), (loss, found) = run("float32"), run("bfloat16")
    assert found == {"bfloat16"} and reference < 0.3 and abs(loss - reference) < 0.1


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "jax")
def test_steps_of_one_model_in_turn_are_each_traced_once():
    traces = []

    def traced(name):
        def loss(y, y_pred):
            traces.append(name)
            return keras.losses.sparse_categorical_crossentropy(y, y_pred)

        return loss

    model = mpkeras.apply_policy(classifier(), "mixed_bfloat16")
    steps = [mpkeras.make_train_step(model, "sgd", traced(name), jit_compile=True) for name in ("first", "second")]
    for step in steps * 2:
        step(X, Y)
    before = len(traces)
    for step in steps * 3:
        step(X, Y)
    assert len(traces) == before
    # There and back, the weights are others on TensorFlow, of the same dtype.
    for policy in ("bfloat16", "mixed_bfloat16"):
        mpkeras.apply_policy(model, policy)
    kernel = snapshot([model.get_layer("first").kernel])
    for step in steps:
        step(X, Y)
    assert {"first", "second"} <= set(traces[before:]) and snapshot([model.get_layer("first").kernel]) != kernel


class Follows(keras.Model):
    """A second network follows the one that is trained, by what its step assigns."""

    def __init__(self, follow):
        super().__init__()
        keras.utils.set_random_seed(31)
        self.net, self.slow = (
            keras.Sequential([keras.Input((3,)), keras.layers.Dense(5, name=name), keras.layers.Dense(1)])
            for name in ("fast_1", "slow_1")
        )
        self.slow.trainable = False
        self.follow = follow

    def call(self, x):
        return self.net(x)

    def train_step(self, data):
        logs = super().train_step(data)
        self.follow(self.slow, self.net)
        return logs


def follow_slowly(slow, fast):
    for variable, other in zip(slow.weights, fast.weights, strict=True):
        variable.assign(variable + 0.002 * (keras.ops.cast(other, variable.dtype) - variable))


def copy_all(slow, fast):
    for variable, other in zip(slow.weights, fast.weights, strict=True):
        variable.assign(other)


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "torch")
def test_a_step_that_rounds_what_it_assigns_is_said_once_and_the_rule_helps():
    """A JAX step assigns nothing: it returns values."""
    x = np.ones((16, 3), "float32")

    def run(policy, follow=follow_slowly):
        model = Follows(follow)
        model.compile(keras.optimizers.SGD(0.0), "mse", run_eagerly=BACKEND == "tensorflow")
        mpkeras.prepare(model, policy)
        begin = in_float32(model.slow.weights[0])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(x, x[:, :1], batch_size=4, epochs=2, verbose=0)
        moved = in_float32(model.slow.weights[0]) - begin
        return moved, [str(w.message) for w in caught if "rounded to the nearest" in str(w.message)]

    moved, told = run("mixed_bfloat16")
    assert told == [] and np.abs(moved).max() > 0.001
    rounded, told = run("bfloat16")
    assert len(told) == 1 and "slow_1/kernel" in told[0] and "keep_float32" in told[0]
    assert np.abs(rounded - moved).max() > 0.5 * np.abs(moved).max()
    rules = (*mpkeras.get_policy("bfloat16").keep_float32, "path:slow_1")
    by_rule, told = run(mpkeras.Policy("bfloat16", keep_float32=rules))
    assert told == []
    np.testing.assert_allclose(by_rule, moved, rtol=0, atol=1e-4)
    assert run("bfloat16", copy_all)[1] == []
