"""A layer that writes state in its `call` keeps it as in float32, and nothing else leaves 16 bits."""

import functools
import importlib.util
import types

import keras
import numpy as np
import pytest
from keras import layers, ops

import mpkeras
from mpkeras.conversion.plan import plan
from mpkeras.policies.own_state import REMAT_RULE, STATE_RULE, kept_for_state
from tests.sixteen_bits import without_outputs
from tests.step_modes import FIT_MODES

# A counter that begins at 240 and a mean that begins at 2 stand still in bfloat16, at 256 and at once.
STEPS, FIRST_STEP, FIRST_MEAN = 24, 240, 2.0
X = np.random.default_rng(5).normal(loc=2.73, size=(2 * STEPS, 4)).astype("float32")
POLICY = mpkeras.Policy("mixed_bfloat16")
WITH_HEADS_IN_16_BITS = without_outputs()


def follow(average, x, decay):
    average.assign(average * decay + (1 - decay) * ops.mean(x, axis=0))


COUNTER, MEAN = keras.initializers.Constant(FIRST_STEP), keras.initializers.Constant(FIRST_MEAN)


class Stateful(layers.Layer):
    def build(self, shape):
        self.steps = self.add_weight(shape=(), initializer=COUNTER, trainable=False, name="steps")
        self.mean = self.add_weight(shape=(shape[-1],), initializer=MEAN, trainable=False, name="mean")
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="calls")


class ByMethod(Stateful):
    def call(self, x, training=False):
        if training:
            self.steps.assign_add(1.0)
            self.mean.assign(self.mean * 0.99 + 0.01 * ops.mean(x, axis=0))
        return x - self.mean


class ByFunction(Stateful):
    """Takes care of dtypes by itself."""

    def call(self, x, training=False):
        if training:
            self.steps.assign_sub(-1.0)
            follow(self.mean, x, decay=0.99)
        return x - ops.cast(self.mean, self.compute_dtype)


class Holder(Stateful):
    def call(self, x):
        return x + self.mean


class ForAnother(layers.Layer):
    """Writes what a layer inside owns."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner, self.dense = Holder(), layers.Dense(4)

    def call(self, x, training=False):
        outputs = x + self.dense(self.inner(x))
        if training:
            for state in [self.inner.steps]:
                state.assign_add(1.0)
            follow(self.inner.mean, x, decay=0.99)
        return outputs


class Around(layers.Layer):
    """Adds what a stateful layer returns to its own 16 bits: TensorFlow takes no two dtypes."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inner, self.chain = ByMethod(), keras.Sequential([layers.Dense(4), ByFunction()])

    def call(self, x):
        return x * (1 + 0.01 * self.inner(x)) + 0.01 * self.chain(x)


class WithWeights(Stateful):
    def build(self, shape):
        super().build(shape)
        self.scale = self.add_weight(shape=(4,), initializer="ones", name="scale")

    def call(self, x, training=False):
        if training:
            self.steps.assign_add(1.0)
            follow(self.mean, x, decay=0.99)
            self.scale.assign(self.scale * 0.9999)
        return x * self.scale


class Network(keras.Model):
    def __init__(self):
        super().__init__()
        self.inner, self.head = layers.Dense(4), layers.Dense(1)
        self.steps = self.add_weight(shape=(), initializer=COUNTER, trainable=False, name="steps")
        self.mean = self.add_weight(shape=(4,), initializer=MEAN, trainable=False, name="mean")

    def call(self, x, training=False):
        if training:
            self.steps.assign_add(1.0)
            follow(self.mean, x, decay=0.99)
        return self.head(x - self.mean + self.inner(x))


def in_sequential(cls):
    return lambda: keras.Sequential([keras.Input((4,)), cls(), layers.Dense(1, name="head")])


def in_functional(cls):
    def made():
        inputs = keras.Input((4,))
        return keras.Model(inputs, layers.Dense(1, name="head")(inputs + cls()(inputs)))

    return made


MODELS = {
    "in Sequential": in_sequential(ByMethod),
    "in Functional": in_functional(ByFunction),
    "of another layer": in_sequential(ForAnother),
    "in a layer": in_functional(Around),
    "weights": in_sequential(WithWeights),
    "a model's own": Network,
    "built late": lambda: keras.Sequential([ByMethod(), layers.Dense(1, name="head")]),
}


def by_fit(model, policy=POLICY, door="prepare", **options):
    model.compile(keras.optimizers.SGD(1e-4), "mse", **options)
    callbacks = [mpkeras.callbacks.MixedPrecision(policy)] if door == "callback" else []
    if door == "prepare":
        mpkeras.prepare(model, policy)
    model.fit(X, X[:, :1], batch_size=2, shuffle=False, verbose=0, callbacks=callbacks)


def by_step(model):
    mpkeras.apply_policy(model, POLICY)
    step = mpkeras.make_train_step(model, keras.optimizers.SGD(1e-4), "mse")
    for start in range(0, 2 * STEPS, 2):
        step(X[start : start + 2], X[start : start + 2, :1])


def states_of(model):
    """Returns what the counters have counted, and by how much each running mean is off."""
    steps = [float(ops.convert_to_numpy(v)) - FIRST_STEP for v in model.variables if v.name == "steps"]
    mean = np.full(4, FIRST_MEAN)
    for start in range(0, 2 * STEPS, 2):
        mean = mean * 0.99 + 0.01 * X[start : start + 2].mean(axis=0, dtype="float64")
    means = [ops.convert_to_numpy(v) for v in model.variables if v.name == "mean"]
    return steps, np.max(np.abs(np.stack(means) - mean), axis=1)


@pytest.mark.slow
@pytest.mark.parametrize("made", MODELS.values(), ids=MODELS)
def test_state_moves_as_in_float32(made):
    keras.utils.set_random_seed(3)
    model = made()
    by_fit(model, WITH_HEADS_IN_16_BITS)
    steps, off = states_of(model)
    assert set(steps) == {STEPS}
    # That of `Around` is of activations in part: the mean of the raw inputs is one of them.
    assert off.min() < 3e-3
    # Products stay in 16 bits.
    dense = [layer for layer in model._flatten_layers() if isinstance(layer, layers.Dense)]
    assert {layer.compute_dtype for layer in dense} == {"bfloat16"}
    assert {v.dtype for v in model.variables if v.name in ("steps", "mean")} == {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize("options", [*FIT_MODES, pytest.param({"door": "callback"}, id="callback")])
def test_in_every_mode_of_fit(options):
    model = in_functional(Around)()
    by_fit(model, **options)
    assert set(states_of(model)[0]) == {STEPS}


@pytest.mark.slow
def test_in_a_step_of_ours():
    model = Network()
    by_step(model)
    steps, off = states_of(model)
    assert steps == [STEPS] and off.max() < 3e-3


@pytest.mark.slow
def test_a_skipped_step_puts_it_back():
    data = X[:8].copy()
    data[4] = 1e38
    model, other = in_sequential(WithWeights)(), in_sequential(WithWeights)()
    other.set_weights(model.get_weights())
    for each in (model, other):
        each.compile(keras.optimizers.SGD(1e-4), "mse")
        mpkeras.prepare(each, "mixed_float16", loss_scale=8.0)
    with pytest.warns(UserWarning, match="1 of 4 steps skipped"):
        model.fit(data, np.zeros((8, 1)), batch_size=2, shuffle=False, verbose=0)
    other.fit(np.delete(data, [4, 5], axis=0), np.zeros((6, 1)), batch_size=2, shuffle=False, verbose=0)
    for value, expected in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(value, expected)


def test_the_plan_and_the_audit_say_why():
    model = mpkeras.apply_policy(in_sequential(ByMethod)(), POLICY)
    row = next(row for row in plan(model, POLICY) if isinstance(row.layer, ByMethod))
    assert (row.layer.compute_dtype, row.rule) == ("float32", STATE_RULE)
    assert row.reason.startswith("writes its own state 'steps', 'mean' in its `call`")
    assert row.reason in str(mpkeras.audit(model))
    assert row.reason not in str(mpkeras.audit(in_sequential(ByMethod)()))
    with mpkeras.policy_scope(POLICY):
        made_in_16_bits = in_sequential(ByMethod)()
    assert "It computes in bfloat16 and writes its own state" in str(mpkeras.audit(made_in_16_bits))


def test_the_way_back():
    model = mpkeras.apply_policy(in_functional(Around)(), POLICY)
    mpkeras.apply_policy(model, "float32")
    assert {layer.dtype_policy.name for layer in model._flatten_layers()} == {"float32"}
    assert not any("_mpkeras_replaced" in vars(layer) for layer in model._flatten_layers())


def test_a_model_that_is_compiled_later_scales_its_loss():
    model = mpkeras.apply_policy(Network(), "mixed_float16")
    assert (model.compute_dtype, model.inner.compute_dtype) == ("float32", "float16")
    model.compile("sgd", "mse")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


class Ema:
    def __init__(self):
        self.value = keras.Variable(0.0, trainable=False)

    def update(self, x):
        self.value.assign(0.9 * self.value + 0.1 * x)


class ByHelper(layers.Layer):
    def __init__(self):
        super().__init__()
        self.ema = Ema()

    def call(self, x):
        self.ema.update(ops.mean(x))
        return x


class ByMetric(layers.Layer):
    def __init__(self):
        super().__init__()
        self.norm = keras.metrics.Mean(name="norm")

    def call(self, x):
        self.norm.update_state(ops.norm(x))
        return x


class InCondition(Stateful):
    def call(self, x):
        ops.cond(ops.mean(x) > 0, lambda: self.steps.assign(1.0), lambda: self.steps.value)
        return x


class Inherited(ByMethod):
    def call(self, x):
        return super().call(x, training=True)


class OfOwnMethod(Stateful):
    def assign(self, x):
        return ops.argmax(x)

    def call(self, x):
        return ops.cast(self.assign(x), x.dtype) + x


class Counting(Stateful):
    def call(self, x):
        self.calls.assign_add(1)
        return x


class Uncast(layers.Layer):
    def build(self, shape):
        self.steps = self.add_weight(shape=(), initializer="zeros", trainable=False, autocast=False)

    def call(self, x):
        self.steps.assign_add(1.0)
        return x


class Resetting(Stateful):
    def reset(self):
        self.steps.assign(0.0)

    def call(self, x):
        return x


GLOBAL = keras.Variable(0.0, trainable=False)


class OfAGlobal(layers.Layer):
    def call(self, x):
        GLOBAL.assign_add(1.0)
        return x


class InPlace(Stateful):
    """As torch writes."""

    def call(self, x):
        self.mean.value.mul_(0.99).add_(0.01 * x.mean(0))
        self.steps.value.data.copy_(x)
        return x


class Observed(layers.Dense):
    """Keras' own `call` runs a method of its user's."""

    def build(self, shape):
        super().build(shape)
        self.steps = self.add_weight(shape=(), initializer=COUNTER, trainable=False, name="steps")
        self.activation = self.observe

    def observe(self, x):
        self.steps.assign_add(1.0)
        return ops.relu(x)


class Watched(layers.EinsumDense):
    """Of the methods, Keras' own `call` runs none that writes."""

    def __init__(self):
        super().__init__("ab,bc->ac", output_shape=3, activation=lambda x: x * 2)

    def forget(self):
        self.kernel.assign(self.kernel * 0.0)


class Recording(layers.GRUCell):
    def __init__(self):
        super().__init__(2)
        self.drawn = keras.Variable(0.0, trainable=False)

    def get_dropout_mask(self, x):
        self.drawn.assign(self.drawn + 1.0)
        return super().get_dropout_mask(x)


class WithProperty(Stateful):
    """Has a property that hands on to a variable what it is set to."""

    @property
    def count(self):
        return self.steps * 1.0

    @count.setter
    def count(self, value):
        self.steps.assign(value)


class ByProperty(WithProperty):
    def call(self, x):
        self.count = self.count + 1.0
        return x


class Reading(WithProperty):
    def call(self, x):
        return x * self.count


class Peak:
    """An activation that is an object."""

    def __init__(self):
        self.highest = keras.Variable(0.0, trainable=False)

    def __call__(self, x):
        self.highest.assign(ops.maximum(self.highest, ops.max(x)))
        return x


class ByBoundMethod(Stateful):
    def build(self, shape):
        super().build(shape)
        self.count, self.forget = self.steps.assign_add, [functools.partial(self.mean.assign, 0.0)]

    def call(self, x):
        self.count(1.0)
        self.forget[0]()
        return x


class ByNamespace(layers.Layer):
    def __init__(self):
        super().__init__()
        self.kept = types.SimpleNamespace(range=types.SimpleNamespace(low=keras.Variable(0.0, trainable=False)))

    def call(self, x):
        self.kept.range.low.assign(ops.min(x))
        return x


class OfItsClass(layers.Layer):
    seen = keras.Variable(0.0, trainable=False)

    def call(self, x):
        self.seen.assign_add(2.0)
        return x


MODULE = types.ModuleType("settings")
MODULE.epoch, MODULE.tables = keras.Variable(0.0, trainable=False), {"rows": [keras.Variable(0.0, trainable=False)]}


class OfAModule(layers.Layer):
    def call(self, x):
        MODULE.epoch.assign_add(0.5)
        return x


class OfATable(layers.Layer):
    def call(self, x):
        MODULE.tables["rows"][0].assign_add(0.5)
        return x


class IntoItems(Stateful):
    """As torch writes a queue."""

    def call(self, x):
        self.mean.value[1:] = x[0, 1:]
        return x


class IntoAnAlias(Stateful):
    def call(self, x):
        mean = self.mean.value
        mean[:2].lerp_(x[0, :2], 0.1)
        return x


class IntoAnOutput(Stateful):
    def call(self, x):
        return ops.convert_to_tensor(1.0).add(self.steps.value, out=self.steps.value) * x


class IntoAnother(Stateful):
    """Writes into what it made, and reads a weight."""

    def build(self, shape):
        super().build(shape)
        self.scale = self.add_weight(shape=(4,))

    def call(self, x):
        y = x * self.scale.value
        y[:, 0] = 0.0
        return y


ON_TORCH = pytest.mark.skipif(keras.backend.backend() != "torch", reason="on torch alone tensors are written into")


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (ByMethod, "'steps', 'mean'"),
        (ByBoundMethod, "'mean', 'steps'"),
        (ByNamespace, "'low'"),
        (OfItsClass, "'seen'"),
        (OfAModule, "'epoch'"),
        pytest.param(IntoItems, "'mean'", marks=ON_TORCH),
        pytest.param(IntoAnAlias, "'mean'", marks=ON_TORCH),
        pytest.param(IntoAnOutput, "'steps'", marks=ON_TORCH),
        (IntoAnother, None),
        (ByFunction, "'steps'"),
        (ByHelper, "'value'"),
        (ByMetric, "'norm'"),
        (InCondition, "'steps'"),
        (Inherited, "'steps', 'mean'"),
        (OfAGlobal, "'GLOBAL'"),
        (InPlace, "'mean', 'steps'"),
        (ByProperty, "'steps'"),
        (lambda: Observed(3), "'steps'"),
        (Recording, "'drawn'"),
        (lambda: layers.Conv1D(3, 1, activation=Peak()), "'highest'"),
        (lambda: layers.Lambda(lambda x: x + GLOBAL.assign_add(1.0)), "'GLOBAL'"),
        (Holder, None),
        (Reading, None),
        (Watched, None),
        (lambda: layers.Dense(3, activation=keras.activations.gelu), None),
        (OfOwnMethod, None),
        (Counting, None),
        (Uncast, None),
        (Resetting, None),
    ],
)
def test_what_a_call_writes(made, expected):
    layer = made()
    if not isinstance(layer, layers.Lambda):
        layer.build((None, 5, 4) if isinstance(layer, layers.Conv1D) else (None, 4))
    kept = kept_for_state(layer)
    assert list(kept) == ([] if expected is None else [id(layer)])
    if expected is not None:
        assert f"writes its own state {expected} in its `call`" in kept[id(layer)][2]


def test_a_table_outside_of_the_layer():
    layer = OfATable()
    layer.build((None, 4))
    assert "writes state, by `call`, in its `call`" in kept_for_state(layer)[id(layer)][2]


# Keras asks for TensorFlow on JAX, too.
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="TensorFlow is not installed")
@pytest.mark.skipif(keras.backend.backend() == "torch", reason="Keras has no JaxLayer on torch")
def test_the_state_of_a_function_of_jax():
    jnp = pytest.importorskip("jax.numpy")

    def init(rng, inputs):
        return jnp.ones((4, 3)), {"steps": jnp.full((), float(FIRST_STEP)), "mean": jnp.full((4,), FIRST_MEAN)}

    def call(params, state, inputs):
        mean = state["mean"] * 0.99 + 0.01 * inputs.mean(0)
        return inputs @ params, {"steps": state["steps"] + 1, "mean": mean}

    def states(model, policy=None):
        by_fit(model, policy, door="prepare" if policy else None)
        return {name: ops.convert_to_numpy(state) for name, state in model.layers[0].state.items()}

    def made():
        return keras.Sequential([keras.Input((4,)), layers.JaxLayer(call, init), layers.Dense(1)])

    expected = states(made())
    assert expected["steps"] == FIRST_STEP + STEPS
    for name, value in states(made(), POLICY).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-6)


def test_a_wrapper_follows_the_layer_that_it_runs():
    model = keras.Sequential([keras.Input((3, 4)), layers.TimeDistributed(ByMethod()), layers.Dense(2)])
    mpkeras.apply_policy(model, WITH_HEADS_IN_16_BITS)
    assert [layer.compute_dtype for layer in model.layers] == ["float32", "bfloat16"]
    assert model(np.ones((2, 3, 4))).shape == (2, 3, 2)


def test_states_of_stock_recurrent_layers():
    keras.utils.set_random_seed(2)
    model = keras.Sequential([keras.Input(batch_shape=(2, 3, 4)), layers.LSTM(5, stateful=True)])
    sequences = X[:12].reshape(2, 6, 4)
    whole = keras.Sequential([keras.Input((6, 4)), layers.LSTM(5)])
    whole.set_weights(model.get_weights()[: len(whole.weights)])
    expected = ops.convert_to_numpy(whole(sequences))
    mpkeras.apply_policy(model, WITH_HEADS_IN_16_BITS)
    model(sequences[:, :3])
    outputs = ops.convert_to_numpy(model(sequences[:, 3:]))
    np.testing.assert_allclose(outputs, expected, atol=3e-2)  # 8 bits
    assert model.layers[0].compute_dtype == "bfloat16"


class UnderRemat(layers.Layer):
    def build(self, shape):
        self.kernel = self.add_weight(shape=(4, 4), name="kernel")
        self.product = keras.remat(self.multiplied)

    def multiplied(self, x):
        return ops.tanh(ops.matmul(x, self.kernel))

    def call(self, x):
        return x + self.product(x)


def test_a_function_under_remat():
    model = in_sequential(UnderRemat)()
    model.compile("sgd", "mse", run_eagerly=True)
    mpkeras.prepare(model, POLICY)
    model.fit(X[:8], X[:8, :1], verbose=0)
    runs_twice = keras.backend.backend() != "jax"
    assert model.layers[0].compute_dtype == ("float32" if runs_twice else "bfloat16")
    assert (plan(model, POLICY)[-2].rule == REMAT_RULE) == runs_twice
