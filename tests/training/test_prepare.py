import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.policies import Policy
from mpkeras.policies.loss_scaling import DynamicLossScale, FixedLossScale
from mpkeras.policies.policy import accumulating
from mpkeras.scaling.optimizer import LossScaleOptimizer
from mpkeras.training.prepare import prepare
from tests.cases import first_quick
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
    # Stock policies, so that a saved model needs no mpkeras (G8).
    assert {type(layer.dtype_policy) for layer in model.layers} == {keras.DTypePolicy}
    assert "mpkeras" not in str(model.get_config())
    assert {v.dtype for v in model.variables} == {"float32"}
    prepare(model, Policy("mixed_float16", keep_float32=("path:logits$",)))
    assert compute_dtypes(model) == {**dict.fromkeys(MIXED, "float16"), "logits": "float32"}
    prepare(model, "float32")
    assert set(compute_dtypes(model).values()) == {"float32"}
    assert model.optimizer.loss_scale_rule == FixedLossScale(1.0)
    # Without an argument the global policy is what a float32 model goes by.
    with mpkeras.policy_scope("mixed_bfloat16"):
        prepare(model)
    assert compute_dtypes(model)["hidden"] == "bfloat16"


@pytest.mark.parametrize(
    ("dtypes", "policy", "expected"),
    first_quick(
        [
            # P18: its own 16 bits by default.
            (["mixed_float16"] * 2, None, ["float16", "float32"]),
            (["mixed_float16"] * 3, "mixed_bfloat16", ["bfloat16"] * 2 + ["float32"]),
            # What is kept in float32 on purpose.
            (["mixed_float16", "float32", "mixed_float16"], None, ["float16"] + ["float32"] * 2),
            (["mixed_float16", "float32", "mixed_float16"], "mixed_bfloat16", ["bfloat16"] + ["float32"] * 2),
        ]
    ),
)
def test_what_the_layers_compute_in_decides_and_no_name(dtypes, policy, expected):
    model = keras.Sequential([keras.Input((6,)), *[keras.layers.Dense(3, dtype=dtype) for dtype in dtypes]])
    model.compile("sgd", "mse")
    prepare(model, policy)
    assert [layer.compute_dtype for layer in model.layers] == expected
    assert model.optimizer.loss_scale_rule == (DynamicLossScale() if policy is None else FixedLossScale(1.0))


def stock_wrapper():
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=4.0)


# What makes the optimizer is called in the test: Keras' optimizers belong to one model.
RULES = {
    "float16: dynamic": ("mixed_float16", lambda: "sgd", DynamicLossScale()),
    "bfloat16: checked only": ("mixed_bfloat16", lambda: "sgd", FixedLossScale(1.0)),
    "float32: checked only": ("float32", lambda: "sgd", FixedLossScale(1.0)),
    "set on the policy": (Policy("mixed_float16", loss_scale=64.0), lambda: "sgd", FixedLossScale(64.0)),
    "none, by the policy": (Policy("mixed_float16", loss_scale=None), lambda: "sgd", FixedLossScale(1.0)),
    "optimizer's": ("mixed_float16", lambda: LossScaleOptimizer("sgd", loss_scale=8.0), FixedLossScale(8.0)),
    "stock optimizer's settings": ("mixed_float16", stock_wrapper, DynamicLossScale(4.0)),
    "P28": ("mixed_float16", lambda: keras.optimizers.SGD(loss_scale_factor=16.0), FixedLossScale(16.0)),
}


@pytest.mark.parametrize("case", first_quick(RULES))
def test_rule_of_the_loss_scale(case):
    policy, optimizer, rule = RULES[case]
    model = classifier()
    model.compile(optimizer(), "mse")
    prepare(model, policy)
    assert isinstance(model.optimizer, LossScaleOptimizer)
    assert model.optimizer.loss_scale_rule == rule
    # An argument wins over all of them.
    prepare(model, policy, loss_scale=2.0)
    assert model.optimizer.loss_scale_rule == FixedLossScale(2.0)


# With its defaults Keras wraps an optimizer by itself.
@pytest.mark.parametrize(
    ("settings", "in_bfloat16"),
    first_quick(
        [
            ({}, FixedLossScale(1.0)),
            ({"initial_scale": 16.0, "dynamic_growth_steps": 9}, DynamicLossScale(16.0, dynamic_growth_steps=9)),
        ]
    ),
    ids=["defaults", "the user's"],
)
def test_settings_of_a_stock_optimizer_outlast_other_policies(settings, in_bfloat16):
    model = classifier()
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), **settings), "mse")
    rules = []
    for policy in ("mixed_float16", "mixed_bfloat16", "mixed_float16"):
        prepare(model, policy)
        rules.append(model.optimizer.loss_scale_rule)
    expected = DynamicLossScale(**settings)
    assert rules == [expected, in_bfloat16, expected]


def test_an_optimizer_given_twice_means_the_same_twice():
    """G16"""
    optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3, loss_scale_factor=16.0)
    for model in (classifier(), classifier()):
        model.compile(optimizer, "mse")
        prepare(prepare(model, "mixed_float16"), "mixed_bfloat16")
        assert model.optimizer.inner_optimizer is optimizer
        assert (model.optimizer.window.steps, model.optimizer.loss_scale_rule) == (3, FixedLossScale(16.0))
        assert (optimizer.gradient_accumulation_steps, optimizer.loss_scale_factor) == (3, 16.0)


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
    optimizer.build(model.trainable_variables)
    prepare(model, "mixed_float16")
    assert model.optimizer is optimizer
    assert isinstance(optimizer.inner_optimizer, keras.optimizers.SGD)
    assert model.train_step.__wrapped__.__func__ is own_step
    assert compute_dtypes(model) == MIXED


def planned(accumulate_steps, policy="mixed_bfloat16"):
    """A policy as `plan_memory` returns it, without a compiler."""
    return accumulating(Policy(policy), accumulate_steps)


def own_accumulation(by, steps):
    """Returns an optimizer whose user set so many calls to an update."""
    if by == "inner":
        return keras.optimizers.SGD(0.25, gradient_accumulation_steps=steps)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.25), loss_scale=4.0)
    optimizer.accumulate(1 if steps is None else steps)
    return optimizer


@pytest.mark.slow
@pytest.mark.parametrize(
    ("own", "policies", "expected"),
    [
        (None, [planned(2), "mixed_bfloat16"], [2, None]),
        (None, [planned(3), None, planned(2, "float32"), planned(2), "float32"], [3, 3, 2, 2, None]),
        (4, [planned(2), None, planned(3), "mixed_float16", None], [8, 8, 12, 4, 4]),
        (3, ["mixed_bfloat16", planned(1), planned(5, "float32")], [3, 3, 15]),
    ],
)
@pytest.mark.parametrize("by", ["inner", "wrapper"])
@pytest.mark.parametrize("trains", [False, True])
def test_accumulation_of_a_plan_goes_with_it_and_multiplies_that_of_the_optimizer(trains, by, own, policies, expected):
    model = classifier()
    optimizer = own_accumulation(by, own)
    model.compile(optimizer, "mse", run_eagerly=True)
    for policy, steps in zip(policies, expected, strict=True):
        prepare(model, policy)
        assert model.optimizer.gradient_accumulation_steps == steps
        if trains:
            model.train_on_batch(X, Y)
    # A user's own object means the same again.
    assert optimizer.gradient_accumulation_steps == own
    if not trains:
        model.compile(own_accumulation(by, 7), "mse")
        assert model.optimizer.gradient_accumulation_steps == 7 * (expected[-1] or 1) // (own or 1)


@pytest.mark.slow
def test_the_update_of_a_plan_beside_own_accumulation_is_of_the_mean_of_all():
    """Against plain Keras in float32, by one batch of all the rows."""
    rows = np.random.default_rng(4).normal(size=(24, 6)).astype("float32")
    models = [keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)]) for _ in range(2)]
    models[1].set_weights(models[0].get_weights())
    models[0].compile(keras.optimizers.SGD(0.5, gradient_accumulation_steps=3), "mse")
    models[1].compile(keras.optimizers.SGD(0.5), "mse")
    before = models[0].get_weights()
    prepare(models[0], planned(2, "float32"))
    for n in range(6):
        assert all(np.array_equal(*pair) for pair in zip(models[0].get_weights(), before, strict=True))
        models[0].train_on_batch(rows[4 * n : 4 * n + 4], rows[4 * n : 4 * n + 4, :2])
    models[1].train_on_batch(rows, rows[:, :2])
    for value, expected in zip(models[0].get_weights(), models[1].get_weights(), strict=True):
        np.testing.assert_allclose(value, expected, atol=1e-6)


@pytest.mark.slow
def test_a_saved_plan_is_gone_on_with_until_another_policy_is_given(tmp_path):
    # Keras 3.10 warns of the inputs of a Functional model that it has loaded.
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)])
    model.compile(own_accumulation("inner", 3), "mse", run_eagerly=True)
    prepare(model, planned(2)).train_on_batch(X, Y)
    model.save(tmp_path / "model.keras")
    for policies, steps in (([None, None], 6), ([None, planned(4)], 12), ([planned(2)], 6), (["float32"], 3)):
        model = keras.models.load_model(tmp_path / "model.keras")
        assert model.optimizer.gradient_accumulation_steps == 6
        for policy in policies:
            prepare(model, policy)
        assert model.optimizer.gradient_accumulation_steps == steps
        assert model.optimizer.inner_optimizer.gradient_accumulation_steps == 3
        model.train_on_batch(X, Y)


@pytest.mark.slow
def test_a_plan_of_the_callback_goes_with_the_next_policy():
    model = classifier()
    model.compile(own_accumulation("inner", 2), "mse", run_eagerly=True)
    for policy, steps in ((planned(4), 8), (None, 8), ("mixed_float16", 2)):
        model.fit(X, Y, verbose=0, callbacks=[mpkeras.callbacks.MixedPrecision(policy)])
        assert model.optimizer.gradient_accumulation_steps == steps


def test_a_plan_that_is_refused_leaves_accumulation_and_layers_as_they_were():
    model = classifier()
    model.compile(own_accumulation("inner", 3), "mse")
    prepare(model, planned(2))
    before = model.optimizer, model.optimizer.window.steps, compute_dtypes(model)
    with pytest.raises(ValueError, match="names no|matches no|no part"):
        prepare(model, planned(4, "mixed_float16"), remat=["nowhere"])
    assert (model.optimizer, model.optimizer.window.steps, compute_dtypes(model)) == before


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "jax")
@pytest.mark.parametrize("jit_compile", [True, False])
def test_jit_compile_is_switched_as_asked(jit_compile):
    model = classifier()
    model.compile("sgd", "mse", jit_compile=not jit_compile)
    prepare(model, "mixed_float16", jit_compile=jit_compile)
    assert model.jit_compile is jit_compile
    assert np.isfinite(model.train_on_batch(X, Y))


def test_rollback_false_leaves_a_float32_model_alone():
    model = classifier()
    model.compile("sgd", "mse")
    prepare(model, "float32", rollback=False)
    assert type(model.optimizer) is not LossScaleOptimizer and "train_step" not in vars(model)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"policy": "mixed_flot16"}, ValueError, "mixed_float16"),
        ({"policy": "float16"}, ValueError, "policy 'float16'.*'mixed_float16'"),
        ({"loss_scale": "auto-matic"}, ValueError, "'dynamic'"),
        ({"jit_compile": "yes"}, TypeError, "jit_compile='yes'"),
        ({"jit_compile": 0}, TypeError, "jit_compile=0"),
        ({"rollback": None}, TypeError, "rollback=None"),
        ({"rollback": "False"}, TypeError, "rollback='False'"),
    ],
)
def test_bad_input_changes_nothing(arguments, error, message):
    model = classifier()
    with pytest.raises(ValueError, match="model.compile"):
        prepare(model)
    with pytest.raises(TypeError, match="Pass the model"):
        prepare(3)
    model.compile("sgd", "mse")
    as_compiled = (compute_dtypes(model), model.optimizer, vars(model).get("train_step"))
    with pytest.raises(error, match=message):
        prepare(model, **arguments)
    assert (compute_dtypes(model), model.optimizer, vars(model).get("train_step")) == as_compiled
    assert keras.config.dtype_policy().name == "float32"
    if arguments == {"policy": "float16"}:
        keras.config.set_dtype_policy("float16")
        with pytest.raises(error, match=message):
            prepare(model)


def accumulating_part():
    part = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3, name="part")
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(part))


UNWRAPPABLE = [
    pytest.param(
        lambda: keras.optimizers.SGD(gradient_accumulation_steps=2.5),
        "accumulate_steps=2.5",
        id="half a call",
    ),
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
]


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("door", first_quick(["prepare", "callback", "prepare after apply_policy"]))
@pytest.mark.parametrize(("make", "message"), first_quick(UNWRAPPABLE))
def test_an_optimizer_that_cannot_be_wrapped_leaves_the_model_as_before(door, make, message):
    dense = [keras.layers.Dense(3, name="dense"), keras.layers.Dense(2, name="end")]
    model = keras.Sequential([keras.Input((6,)), *dense])
    model.compile(make(), "mse")
    if door == "prepare after apply_policy":
        mpkeras.apply_policy(model, "mixed_bfloat16")
    model.other_optimizer = keras.optimizers.Adam()
    optimizers = model.optimizer, model.other_optimizer
    for optimizer in optimizers:
        optimizer.build(model.trainable_variables)
    weights, attributes, dtypes = snapshot(model.variables), set(vars(model)), compute_dtypes(model)
    callback = mpkeras.callbacks.MixedPrecision("bfloat16")
    with pytest.raises(ValueError, match=message):
        model.fit(X, Y, verbose=0, callbacks=[callback]) if door == "callback" else prepare(model, "bfloat16")
    assert compute_dtypes(model) == dtypes and {v.dtype for v in model.variables} == {"float32"}
    assert snapshot(model.variables) == weights
    assert (model.optimizer, model.other_optimizer) == optimizers
    assert door == "callback" or set(vars(model)) == attributes
    # Nor is anything left to be done: with another optimizer the weights stay in float32.
    model.compile("sgd", "mse")
    model.other_optimizer = None
    prepare(model, None if door == "prepare after apply_policy" else "mixed_bfloat16")
    assert compute_dtypes(model) == {"dense": "bfloat16", "end": "float32"} and snapshot(model.variables) == weights


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
    # Made when the model is built, the inner layer follows the policy from then on: before the first step as in it.
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
    exact = [1.0] * 3 if door == "first step" else [NEAR_ONE, NEAR_ONE, NEAR_ONE**2]
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


@pytest.mark.slow
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


@pytest.mark.backends("tensorflow")
def test_what_generate_has_compiled_is_made_anew_where_the_weights_are_stored_anew():
    import tensorflow as tf

    class Generating(keras.Sequential):  # As the language models of KerasHub, `generate` of which keeps its function.
        generate_function = None

        def generate(self, x):
            if self.generate_function is None:
                self.generate_function = tf.function(self.call)
            return self.generate_function(x)

    model = Generating([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile("sgd", "mse")
    assert model.generate(tf.ones((1, 2)))[0, 0] == 2.0
    prepare(model, "bfloat16")
    model.layers[0].kernel.assign([[3.0], [4.0]])
    assert model.generate(tf.ones((1, 2)))[0, 0] == 7.0
    prepare(model, "float32")
    assert model.generate_function is None


@pytest.mark.parametrize("policy", first_quick([None, "mixed_float16", "float16"]))
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


@pytest.mark.parametrize(("floatx", "lost", "largest"), first_quick([("bfloat16", 257, 256), ("float16", 2049, 2048)]))
def test_losses_and_metrics_that_keras_makes_in_16_bits_are_said(floatx, lost, largest):
    """P26: the dtypes of the layers have no part in it."""
    with mpkeras.policy_scope("float32"):
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2, dtype="mixed_bfloat16")])
    keras.config.set_floatx(floatx)
    # Adding 1 to `largest` changes nothing: so says Keras' own metric.
    count = keras.metrics.Sum()
    count.update_state(float(largest))
    count.update_state(1.0)
    assert float(count.result()) == largest
    model.compile("sgd", "mse")
    said = f"floatx.*is {floatx}: losses.*Class {lost} is taken for class {largest}.*no further than {largest}.*set_flo"
    for door in (lambda: prepare(model), lambda: mpkeras.make_train_step(model, keras.optimizers.SGD(), "mse")):
        with pytest.warns(UserWarning, match=said):
            door()


@pytest.mark.slow
def test_layers_that_would_make_float16_variables_are_refused_before_they_do():
    model = keras.Sequential([keras.layers.Dense(2, dtype="float16", name="first")])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="float16 variables .*of layer first"):
        prepare(model)
    # A policy that is asked for comes before they are made.
    prepare(model, "mixed_float16")
    model.fit(X, Y, verbose=0)
    assert {v.dtype for v in model.trainable_variables} == {"float32"}


@pytest.mark.slow
def test_frozen_16_bit_variables_are_left_alone():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, dtype="bfloat16"), keras.layers.Dense(2)])
    model.layers[0].trainable = False
    model.compile("sgd", "mse")
    prepare(model, "mixed_bfloat16")
    model.fit(X, Y, verbose=0)
    assert [v.dtype for v in model.variables] == ["bfloat16"] * 2 + ["float32"] * 2


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


class Shifted(keras.layers.Layer):
    """Its `build` makes a variable of given values, which Keras refuses where it looks for shapes alone."""

    def build(self, shape):
        self.shift = keras.Variable(np.full(shape[-1], 0.75, "float32"), name="shift")

    def call(self, inputs):
        return inputs - keras.ops.cast(self.shift, inputs.dtype)


class AsksForNumbers(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(5)

    def build(self, shape):
        self.hidden.build(shape)

    def call(self, inputs):
        return self.hidden(inputs * np.abs(keras.ops.convert_to_numpy(inputs)).max().astype("float32"))


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (Shifted, {}),
        (Shifted, {"run_eagerly": True}),
        (lambda: keras.layers.SimpleRNN(3, stateful=True), {"jit_compile": False}),
        (AsksForNumbers, {"run_eagerly": True}),
    ],
    ids=["given values", "given values, eager", "stateful", "numbers, eager"],
)
def test_a_model_that_keras_builds_in_the_first_step_alone_trains_as_without(make, options):
    """TensorFlow's `fit` builds no model before that step: what cannot be built for shapes alone trains there."""
    x = np.stack([X, -X, X**2], axis=1) if options.get("jit_compile") is False else X

    def trained(policy):
        keras.utils.set_random_seed(11)
        model = keras.Sequential([make(), keras.layers.Dense(2)])
        model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"], **options)
        if policy is not None:
            prepare(model, policy)
        history = model.fit(x, Y, batch_size=2, epochs=2, shuffle=False, verbose=0).history
        return snapshot(model.variables), history

    (expected, losses), (values, same_losses), (_, rounded_losses) = map(trained, (None, "float32", "mixed_bfloat16"))
    assert values == expected
    assert same_losses["loss"] == losses["loss"]
    # bfloat16 has 8 significant bits.
    np.testing.assert_allclose(rounded_losses["loss"], losses["loss"], rtol=0.02)
    assert rounded_losses["skipped_steps"] == [0, 0]


class Pairs(keras.Model):
    def __init__(self):
        super().__init__()
        self.shifted, self.scores = Shifted(), keras.layers.Dense(2)

    def call(self, inputs):
        return keras.ops.reshape(self.scores(self.shifted(keras.ops.reshape(inputs, (-1, 3, 2)))), (-1, 6))


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
@pytest.mark.skipif(not hasattr(keras.optimizers, "ScheduleFreeAdamW"), reason="Keras 3.15 has it")
def test_a_first_batch_that_does_not_fit_changes_nothing_of_the_training_after_the_next_compile():
    """In plain Keras, too, a step that has failed makes no variables: the model is compiled again."""

    def trained(first_batches):
        keras.utils.set_random_seed(12)
        model = Pairs()
        for batch in (*first_batches, None):
            # It starts from the weights, which must not become a part of every step.
            model.compile(keras.optimizers.ScheduleFreeAdamW(0.02), "mse")
            prepare(model, "float32")
            if batch is not None:
                with pytest.raises(ValueError, match="shape"):
                    model.train_on_batch(batch, Y)
        for _ in range(3):
            model.train_on_batch(X, np.tile(Y, 3))
        return snapshot(model.variables)

    assert trained([X[:, :5]]) == trained([])


def test_layers_that_exec_made_without_a_name_train():
    # Their methods say no module.
    made: dict = {"keras": keras}
    exec("class Half(keras.layers.Layer):\n    def call(self, x):\n        return x * 0.5\n", made)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), made["Half"](), keras.layers.Dense(1)])
    model.compile("sgd", "mse", run_eagerly=True)

    mpkeras.prepare(model, "mixed_bfloat16")

    assert model.layers[1].compute_dtype == "bfloat16"
    first, second = (model.train_on_batch(np.ones((8, 3)), np.ones((8, 1))) for _ in range(2))
    assert second < first
