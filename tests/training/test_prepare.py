import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.policies import Policy
from mpkeras.policies.loss_scaling import DynamicLossScale, FixedLossScale
from mpkeras.scaling.optimizer import LossScaleOptimizer
from mpkeras.training.prepare import prepare
from tests.sixteen_bits import without_outputs
from tests.step_modes import snapshot

X = np.linspace(-1, 1, 24, dtype="float32").reshape(4, 6)
Y = np.full((4, 2), 0.1, "float32")


def classifier():
    inputs = keras.Input((6,), name="x")
    x = keras.layers.Dense(8, activation="relu", name="hidden")(inputs)
    x = keras.layers.BatchNormalization(name="norm")(x)
    x = keras.layers.Dense(2, kernel_initializer="zeros", name="logits")(x)
    return keras.Model(inputs, keras.layers.Softmax(name="head")(x))


def compute_dtypes(model):
    return {layer.name: layer.compute_dtype for layer in model.layers if layer.name != "x"}


MIXED = {"hidden": "float16", "norm": "float32", "logits": "float32", "head": "float32"}


def test_layers_follow_the_policy_and_its_float32_rules():
    model = classifier()
    model.compile("sgd", "mse")
    assert prepare(model, "mixed_float16") is model
    assert compute_dtypes(model) == MIXED
    # stock policies, so that a saved model needs no mpkeras
    assert {type(layer.dtype_policy) for layer in model.layers} == {keras.DTypePolicy}
    assert {v.dtype for v in model.variables} == {"float32"}


def test_float32_layers_of_a_mixed_model_are_there_on_purpose():
    keras.config.set_dtype_policy("mixed_float16")
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), keras.layers.Dense(2, dtype="float32")])
    model.compile("sgd", "mse")
    prepare(model, "mixed_bfloat16")
    assert [layer.compute_dtype for layer in model.layers] == ["bfloat16", "float32"]


def test_back_to_float32():
    model = classifier()
    model.compile("sgd", "mse")
    prepare(model, "mixed_float16")
    prepare(model, "float32")
    assert set(compute_dtypes(model).values()) == {"float32"}
    assert model.optimizer.loss_scale_rule == FixedLossScale(1.0)


def test_the_global_policy_is_the_default_for_a_float32_model():
    from mpkeras import policy_scope

    model = classifier()
    model.compile("sgd", "mse")
    with policy_scope("mixed_bfloat16"):
        prepare(model)
    assert compute_dtypes(model)["hidden"] == "bfloat16"


def test_a_model_that_computes_in_16_bits_keeps_its_own_dtypes_by_default():
    """P18: what the layers compute in decides, not a name."""
    dense = [keras.layers.Dense(units, dtype="mixed_float16") for units in (3, 2)]
    model = keras.Sequential([keras.Input((6,)), *dense])
    model.compile("sgd", "mse")
    prepare(model)
    assert [layer.compute_dtype for layer in model.layers] == ["float16", "float32"]
    assert model.optimizer.loss_scale_rule == DynamicLossScale()


def test_rules_of_ones_own():
    policy = Policy("mixed_float16", keep_float32=("path:logits$",))
    model = classifier()
    model.compile("sgd", "mse")
    prepare(model, policy)
    assert compute_dtypes(model) == {
        "hidden": "float16", "norm": "float16", "logits": "float32", "head": "float16"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "optimizer", "rule"),
    [
        pytest.param("mixed_float16", lambda: "sgd", DynamicLossScale(), id="float16: dynamic"),
        pytest.param("mixed_bfloat16", lambda: "sgd", FixedLossScale(1.0), id="bfloat16: checked only"),
        pytest.param("float32", lambda: "sgd", FixedLossScale(1.0), id="float32: checked only"),
        pytest.param(
            Policy("mixed_float16", loss_scale=64.0), lambda: "sgd", FixedLossScale(64.0), id="set on the policy"
        ),
        pytest.param(
            Policy("mixed_float16", loss_scale=None), lambda: "sgd", FixedLossScale(1.0), id="none, by the policy"
        ),
        pytest.param(
            "mixed_float16",
            lambda: LossScaleOptimizer("sgd", loss_scale=8.0),
            FixedLossScale(8.0),
            id="set on the optimizer",
        ),
        pytest.param(
            "mixed_float16",
            lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=4.0),
            DynamicLossScale(4.0),
            id="stock optimizer's settings",
        ),
        pytest.param(
            "mixed_float16",
            lambda: keras.optimizers.SGD(loss_scale_factor=16.0),
            FixedLossScale(16.0),
            id="P28: loss_scale_factor",
        ),
    ],
)
def test_rule_of_the_loss_scale(policy, optimizer, rule):
    model = classifier()
    model.compile(optimizer(), "mse")
    prepare(model, policy)
    assert isinstance(model.optimizer, LossScaleOptimizer)
    assert model.optimizer.loss_scale_rule == rule


def test_an_optimizer_given_twice_means_the_same_twice():
    """G16"""
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3, loss_scale_factor=16.0)
    for model in (classifier(), classifier()):
        model.compile(optimizer, "mse")
        prepare(prepare(model, "mixed_float16"), "mixed_bfloat16")
        assert model.optimizer.inner_optimizer is optimizer
        assert (model.optimizer.window.steps, model.optimizer.loss_scale_rule) == (3, FixedLossScale(16.0))
        assert (optimizer.gradient_accumulation_steps, optimizer.loss_scale_factor) == (3, 16.0)


def test_loss_scale_argument_wins():
    model = classifier()
    model.compile(LossScaleOptimizer("sgd", loss_scale=8.0), "mse")
    prepare(model, Policy("mixed_float16", loss_scale=64.0), loss_scale=2.0)
    assert model.optimizer.loss_scale_rule == FixedLossScale(2.0)


def test_a_scale_chosen_by_prepare_follows_the_next_policy():
    model = classifier()
    model.compile("sgd", "mse")
    for policy, rule in [
        ("float32", FixedLossScale(1.0)),
        ("mixed_float16", DynamicLossScale()),
        ("mixed_bfloat16", FixedLossScale(1.0)),
    ]:
        prepare(model, policy)
        assert model.optimizer.loss_scale_rule == rule


@pytest.mark.slow
@pytest.mark.parametrize("is_saved", [False, True])
def test_a_model_trained_in_bfloat16_goes_on_in_float16_at_its_initial_scale(is_saved, tmp_path):
    """And not at the 1.0 of bfloat16, where small gradients are lost for thousands of steps."""
    model = classifier()
    model.compile("adam", "mse")
    prepare(model, "mixed_bfloat16")
    model.train_on_batch(X, Y)
    if is_saved:
        model.save(tmp_path / "model.keras")
        model = keras.saving.load_model(tmp_path / "model.keras")
    prepare(model, "mixed_float16")
    model.train_on_batch(X, Y)
    assert model.optimizer.loss_scale_rule == DynamicLossScale()
    assert float(model.optimizer.loss_scale) == 2.0**15
    assert int(model.optimizer.iterations) == 2


def test_prepare_twice_wraps_nothing_twice():
    model = classifier()
    model.compile("sgd", "mse")
    prepare(model, "mixed_float16")
    optimizer, own_step = model.optimizer, type(model).train_step
    model.train_on_batch(X, Y)
    prepare(model, "mixed_float16")
    assert model.optimizer is optimizer
    assert isinstance(optimizer.inner_optimizer, keras.optimizers.SGD)
    assert model.train_step.__wrapped__.__func__ is own_step
    assert compute_dtypes(model) == MIXED


def test_optimizer_in_use_keeps_its_state_and_schedule():
    keras.config.set_dtype_policy("mixed_float16")
    model = classifier()
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
    model.compile(keras.optimizers.Adam(schedule), "mse")
    model.fit(X, Y, batch_size=2, verbose=0)
    stock = model.optimizer
    assert type(stock) is keras.optimizers.LossScaleOptimizer
    stock.dynamic_scale.assign(512.0)
    state = snapshot(stock.inner_optimizer.variables)
    prepare(model)
    assert isinstance(model.optimizer, LossScaleOptimizer)
    assert model.optimizer.inner_optimizer is stock.inner_optimizer
    assert snapshot(model.optimizer.inner_optimizer.variables) == state
    assert float(model.optimizer.dynamic_scale) == 512.0
    assert int(model.optimizer.iterations) == 2


def test_rollback_false_leaves_a_float32_model_alone():
    model = classifier()
    model.compile("sgd", "mse")
    prepare(model, "float32", rollback=False)
    assert type(model.optimizer) is not LossScaleOptimizer
    model.train_on_batch(X, Y)


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "jax")
@pytest.mark.parametrize("jit_compile", [True, False])
def test_jit_compile_is_switched_as_asked(jit_compile):
    model = classifier()
    model.compile("sgd", "mse", jit_compile=not jit_compile)
    prepare(model, "mixed_float16", jit_compile=jit_compile)
    assert model.jit_compile is jit_compile
    assert np.isfinite(model.train_on_batch(X, Y))


@pytest.mark.parametrize(
    ("make", "arguments", "error", "message"),
    [
        pytest.param(lambda: 3, {}, TypeError, "Pass the model", id="not a model"),
        pytest.param(classifier, {}, ValueError, "model.compile", id="not compiled"),
        pytest.param(None, {"policy": "mixed_flot16"}, ValueError, "mixed_float16", id="misspelt policy"),
        pytest.param(None, {"loss_scale": "auto-matic"}, ValueError, "'dynamic'", id="unknown loss scale"),
        pytest.param(None, {"jit_compile": "yes"}, TypeError, "jit_compile='yes'", id="jit_compile"),
        pytest.param(None, {"jit_compile": 0}, TypeError, "jit_compile=0", id="jit_compile that is no bool"),
        pytest.param(None, {"rollback": None}, TypeError, "rollback=None", id="rollback"),
        pytest.param(None, {"rollback": "False"}, TypeError, "rollback='False'", id="rollback as text"),
        pytest.param(None, {"policy": "float16"}, ValueError, "'mixed_float16'", id="pure float16"),
    ],
)
def test_bad_input_changes_nothing(make, arguments, error, message):
    if make is None:
        model = classifier()
        model.compile("sgd", "mse")
        before = (compute_dtypes(model), model.optimizer, vars(model).get("train_step"))
    else:
        model = make()
    with pytest.raises(error, match=message):
        prepare(model, **arguments)
    if make is None:
        assert (compute_dtypes(model), model.optimizer, vars(model).get("train_step")) == before
    assert keras.config.dtype_policy().name == "float32"


def accumulating_part():
    part = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3, name="part")
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(part))


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("door", ["prepare", "callback"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(
            lambda: keras.optimizers.SGD(loss_scale_factor=-8.0, name="mine"),
            "Received: SGD 'mine' with loss_scale_factor=-8.0.*2\\*\\*-126",
            id="loss_scale_factor",
        ),
        pytest.param(
            lambda: keras.optimizers.LossScaleOptimizer(
                keras.optimizers.SGD(), initial_scale=0.0, dynamic_growth_steps=3, name="mine"
            ),
            "Received: LossScaleOptimizer 'mine' with initial_scale=0.0, dynamic_growth_steps=3",
            id="stock optimizer",
        ),
        pytest.param(
            accumulating_part,
            "'part' with gradient_accumulation_steps=3",
            id="part that accumulates",
            marks=pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="not in this Keras"),
        ),
    ],
)
def test_an_optimizer_that_cannot_be_wrapped_leaves_the_model_as_before(door, make, message):
    dense = [keras.layers.Dense(3, name="dense"), keras.layers.Dense(2, name="end")]
    model = keras.Sequential([keras.Input((6,)), *dense])
    model.compile(make(), "mse")
    model.other_optimizer = keras.optimizers.Adam()
    for optimizer in (model.optimizer, model.other_optimizer):
        optimizer.build(model.trainable_variables)
    optimizers, weights, attributes = (
        (model.optimizer, model.other_optimizer),
        snapshot(model.variables),
        set(vars(model)),
    )
    with pytest.raises(ValueError, match=message):
        if door == "prepare":
            prepare(model, "bfloat16")
        else:
            model.fit(X, Y, verbose=0, callbacks=[mpkeras.callbacks.MixedPrecision("bfloat16")])
    assert set(compute_dtypes(model).values()) == {"float32"} and {v.dtype for v in model.variables} == {"float32"}
    assert snapshot(model.variables) == weights
    assert (model.optimizer, model.other_optimizer) == optimizers
    assert door == "callback" or set(vars(model)) == attributes
    # Nor is anything left to be done: with another optimizer the weights stay in float32.
    model.compile("sgd", "mse")
    model.other_optimizer = None
    prepare(model, "mixed_bfloat16")
    assert compute_dtypes(model) == {"dense": "bfloat16", "end": "float32"} and snapshot(model.variables) == weights


@pytest.mark.backends("tensorflow")
def test_after_an_error_an_earlier_conversion_goes_on_as_it_was():
    dense = [keras.layers.Dense(3, name="dense"), keras.layers.Dense(2, name="end")]
    model = keras.Sequential([keras.Input((6,)), *dense])
    model.compile(keras.optimizers.SGD(loss_scale_factor=-8.0), "mse")
    mpkeras.apply_policy(model, "mixed_bfloat16")
    with pytest.raises(ValueError, match="loss_scale_factor=-8.0"):
        prepare(model, "bfloat16")
    prepare(model, loss_scale=4.0)
    assert compute_dtypes(model) == {"dense": "bfloat16", "end": "float32"}
    assert {v.dtype for v in model.variables} == {"float32"}


class NearOne(keras.layers.Layer):
    """Returns its inputs times `NEAR_ONE`, by a layer that it makes when it is built."""

    def build(self, shape):
        self.dense = keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(NEAR_ONE), use_bias=False)
        self.dense.build(shape)
        self.built = True

    def call(self, x):
        return self.dense(x)


# bfloat16 has 8 significant bits: there 1 + 2**-9 is 1.
NEAR_ONE = 1 + 2**-9


@pytest.mark.slow
@pytest.mark.parametrize("door", ["prepare", "prepare without a guard", "callback", "first step", "apply_policy"])
def test_what_ran_before_runs_in_the_new_dtypes(door):
    # Made when the model is built, in the first step the inner layer follows the policy as the last one.
    inner = keras.Sequential([NearOne()] if door == "first step" else [keras.Input((1,)), NearOne()])
    model = keras.Sequential([inner])
    model.compile(keras.optimizers.SGD(0.0), "mse")
    x, y = np.ones((4, 1), "float32"), np.zeros((4, 1), "float32")
    policy = without_outputs("mixed_bfloat16")
    if door == "first step":
        prepare(model, policy)
    results = {
        "predict": lambda: float(model.predict(x, verbose=0)[0, 0]),
        "predict of a part": lambda: float(inner.predict(x, verbose=0)[0, 0]),
        "evaluate": lambda: model.evaluate(x, y, verbose=0),
    }
    exact = [NEAR_ONE, NEAR_ONE, NEAR_ONE**2]
    assert [result() for result in results.values()] == pytest.approx(exact, rel=1e-6)
    if door == "callback":
        model.fit(x, y, verbose=0, callbacks=[mpkeras.callbacks.MixedPrecision(policy)])
    elif door == "apply_policy":
        mpkeras.apply_policy(model, policy)
    elif door == "first step":
        model.fit(x, y, batch_size=2, verbose=0, validation_data=(x, y))
    else:
        assert model.train_on_batch(x, y) == pytest.approx(NEAR_ONE**2, rel=1e-6)
        prepare(model, policy, rollback=door == "prepare")
        model.reset_metrics()  # Keras 3.10 returns the mean since then.
        assert model.train_on_batch(x, y) == 1.0
    assert [result() for result in results.values()] == [1.0, 1.0, 1.0]


@pytest.mark.backends("tensorflow")
def test_functions_that_hold_the_right_dtypes_stay():
    model = classifier()
    model.compile("sgd", "mse")
    prepare(model, "mixed_bfloat16")
    model.predict(X, verbose=0)
    model.evaluate(X, Y, verbose=0)
    functions = model.predict_function, model.test_function
    prepare(model, "mixed_bfloat16", loss_scale=4.0)
    model.fit(X, Y, verbose=0, callbacks=[mpkeras.callbacks.MixedPrecision("mixed_bfloat16")])
    assert (model.predict_function, model.test_function) == functions
    prepare(model, "mixed_float16")
    assert (model.predict_function, model.test_function) == (None, None)


@pytest.mark.parametrize("policy", [None, "mixed_float16", "float16"])
def test_float16_variables_are_refused(policy):
    """P26, P40: by both doors, and the model is as before."""
    keras.config.set_dtype_policy("float16")
    model = classifier()
    model.compile("sgd", "mse")
    optimizer = model.optimizer
    callback = mpkeras.callbacks.MixedPrecision(policy)
    remedy = "float16 variables .*Build the model under 'mixed_float16'.*float32_variables=True"
    for door in (lambda: prepare(model, policy), lambda: model.fit(X, Y, verbose=0, callbacks=[callback])):
        with pytest.raises(ValueError, match=remedy):
            door()
        assert model.optimizer is optimizer and "train_step" not in vars(model)
        assert {v.dtype for v in model.variables} == set(compute_dtypes(model).values()) == {"float16"}
        assert keras.config.dtype_policy().name == "float16"


def test_a_policy_with_float16_variables_is_refused():
    model = classifier()
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="policy 'float16'.*'mixed_float16'"):
        prepare(model, "float16")
    keras.config.set_dtype_policy("float16")
    with pytest.raises(ValueError, match="policy 'float16'.*'mixed_float16'"):
        prepare(model)
    assert set(compute_dtypes(model).values()) == {"float32"}


def test_layers_that_would_make_float16_variables_are_refused_before_they_do():
    model = keras.Sequential([keras.layers.Dense(2, dtype="float16", name="first")])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="float16 variables .*of layer first"):
        prepare(model)
    # A policy that is asked for comes before they are made.
    prepare(model, "mixed_float16")
    model.fit(X, Y, verbose=0)
    assert {v.dtype for v in model.trainable_variables} == {"float32"}


def test_frozen_16_bit_variables_are_left_alone():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, dtype="bfloat16"), keras.layers.Dense(2)])
    model.layers[0].trainable = False
    model.compile("sgd", "mse")
    prepare(model, "mixed_bfloat16")
    model.fit(X, Y, verbose=0)
    assert [v.dtype for v in model.variables] == ["bfloat16"] * 2 + ["float32"] * 2


def test_a_subclassed_model_passes_its_inputs_on_as_they_are():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.rescale = keras.layers.Rescaling(1e-5)
            self.dense = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")
            self.head = keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")

        def call(self, x):
            return self.head(self.dense(self.rescale(x)))

    model = Model()
    model.compile("sgd", "mse")
    prepare(model, "mixed_float16")
    out = model(np.array([[70000.0, 30000.0]], "float32"))
    assert (model.dense.compute_dtype, keras.backend.standardize_dtype(out.dtype)) == ("float16", "float32")
    np.testing.assert_allclose(keras.ops.convert_to_numpy(out), [[1.0]], rtol=2e-3)  # float16 has 11 significant bits


class Block(keras.layers.Layer):
    """Makes its layers when it is built, as many layers do."""

    def build(self, shape):
        self.norm = keras.layers.BatchNormalization()
        self.dense = keras.layers.Dense(2)
        self.norm.build(shape)
        self.dense.build(shape)
        self.built = True

    def call(self, x, training=False):
        return self.dense(self.norm(x, training=training))


@pytest.mark.slow
@pytest.mark.parametrize("way", ["global policy", "policy"])
def test_layers_made_while_building_get_their_dtypes_too(way):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.block, self.head = Block(), keras.layers.Dense(2)

        def call(self, x, training=False):
            return self.head(self.block(x, training=training))

    if way == "global policy":
        keras.config.set_dtype_policy("mixed_float16")
    model = Model()
    model.compile("sgd", "mse")
    prepare(model, None if way == "global policy" else "mixed_float16")
    model.train_on_batch(X, Y)
    assert (model.block.norm.compute_dtype, model.block.dense.compute_dtype) == ("float32", "float16")
    assert int(model.optimizer.iterations) + int(model.optimizer.skipped_steps) == 1


def test_several_inputs_outputs_and_sample_weights():
    a, b = keras.Input((3,), name="a"), keras.Input((3,), name="b")
    joined = keras.layers.Concatenate()([a, b])
    model = keras.Model(
        {"a": a, "b": b},
        {
            "p": keras.layers.Dense(1, name="p", kernel_initializer="zeros")(joined),
            "q": keras.layers.Dense(2, name="q", kernel_initializer="zeros")(joined),
        },
    )
    model.compile("sgd", {"p": "mse", "q": "mae"}, loss_weights={"p": 1.0, "q": 0.5})
    prepare(model, "mixed_float16", loss_scale=64.0)
    data = {"a": X[:, :3], "b": X[:, 3:]}
    target = {"p": Y[:, :1], "q": Y}
    weight = {"p": np.ones(4, "float32"), "q": np.zeros(4, "float32")}
    # 0.01 from p; q weighs nothing
    loss = model.train_on_batch(data, target, sample_weight=weight, return_dict=True)["loss"]
    assert float(loss) == pytest.approx(0.01, rel=1e-3)
    assert int(model.optimizer.skipped_steps) == 0


@pytest.mark.slow
def test_saved_model_loads_in_plain_keras_for_inference(tmp_path):
    """G8; the process without mpkeras is in tests/test_public_api.py."""
    model = classifier()
    model.compile("sgd", "mse")
    prepare(model, "mixed_float16")
    model.train_on_batch(X, Y)
    path = tmp_path / "model.keras"
    model.save(path)
    assert "mpkeras" not in keras.saving.load_model(path, compile=False).to_json()


@pytest.mark.slow
def test_saved_model_resumes_with_its_optimizer_state(tmp_path):
    """P19, the part that prepare owes: the optimizer whose state is saved is the one in the configuration."""
    model = classifier()
    model.compile(keras.optimizers.Adam(0.01), "mse")
    prepare(model, "mixed_float16", loss_scale=DynamicLossScale(256.0, dynamic_growth_steps=2))
    for _ in range(3):
        model.train_on_batch(X, Y)
    path = tmp_path / "model.keras"
    model.save(path)
    loaded = keras.saving.load_model(path)
    assert isinstance(loaded.optimizer, LossScaleOptimizer)
    assert loaded.optimizer.loss_scale_rule == DynamicLossScale(256.0, dynamic_growth_steps=2)
    assert snapshot(loaded.optimizer.variables) == snapshot(model.optimizer.variables)
    assert float(loaded.optimizer.dynamic_scale) == 512.0


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(keras.optimizers, "ScheduleFreeAdamW"), reason="Keras 3.15 has it")
@pytest.mark.parametrize("jit_compile", [False, True])
def test_an_optimizer_that_starts_from_the_weights_does_so(jit_compile):
    """Stock Keras traces that start into every step on TensorFlow: the weights fall to zero."""

    def run(built_first):
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        optimizer = keras.optimizers.ScheduleFreeAdamW(0.01)
        if built_first:
            optimizer.build(model.trainable_variables)
        model.compile(optimizer, "mse", jit_compile=jit_compile and keras.backend.backend() != "torch")
        prepare(model, "float32")
        for i in range(3):
            model.train_on_batch(np.full((2, 3), i, "float32"), np.ones((2, 2), "float32"))
        return model.get_weights()

    late, early = run(False), run(True)
    np.testing.assert_allclose(late[0], early[0], rtol=1e-6)
    np.testing.assert_allclose(late[1], early[1], rtol=1e-6)
    assert np.abs(early[0]).max() > 0.1


def test_a_rule_starts_at_its_own_scale_where_the_optimizer_took_no_step():
    """Keras builds the optimizer before a callback is asked; its scale of 32768 was not found by training."""
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    with mpkeras.policy_scope("mixed_float16"):
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    prepare(model, loss_scale=mpkeras.DynamicLossScale(64.0))
    assert float(keras.ops.convert_to_numpy(model.optimizer.loss_scale)) == 64.0


class Weighing(keras.layers.Layer):
    """Reads a weight in its `call`, and says no shape of its own."""

    def build(self, input_shape):
        self.kernel = self.add_weight((input_shape[-1], 2), name="kernel", initializer="ones")

    def call(self, x):
        return keras.ops.matmul(x, self.kernel)


def test_a_layer_of_the_users_own_is_built_by_the_first_step():
    """On JAX variables have no values while Keras traces it."""
    model = keras.Sequential([Weighing(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    prepare(model, "mixed_bfloat16")
    x = np.ones((4, 3), "float32")
    history = model.fit(x, x[:, :1], epochs=2, verbose=0).history
    assert history["skipped_steps"] == [0, 0] and np.isfinite(history["loss"]).all()
    assert [layer.compute_dtype for layer in model.layers] == ["bfloat16", "float32"]
