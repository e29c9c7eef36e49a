"""The one line: a model that is built under a policy of mpkeras' trains as after `prepare`, whenever it is compiled."""

import contextlib
import copy
import json
import os
import pickle
import subprocess
import sys
import threading
import warnings
import zipfile

import keras
import numpy as np
import pytest
from keras import layers

import mpkeras
from mpkeras import _keras
from mpkeras.policies.policy import accumulating
from mpkeras.scaling.optimizer import LossScaleOptimizer
from mpkeras.training import covered_compile, guard
from mpkeras.training.global_policy import policy_alone
from tests.cases import first_quick
from tests.step_modes import snapshot
from tests.training.test_autoprepare import picture

rng = np.random.default_rng(5)
X = rng.normal(size=(40, 8)).astype("float32")
Y = rng.normal(size=(40, 2)).astype("float32")
BAD = slice(16, 24)


def stack(*inner, outputs=2):
    return keras.Sequential([keras.Input((8,)), *inner, layers.Dense(outputs, name="head")])


def plain():
    return stack(layers.Dense(16, "tanh"))


def with_statistics():
    return stack(layers.Dense(16), layers.BatchNormalization(), layers.Dropout(0.3, seed=3))


def nested():
    inputs = keras.Input((8,))
    features = keras.Sequential([keras.Input((8,)), layers.Dense(16, "tanh"), layers.BatchNormalization()])
    return keras.Model(inputs, layers.Dense(2)(layers.add([features(inputs), layers.Dense(16)(inputs)])))


def unbuilt():
    return keras.Sequential([layers.Dense(16, "tanh"), layers.BatchNormalization(), layers.Dense(2)])


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden, self.normalization, self.head = layers.Dense(16), layers.BatchNormalization(), layers.Dense(2)

    def call(self, x, training=False):
        return self.head(self.normalization(self.hidden(x), training=training))


MODELS = [plain, with_statistics, nested, unbuilt, Subclassed]


def fitted(model, rows, **options):
    x, y = X.copy(), Y
    x[BAD] = np.inf
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* steps skipped in epoch", UserWarning)
        history = model.fit(x[rows], y[rows], batch_size=8, shuffle=False, verbose=0, epochs=2, **options).history
    return history


# With a scale that no healthy batch overflows at.
FLOAT16 = mpkeras.Policy("mixed_float16", loss_scale=mpkeras.DynamicLossScale(128.0))
EVERY_ROW = np.arange(40)
GOOD_ROWS = np.delete(EVERY_ROW, BAD)


def by_the_line(make, policy, **options):
    keras.utils.set_random_seed(21)
    with mpkeras.policy_scope(policy):
        model = make()
    return compiled(model, **options)


def by_prepare(make, policy, **options):
    keras.utils.set_random_seed(21)
    return mpkeras.prepare(compiled(make(), **options), policy)


def compiled(model, optimizer=None, **options):
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse", metrics=["mae"], **options)
    return model


def compute_dtypes(model):
    if not model.built:
        model(X[:1])
    return {layer.name: layer.compute_dtype for layer in _keras.flatten_layers(model) if layer.weights}


CASES = [
    *[pytest.param(make, FLOAT16, {}, id=make.__name__) for make in MODELS],
    pytest.param(nested, "mixed_bfloat16", {}, id="bfloat16"),
    pytest.param(with_statistics, FLOAT16, {"run_eagerly": True}, id="eager"),
    pytest.param(with_statistics, FLOAT16, {"jit_compile": False}, id="without XLA"),
    pytest.param(with_statistics, mpkeras.Policy("mixed_bfloat16", slot_dtype="bfloat16"), {}, id="small slots"),
    pytest.param(
        lambda: stack(layers.Dense(32, "tanh"), layers.Dense(32, "tanh"), layers.Dense(32, "tanh")),
        "mixed_float8",
        {},
        id="float8",
    ),
    pytest.param(
        plain,
        mpkeras.Policy("mixed_float16", keep_float32=[layers.Dense], loss_scale=64.0),
        {},
        id="rules of one's own",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "policy", "options"), CASES)
def test_it_trains_as_after_prepare_and_a_skipped_step_leaves_no_trace(make, policy, options, backend):
    if backend == "torch" and options.get("jit_compile") is None:
        options = {**options, "jit_compile": False}
    model, expected = (door(make, policy, **options) for door in (by_the_line, by_prepare))
    history, expected_history = fitted(model, EVERY_ROW), fitted(expected, EVERY_ROW)
    assert list(compute_dtypes(model).values()) == list(compute_dtypes(expected).values())
    assert history == expected_history and history["skipped_steps"] == [1, 2]
    assert snapshot(model.variables) == snapshot(expected.variables)
    assert snapshot(model.optimizer.inner_optimizer.variables) == snapshot(expected.optimizer.inner_optimizer.variables)
    np.testing.assert_array_equal(model.predict(X, verbose=0), expected.predict(X, verbose=0))
    if policy is FLOAT16:
        # The same run without the fault.
        without = by_the_line(make, policy, **options)
        without_history = fitted(without, GOOD_ROWS)
        assert snapshot(model.variables) == snapshot(without.variables)
        assert history["mae"] == without_history["mae"]


def is_guarded(model, policy="float16"):
    return (
        guard.is_guarded(model)
        and type(model.optimizer) is LossScaleOptimizer
        and [layer.compute_dtype for layer in model.layers if layer.weights] == [policy, "float32"]
    )


def is_stock(model):
    return not guard.is_guarded(model) and not isinstance(model.optimizer, LossScaleOptimizer)


# Where, and when, it is compiled.


def test_in_the_scope_behind_it_and_after_the_policy_was_set_back():
    mpkeras.set_global_policy("mixed_bfloat16")
    with mpkeras.policy_scope("mixed_float16"):
        inside, behind, later = plain(), plain(), plain()
        assert is_guarded(compiled(inside))
    assert is_guarded(compiled(behind))
    mpkeras.set_global_policy("float32")
    keras.config.set_dtype_policy("mixed_bfloat16")
    assert is_guarded(compiled(later))
    # Not by what is in force now, but by what they were made under.
    mpkeras.set_global_policy("mixed_float16")
    keras.config.set_dtype_policy("float32")
    assert is_stock(compiled(plain()))


def test_compiled_again_after_another_policy_was_applied_and_after_an_explicit_prepare():
    model = by_the_line(plain, "mixed_float16")
    assert is_guarded(compiled(model))
    mpkeras.apply_policy(model, "mixed_bfloat16")
    assert is_guarded(compiled(model), "bfloat16")
    mpkeras.apply_policy(model, "float32")
    assert {layer.compute_dtype for layer in compiled(model).layers} == {"float32"}
    model = by_the_line(plain, "mixed_float16")
    mpkeras.prepare(model, "mixed_bfloat16", loss_scale=2.0)
    assert is_guarded(compiled(model), "bfloat16") and float(model.optimizer.loss_scale) == 2.0


def test_clones_and_copies():
    mpkeras.set_global_policy(mpkeras.Policy("mixed_float16", loss_scale=32.0))
    model = plain()
    mpkeras.set_global_policy("float32")
    for other in (keras.models.clone_model(model), keras.models.clone_model(compiled(model))):
        assert is_guarded(compiled(other)) and float(other.optimizer.loss_scale) == 32.0


@pytest.mark.slow
@pytest.mark.parametrize("compile", [True, False])
def test_load_model(tmp_path, compile):
    model = by_the_line(plain, "mixed_float16")
    fitted(model, GOOD_ROWS)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", compile=compile)
    if not compile:
        compiled(loaded)
    assert is_guarded(loaded)
    assert snapshot(loaded.variables) == snapshot(model.variables)
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))
    if compile:
        for trained in (model, loaded):
            keras.utils.set_random_seed(1)
            fitted(trained, EVERY_ROW)
        assert snapshot(loaded.variables) == snapshot(model.variables)
    mpkeras.set_global_policy(None)
    # The optimizer of the file is what scales its loss; nothing else is done to the model.
    assert not guard.is_guarded(keras.models.load_model(tmp_path / "model.keras"))


def test_what_is_saved_and_pickled_is_plain_keras(tmp_path):
    with mpkeras.policy_scope("mixed_float16"):
        model = plain()
        dense = model.layers[0]
    model.save(tmp_path / "model.keras")
    with zipfile.ZipFile(tmp_path / "model.keras") as file:
        assert "mpkeras" not in file.read("config.json").decode()
    name = dense.dtype_policy.name
    assert json.dumps(name) == '"mixed_float16"'
    assert type(pickle.loads(pickle.dumps(name))) is type(copy.deepcopy(name)) is str
    assert b"mpkeras" not in pickle.dumps(dense.get_config())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float64"])
def test_dtypes_of_tensors_are_plain_strings(dtype, recwarn):
    with mpkeras.policy_scope(dtype):
        model = plain()
    clone = keras.models.clone_model(model)
    for layer in (model.layers[0], clone.layers[0]):
        assert (layer.compute_dtype, layer.variable_dtype, layer.kernel.dtype) == (dtype,) * 3
    losses = [fitted(compiled(part), GOOD_ROWS)["loss"] for part in (model, clone)]
    assert np.isfinite(losses).all() and guard.is_guarded(model) and guard.is_guarded(clone)


# Stock stays stock.


@pytest.mark.slow
def test_models_of_keras_are_left_alone():
    before_the_line = plain()
    keras.config.set_dtype_policy("mixed_float16")
    under_keras = [plain(), stack(layers.Dense(4, dtype="mixed_float16")), Subclassed()]
    keras.config.set_dtype_policy("float32")
    mpkeras.set_global_policy("mixed_float16")
    keras.config.set_dtype_policy("mixed_float16")
    later = plain()
    keras.config.set_dtype_policy("float32")
    by_hand = stack(layers.Dense(4, dtype="mixed_float16"), layers.Dense(4, dtype="mixed_float16"))
    models = [before_the_line, *under_keras, later, by_hand, keras.models.clone_model(later)]
    for model in models:
        attributes = set(vars(model))
        assert is_stock(compiled(model))
        added = set(vars(model)) - attributes
        assert not {name for name in added if "mpkeras" in name or name in ("train_step", "compile", "fit")}
        assert set(fitted(model, GOOD_ROWS)) == {"loss", "mae"}
    wrapped = [type(model.optimizer) is keras.optimizers.LossScaleOptimizer for model in models]
    assert wrapped == [False, True, True, True, True, False, False]


@pytest.mark.slow
def test_a_model_that_keras_has_quantized_is_left_alone():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = stack(layers.Dense(16, "tanh"), layers.Dense(16))
    keras.config.set_dtype_policy("float32")
    for layer in model.layers:
        layer.quantize("int8")
    mpkeras.set_global_policy("mixed_bfloat16")
    model.compile("sgd", "mse")
    assert is_stock(model)
    assert {layer.dtype_policy.name for layer in model.layers if layer.weights} == {"int8_from_mixed_bfloat16"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Under policy 'bfloat16' layers make bfloat16 variables")
def test_a_model_that_is_quantized_before_it_is_compiled_is_guarded():
    with mpkeras.policy_scope("bfloat16"):
        model = stack(layers.Dense(24, "relu"))
    quantize(model)
    # Below half of bfloat16's spacing at the weights: in stock Keras none of them moves.
    losses = compiled(model, keras.optimizers.SGD(1e-3)).fit(X, Y, epochs=20, batch_size=40, verbose=0).history["loss"]
    assert guard.is_guarded(model)
    assert losses[-1] < 0.99 * losses[0]
    assert {layer.quantization_mode for layer in model.layers if layer.weights} == {"float8"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Skipping variable loading")
def test_a_quantized_model_in_a_file_is_guarded_if_it_computes_in_16_bits(tmp_path):
    for policy, guarded in (("mixed_bfloat16", True), ("float32", False)):
        keras.config.set_dtype_policy(policy)
        model = stack(layers.Dense(24, "relu"))
        keras.config.set_dtype_policy("float32")
        quantize(model)
        compiled(model).save(tmp_path / "model.keras")
        assert is_stock(model)
        with mpkeras.policy_scope("mixed_float16"):
            assert guard.is_guarded(keras.models.load_model(tmp_path / "model.keras")) is guarded


def quantize(model):
    for layer in model.layers:
        layer.quantize("float8")


def test_float32_covers_nothing_and_none_takes_all_back():
    compiled(plain())  # Keras imports its optimizers when they are asked for.
    before = picture()
    mpkeras.set_global_policy("float32")
    with mpkeras.policy_scope("float32"):
        assert picture() == before
    policy = mpkeras.set_global_policy("mixed_float16")
    model = compiled(plain())
    assert "keras.src.models.model.Model.__init_subclass__" in repr(policy) and "compile" in repr(policy)
    assert repr(policy) == repr(mpkeras.global_policy())
    assert picture() != before
    assert mpkeras.set_global_policy(None) == mpkeras.Policy("float32")
    assert picture() == before and keras.config.dtype_policy() == keras.DTypePolicy("float32")
    assert "compile" not in repr(policy)
    assert is_guarded(model) and is_guarded(compiled(model))
    # A second time there is nothing to take back.
    mpkeras.set_global_policy(None)
    assert picture() == before


@pytest.mark.parametrize("wrong", ["mixed_float61", 16])
@pytest.mark.parametrize("door", [mpkeras.set_global_policy, mpkeras.policy_scope, mpkeras.autoprepare])
def test_a_wrong_name_changes_nothing(door, wrong):
    before = picture()
    with pytest.raises((ValueError, TypeError), match="mixed_float16"), door(wrong):
        pass
    assert picture() == before and keras.config.dtype_policy() == keras.DTypePolicy("float32")


def test_keras_default_is_the_floatx_of_the_user():
    keras.config.set_floatx("float64")
    mpkeras.set_global_policy("mixed_float16")
    mpkeras.set_global_policy(None)
    assert keras.config.dtype_policy() == keras.DTypePolicy("float64")


def test_float16_variables_are_refused_when_they_are_compiled():
    with pytest.warns(UserWarning, match="for inference"), mpkeras.policy_scope("float16"):
        model = plain()
    with pytest.raises(ValueError, match="float16 variables"):
        compiled(model)
    model.compile(None, "mse")
    assert np.isfinite(np.asarray(model.test_on_batch(X[:2], Y[:2]), "float32")).all()


# Beside other ways in.


def test_with_autoprepare_the_innermost_decides():
    mpkeras.set_global_policy("mixed_float16")
    with mpkeras.autoprepare("mixed_bfloat16"):
        assert is_guarded(compiled(plain()), "bfloat16")
        with mpkeras.policy_scope("mixed_float16"):
            assert is_guarded(compiled(plain()), "float16")
            # Not one of those that are built under it.
            keras.config.set_dtype_policy("float32")
            assert is_guarded(compiled(plain()), "bfloat16")
        assert is_guarded(compiled(plain()), "bfloat16")
    assert covered_compile.position_of(covered_compile._in_force[0]) == 0 and len(covered_compile._in_force) == 1
    keras.config.set_dtype_policy("float32")
    assert is_stock(compiled(plain()))


@pytest.mark.slow
def test_a_callback_of_one_fit_leaves_the_model_as_it_was():
    model = by_the_line(plain, "mixed_float16")
    expected = by_the_line(plain, "mixed_float16")
    fitted(model, EVERY_ROW, callbacks=[mpkeras.callbacks.MixedPrecision("mixed_float16")])
    fitted(expected, EVERY_ROW)
    assert is_guarded(model) and snapshot(model.variables) == snapshot(expected.variables)
    assert fitted(model, GOOD_ROWS).keys() == {"loss", "mae", "loss_scale", "skipped_steps"}


@pytest.mark.slow
def test_make_train_step_of_a_compiled_model():
    losses = []
    for compiles in (True, False):
        keras.utils.set_random_seed(2)
        with mpkeras.policy_scope("mixed_float16"):
            model = with_statistics()
        if compiles:
            compiled(model)
        step = mpkeras.make_train_step(model, keras.optimizers.Adam(0.01), "mse")
        losses.append([float(step(X[i : i + 8], Y[i : i + 8])["loss"]) for i in range(0, 16, 8)])
        assert [layer.compute_dtype for layer in model.layers] == ["float16", "float32", "float16", "float32"]
    assert losses[0] == losses[1]


PROGRAM = """
import keras, numpy as np, mpkeras
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
model.compile("sgd", "mse")
print(sorted(model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0).history), model.layers[0].compute_dtype)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "printed"),
    [("mixed_bfloat16", "['loss', 'loss_scale', 'skipped_steps'] bfloat16"), ("", "['loss'] float32")],
)
def test_the_environment_variable_guards(policy, printed):
    environment = {**os.environ, "MPKERAS_POLICY": policy}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == printed, done.stderr[-2000:]


# Loops of one's own.


def own_loop(model, optimizer, steps=2):
    optimizer.build(model.trainable_variables)
    for _ in range(steps):
        optimizer.scale_loss(1.0)
        zeros = [keras.ops.zeros(variable.shape) for variable in model.trainable_variables]
        optimizer.apply(zeros, model.trainable_variables)


def test_a_loop_of_ones_own_is_told_once_which_layers_should_be_in_float32():
    with mpkeras.policy_scope("mixed_float16"):
        normalizations = layers.BatchNormalization(name="norm"), layers.LayerNormalization(name="scaled")
        inner = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="feature"), *normalizations])
        model = stack(layers.Dense(4, name="first"), inner, layers.Dense(3, name="wide"), outputs=2)
        model = keras.Sequential([model, layers.Softmax(name="soft")])
        bystander = stack(layers.BatchNormalization(name="bystander"))
    with pytest.warns(UserWarning, match="trains in 16 bits") as told:
        own_loop(model, mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.1), name="mine"))
    (message,) = [str(warning.message) for warning in told]
    for name in ("'mine'", "norm'", "head'", "soft'", "apply_policy(model, 'mixed_float16')", "make_train_step"):
        assert name in message
    assert not any(name in message for name in ("bystander", "first'", "wide'", "feature'", "scaled'"))
    assert bystander.built


class Counting(layers.Layer):
    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        return x


class Reading(keras.Model):
    """Rows of codes and a head in float32, which Keras hands rounded codes."""

    def __init__(self):
        super().__init__(name="reading")
        self.rows, self.head = layers.Embedding(3000, 2), layers.Dense(1, dtype="float32")

    def call(self, codes):
        return self.head(self.rows(codes[:, 0]))


def ending(*hidden):
    return keras.Sequential([keras.Input((4,)), *hidden, layers.Flatten(), layers.Dense(1, dtype="float32")])


@pytest.mark.parametrize(
    ("make", "named"),
    first_quick(
        [
            (Reading, "'reading' (raw inputs, float32 outputs)"),
            (lambda: ending(layers.Embedding(3000, 2), layers.Dense(2)), "(raw inputs)"),
            (lambda: ending(layers.Reshape((2, 2), name="folded"), layers.Embedding(3000, 2)), "folded' (Embedding)"),
            (lambda: ending(layers.Dense(2), Counting(name="counting")), "counting' (writes state)"),
        ]
    ),
    ids=["subclassed", "embedding first", "reshaped", "counting"],
)
def test_a_loop_of_ones_own_is_told_what_else_its_policy_would_do(make, named):
    """Whose layers that make outputs are in float32 already: nothing else said that 2049 is 2048 here."""
    with mpkeras.policy_scope("mixed_float16"):
        model = make()
        model(np.full((2, 4), 2049.0, "float32"))
    with pytest.warns(UserWarning, match="trains in 16 bits") as told:
        own_loop(model, mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
    (message,) = [str(warning.message) for warning in told]
    assert named in message
    mpkeras.apply_policy(model, "mixed_float16")
    own_loop(model, mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.1)))


def test_a_loop_goes_on_beside_objects_that_have_no_init_yet():
    """Keras makes one of each class that is called as `Functional` is: `Own(inputs, outputs)`."""

    class Own(keras.Model):
        pass

    unmade = Own.__new__(Own), keras.layers.Dense.__new__(keras.layers.Dense)
    with mpkeras.policy_scope("mixed_bfloat16"):
        model = mpkeras.apply_policy(with_statistics(), "mixed_bfloat16")
    weight = model.trainable_variables[0]
    value = keras.ops.convert_to_numpy(weight.value)
    own_loop(model, mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.1, weight_decay=0.5)))
    np.testing.assert_allclose(keras.ops.convert_to_numpy(weight.value), value * 0.95**2, rtol=1e-6)
    del unmade


@pytest.mark.slow
@pytest.mark.parametrize(
    "carried_out", ["apply_policy", "a policy of one's own", "make_train_step", "compile", "stock"]
)
def test_a_loop_whose_model_obeys_its_policy_is_told_nothing(carried_out):
    if carried_out == "stock":
        keras.config.set_dtype_policy("mixed_float16")
        model = with_statistics()
        mpkeras.set_global_policy("mixed_bfloat16")
    else:
        with mpkeras.policy_scope("mixed_float16"):
            model = with_statistics()
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    if carried_out == "apply_policy":
        mpkeras.apply_policy(model, "mixed_float16")
    elif carried_out == "a policy of one's own":
        mpkeras.apply_policy(model, mpkeras.Policy("mixed_float16", keep_float32=()))
    elif carried_out == "make_train_step":
        mpkeras.make_train_step(model, optimizer, "mse")(X[:8], Y[:8])
    elif carried_out == "compile":
        compiled(model)
    own_loop(model, optimizer)


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("options", [{}, {"jit_compile": True}], ids=["graph", "XLA"])
def test_a_loop_in_a_tf_function_is_told_too(options, caplog):
    """And AutoGraph, which cannot read how it is looked at, says nothing."""
    import tensorflow as tf

    with mpkeras.policy_scope("mixed_float16"):
        model = with_statistics()
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(model.trainable_variables)

    @tf.function(**options)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.cast(model(x, training=True), "float32") - y) ** 2)
            scaled_loss = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled_loss, model.trainable_variables), model.trainable_variables)
        return loss

    with pytest.warns(UserWarning, match="batch_normalization.*head") as told:
        losses = [float(step(X[:8], Y[:8])) for _ in range(3)]
    assert len(told) == 1 and losses[-1] < losses[0]
    assert "AutoGraph" not in caplog.text


def test_a_loop_is_told_nothing_of_a_model_that_rounds_nothing_nor_once_the_line_is_taken_back():
    with mpkeras.policy_scope("mixed_bfloat16"):
        own_loop(ending(layers.Dense(2)), mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
        model = with_statistics()
    mpkeras.set_global_policy(None)
    own_loop(model, mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.1)))


# What `clear_session` takes away.


def test_after_clear_session_the_line_holds_for_what_is_compiled_next():
    before_the_line = plain()
    mpkeras.set_global_policy("mixed_float16")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            keras.utils.clear_session(free_memory=False)
            model, second = plain(), plain()
            assert compute_dtypes(model)["head"] == "float32"
            assert is_guarded(compiled(model)) and is_guarded(compiled(second))
    (message,) = [str(warning.message) for warning in told]
    assert "clear_session" in message and "'mixed_float16'" in message
    with pytest.warns(UserWarning, match="2 of 2: 'dense.*', 'head'. Set the policy before"):
        assert is_stock(compiled(before_the_line))
    assert is_guarded(compiled(plain()))


def test_after_clear_session_in_a_scope_too():
    with pytest.warns(UserWarning, match="policy_scope.*until their model is compiled"):
        with mpkeras.policy_scope("mixed_float16"):
            keras.utils.clear_session(free_memory=False)
            model = plain()
    other = plain()
    assert is_guarded(compiled(model)) and is_stock(compiled(other))


# Odd places of `compile`.


class CompiledAtOnce(keras.Model):
    def __init__(self):
        super().__init__()
        self.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
        self.hidden, self.head = layers.Dense(8, "tanh"), layers.Dense(2)

    def call(self, x):
        return self.head(self.hidden(x))


@pytest.mark.slow
def test_a_model_that_compiles_itself_before_it_has_layers():
    with mpkeras.policy_scope("mixed_float16"):
        model = CompiledAtOnce()
    history = fitted(model, EVERY_ROW)
    assert history["skipped_steps"] == [1, 2] and np.isfinite(history["loss"]).all()
    assert [model.hidden.compute_dtype, model.head.compute_dtype] == ["float16", "float32"]


def test_a_part_from_before_the_line_keeps_its_dtype():
    trunk = keras.Sequential([keras.Input((8,)), layers.Dense(16, "tanh", name="trunk")])
    mpkeras.set_global_policy("mixed_float16")
    model = keras.Sequential([trunk, layers.Dense(8, name="new"), layers.Dense(2, name="head")])
    with pytest.warns(UserWarning, match="1 of 3: 'trunk'. Set the policy before they are made; where") as told:
        compiled(model)
    found = compute_dtypes(model)
    assert [found[name] for name in ("trunk", "new", "head")] == ["float32", "float16", "float32"]
    assert guard.is_guarded(model)
    # It would take the layers in float32 for the user's choice.
    assert "mpkeras.prepare" not in str(told[0].message)


def test_the_remedy_for_a_model_from_before_the_line():
    model = stack(*[layers.Dense(4, name=f"dense_{number}") for number in range(4)])
    by_choice = stack(layers.Dense(4, dtype="float32"), layers.Dropout(0.1))
    by_choice.layers[-1].dtype_policy = keras.DTypePolicy("float32")
    with mpkeras.policy_scope("mixed_bfloat16"):
        with pytest.warns(UserWarning, match=r"'dense_2' and 2 more.*`mpkeras.prepare\(model, 'mixed_bfloat16'\)`"):
            compiled(model)
        compiled(by_choice)
        compiled(plain())
    compiled(plain())
    mpkeras.prepare(model, "mixed_bfloat16")
    found = compute_dtypes(model)
    assert [found[name] for name in ("dense_0", "dense_3", "head")] == ["bfloat16", "bfloat16", "float32"]


def in_thread(function, policy=None):
    """Runs `function()` in a new thread, in the scope of `policy` there if it is given; returns what was said."""

    def run():
        with contextlib.nullcontext() if policy is None else mpkeras.policy_scope(policy):
            results.append(function())

    results = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
    assert len(results) == 1
    return [(str(warning.message), warning.filename) for warning in told]


def test_a_model_that_is_made_in_a_thread_without_a_policy_is_said_to_be_in_float32():
    with mpkeras.policy_scope("mixed_bfloat16"):
        for_a_thread = plain()
        of_a_choice = keras.Sequential([keras.Input((8,), dtype="float32"), layers.Dense(2, dtype="float32")])
        of_a_choice.layers[0].dtype_policy = keras.DTypePolicy("float32")
        assert in_thread(lambda: compiled(for_a_thread)) == [] and guard.is_guarded(for_a_thread)
        assert in_thread(lambda: compiled(of_a_choice)) == []
        assert in_thread(lambda: compiled(plain()), "mixed_float16") == []
        with mpkeras.autoprepare("mixed_bfloat16"):
            assert in_thread(lambda: compiled(plain())) == []
        [(told, file)] = in_thread(lambda: [compiled(plain()), compiled(plain())])
    assert "of this thread is Keras' default, 'float32'" in told and "'mixed_bfloat16'" in told
    assert file == __file__


def test_an_autoprepare_around_the_line_prepares_what_was_made_before():
    model = plain()
    with mpkeras.autoprepare("mixed_float16"), mpkeras.policy_scope("mixed_float16"):
        assert is_guarded(compiled(model))


def test_many_layers_from_a_scope_of_float32_leave_the_model_guarded():
    mpkeras.set_global_policy("mixed_float16")
    codes = [keras.Input((1,), name=name) for name in "abcde"]
    with mpkeras.policy_scope("float32"):
        encodings = [layers.Discretization(bin_boundaries=[7.0, 2049.0], output_mode="one_hot") for _ in codes]
    rows = layers.Concatenate()([encode(code) for encode, code in zip(encodings, codes, strict=True)])
    model = keras.Model(codes, layers.Dense(2, name="head")(layers.Dense(8, name="new")(rows)))
    compiled(model)
    found = compute_dtypes(model)
    assert [encodings[0].compute_dtype, found["new"], found["head"]] == ["float32", "float16", "float32"]
    assert guard.is_guarded(model)


@pytest.mark.parametrize("left_alone", [False, True])
def test_a_policy_alone_is_in_force_for_layers_and_prepares_no_model(left_alone):
    mpkeras.set_global_policy("mixed_float16")
    with mpkeras.autoprepare("mixed_bfloat16"), policy_alone("float32", compile_left_alone=left_alone):
        model = compiled(stack())
    # An `autoprepare` that began before goes on, unless `compile` is left alone.
    assert guard.is_guarded(model) is not left_alone
    assert model.layers[0].compute_dtype == "float32"
    assert mpkeras.global_policy().name == "mixed_float16"


# Mean, standard deviation, and whether bfloat16 holds the mean well enough.
@pytest.mark.parametrize(("mean", "deviation", "is_lost"), [(-7e3, 40.0, True), (60.0, 25.0, False)])
def test_a_mean_that_was_rounded_before_the_rule_came_is_named(mean, deviation, is_lost):
    x = np.random.default_rng(8).normal(mean, deviation, (64, 2)).astype("float32")
    right = (x - x.mean(0, dtype="float64")) / x.std(0, dtype="float64")
    with pytest.warns(UserWarning, match="layers make bfloat16 variables"):
        mpkeras.set_global_policy("bfloat16")
    normalization = layers.Normalization(name="scaled")
    normalization.adapt(x)
    model = keras.Sequential([keras.Input((2,)), normalization, layers.Dense(1)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        model.compile("sgd", "mse")
    assert [str(w.message)[:23] for w in caught if w.category is UserWarning] == (
        ["Layer 'scaled' was adap"] if is_lost else []
    )
    error = np.abs(keras.ops.convert_to_numpy(normalization(x)) - right).max()
    assert (error > 0.05) == is_lost
    normalization.adapt(x)
    np.testing.assert_allclose(keras.ops.convert_to_numpy(normalization(x)), right, atol=1e-3)


@pytest.mark.parametrize(("remat", "accumulate_steps"), [("products", 1), (None, 3)])
def test_a_plan_in_float32_guards_too(remat, accumulate_steps):
    policy = accumulating(mpkeras.Policy("float32", remat=remat), accumulate_steps)
    with mpkeras.policy_scope(policy):
        blocks = [keras.Sequential([keras.Input((4,)), layers.Dense(8, "tanh"), layers.Dense(4)]) for _ in range(2)]
        model = keras.Sequential([keras.Input((4,)), *blocks, layers.Dense(1)])
        model.compile("sgd", "mse")
    assert model.optimizer.record.remat == remat
    assert (model.optimizer.gradient_accumulation_steps or 1) == accumulate_steps
