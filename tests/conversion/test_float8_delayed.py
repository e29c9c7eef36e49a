"""`Policy(float8="delayed")`: scales by past steps, in the state of Keras' own float8; against NumPy and Keras."""

import functools
import warnings

import keras
import ml_dtypes
import numpy as np
import pytest
from keras import layers, ops

import mpkeras
from mpkeras.conversion.converter import leave_float8
from mpkeras.conversion.float8 import STATE, float8_change, float8_state, multiplies_in_float8
from mpkeras.policies.rules import is_quantized
from tests.conversion.test_float8 import E4M3, E5M2, Later, reasons
from tests.sixteen_bits import without_outputs

LARGEST = {E4M3: np.float32(448.0), E5M2: np.float32(57344.0)}
rng = np.random.default_rng(1)


def delayed(**options):
    return mpkeras.Policy("mixed_float8", float8="delayed", **options)


every_layer = functools.partial(without_outputs, "mixed_float8", float8="delayed", keep_16_bits=())


def numpy(value):
    return ops.convert_to_numpy(value).copy()


def mlp(**options):
    hidden = [layers.Dense(width, "relu", name=f"part{i}") for i, width in enumerate((32, 48, 64))]
    return keras.Sequential([keras.Input((16,)), *hidden, layers.Dense(16, name="last")], name="net", **options)


def compiled(model, optimizer=None, **options):
    model.compile(keras.optimizers.Adam(0.01) if optimizer is None else optimizer, "mse", **options)
    return model


def prepared(model, policy=None, **options):
    return mpkeras.prepare(compiled(model, **options), delayed() if policy is None else policy)


def batches(count, rows=8, width=16):
    return [rng.normal(size=(rows, width)).astype("float32") * 3.0**i for i in range(count)]


def values_of(model):
    return [numpy(variable) for variable in [*model.variables, *model.optimizer.variables]]


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def state_of(layer):
    return {name: numpy(variable) for name, variable in float8_state(layer).items()}


# What is computed.


class Recipe:
    """Keras' recipe for one operand, by hand: the scale is that of the largest value of all steps before."""

    def __init__(self, dtype, length=1024):
        self.dtype, self.scale, self.history = dtype, np.float32(1.0), np.zeros(length, "float32")

    def step(self, values):
        """Returns the values that float8 has in the place of `values`, and moves on."""
        values = np.asarray(values, "float32").astype(ml_dtypes.bfloat16).astype("float32")
        if self.history.max() > 0:
            self.scale = np.float32(1) / (LARGEST[self.dtype] / self.history.max())
        factor = 2.0 ** np.floor(np.log2(1.0 / self.scale))
        self.history = np.roll(self.history, -1)
        self.history[0] = np.abs(values).max()
        limit = LARGEST[self.dtype]
        return np.clip(values * factor, -limit, limit).astype("float32").astype(self.dtype).astype("float64") / factor


@pytest.mark.every_case("jax", "torch")
def test_operands_and_state_are_those_of_the_recipe():
    """Five steps of one layer, of inputs that grow: those beyond what was seen before saturate."""
    layer = layers.Dense(32, use_bias=False)
    model = keras.Sequential([keras.Input((16,)), layer])
    # No learning: the products show the operands.
    model = prepared(model, every_layer(), optimizer=keras.optimizers.SGD(0.0))
    recipes = {name: Recipe(E5M2 if name == "outputs_grad" else E4M3) for name in ("inputs", "kernel", "outputs_grad")}
    kernel = numpy(layer.kernel)
    xs = batches(5)
    xs[0] *= 1000.0  # beyond 448 in the first step, where nothing is known
    xs[1] /= 1000.0
    for x in xs:
        y = rng.normal(size=(8, 32)).astype("float32")
        operands = [recipes[name].step(values) for name, values in (("inputs", x), ("kernel", kernel))]
        expected = operands[0] @ operands[1]
        # The state of the step before, as the step that follows reads it.
        found = numpy(ops.cast(model(x, training=True), "float32"))
        assert np.allclose(found, expected, rtol=2**-7, atol=2**-7 * np.abs(expected).max())
        model.train_on_batch(x, y)
        gradient = 2.0 * (found - y) / y.size
        recipes["outputs_grad"].step(gradient)
        state = state_of(layer)
        for name, recipe in recipes.items():
            exact = name != "outputs_grad"
            np.testing.assert_allclose(state[f"{name}_amax_history"], recipe.history, rtol=0 if exact else 0.02)
            np.testing.assert_allclose(state[f"{name}_scale"], recipe.scale, rtol=1e-6 if exact else 0.02)
    assert_equal([numpy(layer.kernel)], [kernel])
    # What was seen in the first step: nothing saturates but there.
    assert recipes["inputs"].scale > 1


def test_the_state_is_that_of_keras():
    """Beside a layer that Keras quantized itself, on the same data."""
    ours, stock = (keras.Sequential([keras.Input((16,)), layers.Dense(32, name="part")]) for _ in range(2))
    stock.layers[0].kernel.assign(numpy(ours.layers[0].kernel))
    stock.layers[0].dtype_policy = keras.dtype_policies.QuantizedFloat8DTypePolicy("float8", "mixed_bfloat16")
    prepared(ours, every_layer(), optimizer=keras.optimizers.SGD(0.0))
    compiled(stock, keras.optimizers.SGD(0.0))
    # Of such errors the gradients are as good as the same: Keras' own scale lags one step more behind.
    y = np.full((8, 32), 1e4, "float32")
    for x in batches(4):
        for model in (ours, stock):
            model.train_on_batch(x, y)
    found, expected = (state_of(model.layers[0]) for model in (ours, stock))
    assert tuple(found) == STATE
    for name in STATE:
        np.testing.assert_allclose(found[name], expected[name], rtol=0.02 if "grad" in name else 1e-6)


@pytest.mark.slow
@pytest.mark.every_case("jax", "torch")
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_skipped_step_leaves_no_trace(bad):
    x, y = rng.normal(size=(8, 16)).astype("float32"), np.ones((8, 16), "float32")
    with_bad, without = (prepared(mlp()) for _ in range(2))
    without.set_weights(with_bad.get_weights())
    for model in (with_bad, without):
        model.train_on_batch(x, y)
    before = values_of(with_bad)
    with_bad.train_on_batch(np.where(np.eye(8, 16) > 0, bad, x).astype("float32"), y)
    counters = {id(v) for v in with_bad.optimizer.variables} - {
        id(v) for v in with_bad.optimizer.inner_optimizer.variables
    }
    kept = [id(v) not in counters for v in [*with_bad.variables, *with_bad.optimizer.variables]]
    for old, new, stays in zip(before, values_of(with_bad), kept, strict=True):
        assert not stays or np.array_equal(old, new)
    for model in (with_bad, without):
        model.train_on_batch(x, y)
    assert_equal(with_bad.get_weights(), without.get_weights())


@pytest.mark.slow
def test_weights_in_bfloat16_leave_the_state_in_float32():
    model = prepared(mlp(), delayed(variable_dtype="bfloat16"))
    x = rng.normal(size=(8, 16)).astype("float32")
    model.fit(x, x, epochs=2, verbose=0)
    assert keras.backend.standardize_dtype(model.layers[1].kernel.dtype) == "bfloat16"
    assert {v.dtype for v in float8_state(model.layers[1]).values()} == {"float32"}
    assert multiplies_in_float8(model.layers[1])
    assert state_of(model.layers[1])["kernel_amax_history"][0] > 0


@pytest.mark.slow
def test_accumulation_keeps_the_largest_of_its_batches():
    model = mpkeras.apply_policy(mlp(), delayed())
    step = mpkeras.make_train_step(
        model, keras.optimizers.SGD(0.0), keras.losses.MeanSquaredError(), accumulate_steps=3
    )
    xs = batches(3)
    amax = []
    for x in (xs[1], xs[2], xs[0]):
        first = model.layers[0]
        inputs = numpy(ops.cast(first(x), "float32"))
        amax.append(np.abs(inputs).max())
        step(x, np.ones((8, 16), "float32"))
    history = state_of(model.layers[1])["inputs_amax_history"]
    np.testing.assert_allclose(history[0], max(amax), rtol=0.01)
    assert np.all(history[1:] == 0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "delayed"])
def test_it_learns_as_float32_does(policy):
    keras.utils.set_random_seed(3)
    x = np.random.default_rng(3).normal(size=(256, 16)).astype("float32")
    y = np.tanh(x[:, ::-1] * x[:, :1])
    model = prepared(mlp(), "float32" if policy == "float32" else delayed())
    losses = model.fit(x, y, batch_size=32, epochs=15, verbose=0, shuffle=False).history["loss"]
    # Of float32: 0.065; without learning 0.3.
    assert losses[-1] < 0.1 < losses[0]


def test_lora_trains_its_matrices():
    model = mlp()
    model.layers[1].enable_lora(4)
    prepared(model)
    x = rng.normal(size=(16, 16)).astype("float32")
    layer = model.layers[1]
    before = [numpy(layer.lora_kernel_b), numpy(layer._kernel)]
    model.fit(x, np.ones((16, 16), "float32"), epochs=2, verbose=0)
    assert multiplies_in_float8(layer) and state_of(layer)["kernel_amax_history"][0] > 0
    assert not np.array_equal(before[0], numpy(layer.lora_kernel_b))
    assert np.array_equal(before[1], numpy(layer._kernel))


# Which layers.


class MyDense(layers.Dense):
    pass


def test_a_layer_whose_state_would_be_a_sum_is_kept_out():
    inputs = keras.Input((4, 16))
    shared = layers.Dense(16, name="shared")
    x = shared(shared(layers.Dense(16, name="once")(inputs)))
    x = layers.TimeDistributed(layers.Dense(16, name="each"), name="times")(x)
    x = layers.Bidirectional(layers.RNN(Cell(16), return_sequences=True), merge_mode="sum")(x)
    model = prepared(keras.Model(inputs, MyDense(16, name="mine")(x)), every_layer())
    found = reasons(model)
    assert found["once"] is None
    assert found["shared"] == "it is run 2 times in a step, and its state is for one"
    assert found["each"] == "TimeDistributed runs it several times in a step, and its state is for one"
    assert "RNN" in found["in_cell"] or "Bidirectional" in found["in_cell"]
    assert found["mine"] == "Keras gives no float8 state to a MyDense"
    # Each tensor by itself needs no state.
    found = reasons(mpkeras.apply_policy(compiled(model), without_outputs("mixed_float8", keep_16_bits=())))
    assert found["shared"] is None and found["mine"] is None


@keras.saving.register_keras_serializable("tests")
class Cell(layers.Layer):
    def __init__(self, units, **kwargs):
        super().__init__(**kwargs)
        self.state_size = self.output_size = self.units = units
        self.dense = layers.Dense(units, name="in_cell")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x, states):
        out = self.dense(x) + states[0]
        return out, [out]


def test_a_kernel_that_does_not_fit_keeps_its_state_as_it_was():
    """The layer is not built when it gets the policy; its kernel turns out to be 48 x 20."""
    model = prepared(Later())
    x = rng.normal(size=(8, 16)).astype("float32")
    model.fit(x, np.ones((8, 16), "float32"), epochs=2, verbose=0)
    fits, misfit = (state_of(model.parts[i]) for i in (1, 2))
    assert fits["inputs_amax_history"][0] > 0 and fits["outputs_grad_amax_history"][0] > 0
    for name in STATE:
        assert np.all(misfit[name] == (1.0 if name.endswith("scale") else 0.0))


def test_layers_that_come_after_the_optimizer_are_named():
    class Later(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.last = layers.Dense(16), layers.Dense(16)

        def build(self, shape):
            self.middle = layers.Dense(32)
            self.middle.build((None, 16))
            self.last.build((None, 32))
            self.first.build(shape)
            self.built = True

        def call(self, x):
            return self.last(self.middle(self.first(x)))

    x = np.ones((8, 16), "float32")
    model = prepared(Later(), every_layer())
    with pytest.raises(ValueError, match="build the model before you prepare it"):
        model.fit(x, x, verbose=0)
    model = Later()
    model(x)
    prepared(model, every_layer()).fit(x, x, verbose=0)
    assert multiplies_in_float8(model.middle)


# The way there and back.


def test_another_policy_takes_the_state_back():
    model = mlp()
    before = [id(v) for v in model.variables]
    mpkeras.apply_policy(model, delayed())
    assert len(model.variables) == len(before) + 2 * len(STATE)
    assert [layer.dtype_policy.name for layer in model.layers] == [
        "mixed_bfloat16", "float8_from_mixed_bfloat16", "float8_from_mixed_bfloat16", "float32"
    ]  # fmt: skip
    for policy in ("mixed_float8", delayed(), "float32"):
        mpkeras.apply_policy(model, policy)
    assert [id(v) for v in model.variables] == before
    assert not any(float8_change(layer) or layer.quantization_mode for layer in model.layers)
    x = np.ones((8, 16), "float32")
    compiled(model).fit(x, x, verbose=0)
    if keras.backend.backend() == "torch":
        assert len(list(model.parameters())) == len(before)
    # Keras may quantize it now.
    model.layers[1].quantize("float8")
    assert float8_state(model.layers[1]) is not None and is_quantized(model.layers[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "second"), [("mixed_bfloat16", "delayed"), ("delayed", "mixed_float8"), ("delayed", "float32")]
)
@pytest.mark.parametrize("door", [mpkeras.prepare, mpkeras.apply_policy])
def test_a_built_optimizer_is_not_left_behind(first, second, door):
    first, second = (delayed() if name == "delayed" else name for name in (first, second))
    model = mpkeras.prepare(compiled(mlp()), first)
    x = rng.normal(size=(8, 16)).astype("float32")
    model.fit(x, x, verbose=0)
    before, policies = values_of(model), [layer.dtype_policy.name for layer in model.layers]
    with pytest.raises(ValueError, match="`model.compile` with a new optimizer"):
        door(model, second)
    assert_equal(values_of(model), before)
    assert [layer.dtype_policy.name for layer in model.layers] == policies
    model.fit(x, x, verbose=0)


def test_an_error_gives_the_state_back():
    class Mixing(layers.Layer):
        def call(self, x):
            if self.compute_dtype == "float16":
                raise TypeError("no float16 here")
            return x

    *parts, last = mlp().layers
    model = keras.Sequential([*parts, Mixing(), last])
    model.build((None, 16))
    mpkeras.apply_policy(model, delayed())
    history = model.layers[1].kernel_amax_history
    history.assign(np.arange(1024.0))
    before = [id(v) for v in model.variables]
    with pytest.raises(TypeError):
        mpkeras.apply_policy(model, "mixed_float16")
    assert [id(v) for v in model.variables] == before
    assert multiplies_in_float8(model.layers[1])
    np.testing.assert_array_equal(numpy(model.layers[1].kernel_amax_history), np.arange(1024.0))
    step = mpkeras.make_train_step(model, keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError())
    step(np.ones((8, 16), "float32"), np.ones((8, 16), "float32"))
    assert float(numpy(history)[1023]) == 0.0


@pytest.mark.backends("tensorflow")
def test_the_state_belongs_to_the_strategy_of_the_model():
    import tensorflow as tf

    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = compiled(mlp())
    mpkeras.prepare(model, delayed())
    x = rng.normal(size=(8, 16)).astype("float32")
    model.fit(x, x, verbose=0)
    assert state_of(model.layers[1])["inputs_amax_history"][0] > 0
    native = model.layers[1].kernel_scale.value
    assert native.distribute_strategy is model.layers[1].kernel.value.distribute_strategy


@pytest.mark.slow
def test_advice_leaves_the_state_as_it_was():
    model = prepared(mlp())
    x = rng.normal(size=(8, 16)).astype("float32")
    model.fit(x, x, verbose=0)
    before, ids = values_of(model), [id(v) for v in model.variables]
    mpkeras.advise(model, x, x, budget_s=3)
    assert [id(v) for v in model.variables] == ids
    assert_equal(values_of(model), before)
    assert [multiplies_in_float8(layer) for layer in model.layers] == [False, True, True, False]
    model.fit(x, x, verbose=0)


# Files.


@pytest.mark.slow
@pytest.mark.every_case("jax", "torch")
def test_training_goes_on_from_a_file_bit_for_bit(tmp_path):
    x, y = rng.normal(size=(32, 16)).astype("float32"), rng.normal(size=(32, 16)).astype("float32")
    fit = dict(batch_size=8, verbose=0, shuffle=False)
    model = prepared(mlp())
    model.fit(x, y, epochs=2, **fit)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert [layer.dtype_policy.name for layer in loaded.layers[1:3]] == ["float8_from_mixed_bfloat16"] * 2
    assert not any(multiplies_in_float8(layer) for layer in loaded.layers)
    mpkeras.prepare(loaded, delayed())
    assert list(reasons(loaded).values())[1:3] == [None, None]
    for each in (model, loaded):
        each.fit(x, y, epochs=1, **fit)
    assert_equal(loaded.get_weights(), model.get_weights())
    # As Keras had loaded it.
    mpkeras.apply_policy(loaded, "mixed_float8")
    assert reasons(loaded)["part1"] == "it is quantized (float8)" and float8_state(loaded.layers[1]) is not None


def test_plain_keras_goes_on_with_the_file(tmp_path):
    x = rng.normal(size=(64, 16)).astype("float32")
    model = prepared(mlp())
    model.fit(x, x, epochs=3, batch_size=8, verbose=0, shuffle=False)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    exact = mlp()
    exact.set_weights([w for v, w in zip(model.weights, model.get_weights(), strict=True) if v.name not in STATE])
    references = [numpy(each(x)).astype("float32") for each in (exact, model, loaded)]
    spread = np.abs(references[0]).max()
    assert np.abs(references[1] - references[0]).max() < 0.15 * spread
    assert np.abs(references[2] - references[0]).max() < 0.15 * spread


# Training goes on.


@pytest.mark.slow
def test_a_layer_that_leaves_float8_keeps_its_state_for_the_optimizer():
    model = prepared(mlp())
    x = rng.normal(size=(8, 16)).astype("float32")
    model.fit(x, x, verbose=0)
    before = state_of(model.layers[1])
    leave_float8(model, model.layers[1], "it overflowed")
    callbacks = [mpkeras.callbacks.MixedPrecision(delayed())]
    model.fit(x, x, epochs=2, verbose=0, callbacks=callbacks)
    assert reasons(model)["part1"] == "it overflowed" and not multiplies_in_float8(model.layers[1])
    assert_equal(list(state_of(model.layers[1]).values()), list(before.values()))
    assert multiplies_in_float8(model.layers[2])
    assert state_of(model.layers[2])["inputs_amax_history"][0] > 0


@pytest.mark.slow
@pytest.mark.every_case("jax", "torch")
def test_a_layer_that_overflows_moves_with_its_state():
    model = prepared(mlp())
    name = model.layers[1].path
    fallback = mpkeras.callbacks.Float32Fallback(patience=1)
    x = rng.normal(size=(8, 16)).astype("float32")
    fit = functools.partial(model.fit, x, x, batch_size=8, verbose=0, shuffle=False, callbacks=[fallback])
    fit(epochs=1)
    # What it is given is 1, once, and what it makes of that float32 holds, and bfloat16 does not.
    before_it, kernel = model.layers[0], model.layers[1].kernel
    good = [numpy(variable) for variable in (before_it.kernel, before_it.bias, kernel)]
    before_it.kernel.assign(np.zeros(before_it.kernel.shape))
    before_it.bias.assign(np.eye(1, before_it.units)[0])
    kernel.assign(np.full(kernel.shape, 3.4e38))
    # Seen before, or they would saturate.
    model.layers[1].kernel_amax_history.assign(np.eye(1, 1024)[0] * 3.4e38)
    before = state_of(model.layers[1])
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(epochs=1)
        fit(epochs=1)
    moves = [str(warning.message) for warning in told if "has moved" in str(warning.message)]
    assert ["float8 to bfloat16" in moves[0], "bfloat16 to float32" in moves[1]] == [True, True]
    assert (fallback.moved_from_float8, fallback.moved) == ([name], [name])
    assert model.layers[1].compute_dtype == "float32"
    for variable, value in zip((before_it.kernel, before_it.bias, kernel), good, strict=True):
        variable.assign(value)
    fit(epochs=2)
    assert not np.array_equal(numpy(kernel), good[-1])
    assert_equal(list(state_of(model.layers[1]).values()), list(before.values()))


def test_the_users_quantized_layers_stay_under_other_policies():
    model = mlp()
    model.layers[1].quantize("float8")
    prepared(model, "mixed_float8")
    assert reasons(model)["part1"] == "it is quantized (float8)"
    assert float8_change(model.layers[1]) is None


# What is said of it.


def test_trace_numerics_says_what_saturates():
    model = prepared(mlp())
    x = rng.normal(size=(64, 16)).astype("float32")
    model.fit(x, x, batch_size=16, epochs=2, verbose=0)
    found = {layer.path.split("/")[-1]: layer for layer in mpkeras.trace_numerics(model, x, x).layers}
    assert found["part0"].float8 is None
    assert found["part1"].float8["saturated"]["kernel"] == 0 and found["part1"].float8["output_error"] < 0.1
    report = mpkeras.trace_numerics(model, 8 * x, x)
    traced = next(layer for layer in report.layers if layer.path == "net/part1").float8
    inputs = np.abs(numpy(ops.cast(model.layers[0](8 * x), "float32")))
    seen = state_of(model.layers[1])["inputs_amax_history"].max()
    limit = 448.0 / 2.0 ** np.floor(np.log2(448.0 / seen))
    share = np.mean(inputs[inputs > 0] > limit)
    assert 0.1 < share == pytest.approx(traced["saturated"]["inputs"])
    assert f"{100 * share:.2g} % are larger than those of past steps" in str(report).replace("\n", " ")
    policy = report.policy()
    assert policy.float8 == "delayed" and "path:^net/part1$" in policy.keep_16_bits


def test_audit_counts_them():
    text = str(mpkeras.audit(prepared(mlp())))
    assert "Products in float8: those of 2 of 4 layers." in text


@pytest.mark.slow
def test_a_capsule_replays_with_its_state(tmp_path):
    keras.utils.set_random_seed(4)
    model = mpkeras.apply_policy(mlp(), delayed())
    step = mpkeras.make_train_step(model, keras.optimizers.Adam(0.01), keras.losses.MeanSquaredError())
    x = rng.normal(size=(8, 16)).astype("float32")
    for _ in range(3):
        step(x, x)
    bad = np.where(np.eye(8, 16) > 0, np.nan, x).astype("float32")
    assert bool(step(bad, x)["skipped"])
    step.capsule(tmp_path / "step.mpk")
    capsule = mpkeras.load_capsule(tmp_path / "step.mpk")
    assert bool(capsule.run()["skipped"])
    again = [layer for layer in capsule.model.layers if multiplies_in_float8(layer)]
    assert [layer.name for layer in again] == ["part1", "part2"]
    for layer in again:
        assert_equal(list(state_of(layer).values()), list(state_of(model.get_layer(layer.name)).values()))
