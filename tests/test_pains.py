"""Pains that mpkeras ends, by their numbers in the project's ledger: those that docs/promises.md tells of, and a few.

`MPKERAS_PAINS_AGAINST=keras python -m pytest tests/test_pains.py` runs the same tests against stock Keras. Outcome with
Keras 3.15.1, TensorFlow 2.21.0, JAX 0.10.2 and torch 2.13.0 on a CPU ("2 of 3": so many of its cases fail, "-": does
not apply):

    test                                                             TensorFlow  JAX   torch
    p3_every_loop_style_matches_float32_or_warns                     2 of 3      -       -
    p4_a_softmax_head_learns                                         fails       passes  passes
    p5_statistics_survive_a_skipped_batch                            fails       fails   fails
    p6_normalization_of_large_inputs                                 3 of 4      3 of 4  3 of 4
    p7_the_scale_never_reaches_zero                                  fails       fails   fails
    p10_the_scale_stays_finite                                       fails       fails   fails
    p15_last_step_skipped_and_the_true_iteration                     fails       fails   fails
    p16_history_shows_skips_and_halvings                             fails       fails   fails
    p18_float16_layers_get_loss_scaling_wherever_the_policy_was_set  fails       fails   fails
    p24_a_scale_baked_into_a_compiled_loss_is_refused                -           fails   -
    p30_sparse_gradients_stay_sparse                                 1 of 2      -       -
    p32_hyper_parameters_and_learning_rate_callbacks                 fails       fails   fails

With mpkeras all of them pass. Where stock Keras passes too, the test holds us to it. Other tables hold the others:

    P9   a floor below 1: `test_dynamic_rule_at_each_border` (policies)
    P12  masked rows: `test_masked_rows` (layers), `test_attention_whose_keys_are_all_masked_stays_finite` (policies)
    P13  clipping: `test_inner_options_act_on_unscaled_gradients_and_applied_steps_only` (scaling)
    P17  two optimizers: `test_a_step_that_is_not_finite_leaves_no_trace` (training/test_own_train_steps.py)
    P21  a float16 loss: `test_scale_loss_is_float32_built_or_not` (scaling)
    P22  conditionals, traces: `test_no_conditional_and_no_host_transfer`, `test_one_trace_in_fit` (training)
    P23, P39  inf on one replica alone: `test_each_replica_of_a_mirrored_strategy` (distributed/test_replicas.py)
    P28  a fixed scale: `test_rule_of_the_loss_scale` (training)
"""

import os

import keras
import numpy as np
import pytest

from tests.step_modes import QUICK_TO_START, snapshot

AGAINST_KERAS = os.environ.get("MPKERAS_PAINS_AGAINST") == "keras"
BACKEND = keras.backend.backend()
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*the loss was not scaled since the last step",
    *(["ignore"] if AGAINST_KERAS else []),
)

if AGAINST_KERAS:
    LossScaleOptimizer = keras.optimizers.LossScaleOptimizer
else:
    from mpkeras.scaling.optimizer import LossScaleOptimizer


def compiled(build, policy, optimizer, loss="mse", **options):
    """Returns a model ready to train under `policy`: stock Keras' way, or ours."""
    if AGAINST_KERAS:
        keras.config.set_dtype_policy(policy)
        model = build()
        model.compile(optimizer, loss, **options)
        return model
    from mpkeras import set_global_policy
    from mpkeras.training.prepare import prepare

    set_global_policy(policy)
    model = build()
    model.compile(optimizer, loss, **options)
    return prepare(model)


def fit(model, x, y, **options):
    """`model.fit` as a user calls it, with our callback where it is ours."""
    callbacks = list(options.pop("callbacks", []))
    if not AGAINST_KERAS:
        from mpkeras.callbacks import MixedPrecision

        callbacks.append(MixedPrecision())
    return model.fit(x, y, verbose=0, shuffle=False, callbacks=callbacks, **options)


def numpy(value):
    return keras.ops.convert_to_numpy(value.value if isinstance(value, keras.Variable) else value)


def step(optimizer, variables, grads):
    """One step of the optimizer in the form the backend's custom loops use."""
    grads = [keras.ops.convert_to_tensor(g, "float32") for g in grads]
    if BACKEND != "jax":
        optimizer.apply(grads, variables)
        return
    if not optimizer.built:
        optimizer.build(variables)
    new = optimizer.stateless_apply([v.value for v in optimizer.variables], grads, [v.value for v in variables])
    for v, value in zip(variables + optimizer.variables, new[0] + new[1], strict=True):
        v.assign(value)


def linear(units=1, features=4, hidden=0, **options):
    def build():
        keras.utils.set_random_seed(0)
        # Zeros: predictions start at 0, and scaled gradients for small targets are within float16.
        dense = keras.layers.Dense(units, kernel_initializer="zeros", **options)
        before = [keras.layers.Dense(hidden, **options)] if hidden else []
        return keras.Sequential([keras.Input((features,)), *before, dense])

    return build


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("loop", ["keras 3", "tf.keras", "forgotten"])
def test_p3_every_loop_style_matches_float32_or_warns(loop):
    import tensorflow as tf

    x = np.linspace(-1, 1, 32, dtype="float32").reshape(8, 4)
    y = (x.sum(axis=1, keepdims=True) * 2).astype("float32")

    def weights_after(steps, policy):
        keras.config.set_dtype_policy(policy)
        model, optimizer, is_mixed = linear()(), keras.optimizers.SGD(0.1), policy == "mixed_float16"
        if is_mixed:
            optimizer = LossScaleOptimizer(optimizer)
        for _ in range(steps):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.cast(model(x), tf.float32) - y) ** 2)
                if is_mixed and loop == "keras 3":
                    loss = optimizer.scale_loss(loss)
                elif is_mixed and loop == "tf.keras":
                    loss = optimizer.get_scaled_loss(loss)
            grads = tape.gradient(loss, model.trainable_variables)
            if is_mixed and loop == "tf.keras":
                grads = optimizer.get_unscaled_gradients(grads)
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return [numpy(v) for v in model.trainable_variables]

    if loop == "forgotten":
        with pytest.warns(UserWarning, match="the loss was not scaled"):
            weights_after(1, "mixed_float16")
        return
    for mixed, single in zip(weights_after(20, "mixed_float16"), weights_after(20, "float32"), strict=True):
        np.testing.assert_allclose(mixed, single, atol=5e-3)  # float16 has 11 significant bits


@pytest.mark.slow
def test_p4_a_softmax_head_learns():
    """Far from the target, where stock Keras' clipped 16-bit probabilities have a gradient of zero.

    On JAX and torch Keras clips float32 probabilities, too: there mixed precision learns what float32 learns.
    """
    x = np.random.default_rng(0).normal(size=(64, 2)).astype("float32")
    y = (x[:, 0] > 0).astype("int32")

    def build():
        keras.utils.set_random_seed(0)
        kernel = keras.initializers.Constant([[20.0, -20.0], [0.0, 0.0]])
        return keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(2, kernel_initializer=kernel), keras.layers.Activation("softmax")]
        )

    def accuracies(policy):
        """Before and after 40 steps with the whole data."""
        loss = "sparse_categorical_crossentropy"
        model = compiled(build, policy, keras.optimizers.SGD(1.0), loss, metrics=["accuracy"])
        _, before = model.evaluate(x, y, batch_size=64, verbose=0)
        fit(model, np.tile(x, (40, 1)), np.tile(y, 40), batch_size=64)
        _, after = model.evaluate(x, y, batch_size=64, verbose=0)
        return before, after

    _, learned_in_float32 = accuracies("float32")
    for policy in ("mixed_float16", "mixed_bfloat16"):
        before, after = accuracies(policy)
        assert before < 0.2
        assert after == pytest.approx(learned_in_float32, abs=0.05)
        if BACKEND == "tensorflow":
            assert after > 0.9


def test_p5_statistics_survive_a_skipped_batch():
    def build():
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        )

    good, target = np.ones((4, 4), "float32"), np.zeros((4, 1), "float32")
    bad = good.copy()
    bad[0, 0] = 1e6
    model = compiled(build, "mixed_float16", keras.optimizers.Adam(), **QUICK_TO_START)
    model.train_on_batch(good, target)
    before = snapshot(model.variables)
    model.train_on_batch(bad, target)
    assert snapshot(model.variables) == before
    assert np.isfinite(numpy(model(good))).all()


@pytest.mark.parametrize(
    ("layer", "value"),
    [
        ("BatchNormalization", 1e5),
        ("RMSNormalization", 1e5),
        ("UnitNormalization", 300.0),
        ("LayerNormalization", 1e5),
    ],
)
def test_p6_normalization_of_large_inputs(layer, value):
    if not hasattr(keras.layers, layer):
        pytest.skip(f"this Keras has no {layer}")
    x = np.array([[value, -value, value / 2, 0.0], [-value, value, 0.0, value / 4]], "float32")

    def build():
        inputs = keras.Input((4,))
        return keras.Model(inputs, getattr(keras.layers, layer)()(inputs))

    keras.config.set_dtype_policy("float32")
    expected = build()(x)
    model = compiled(build, "mixed_float16", "sgd")
    np.testing.assert_allclose(numpy(model(x)), numpy(expected), atol=1e-2)


def after_one_good_step_behind(gradient, steps, initial_scale):
    """Returns the loss scale behind `steps` with `gradient`, which move nothing."""
    v = keras.Variable(np.ones(3, "float32"))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale, dynamic_growth_steps=1)
    for _ in range(steps):
        step(optimizer, [v], [np.full(3, gradient)])
    np.testing.assert_array_equal(numpy(v), [1.0, 1.0, 1.0])
    scale = float(optimizer.dynamic_scale)
    step(optimizer, [v], [np.full(3, scale)])
    np.testing.assert_array_equal(numpy(v), [0.5, 0.5, 0.5])
    return scale


def test_p7_the_scale_never_reaches_zero():
    """As after 170 steps with inf gradients from 2**15 on: stock Keras writes NaN into the weights."""
    # `test_our_bounds` has the default floor.
    assert after_one_good_step_behind(np.inf, steps=35, initial_scale=2.0**-120) > 0


def test_p10_the_scale_stays_finite():
    assert np.isfinite(after_one_good_step_behind(0.0, steps=10, initial_scale=2.0**120))


def test_p15_last_step_skipped_and_the_true_iteration():
    v = keras.Variable([1.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5))
    seen = []
    for bad in (False, True, True, False):
        step(optimizer, [v], [np.array([np.inf if bad else 1.0])])
        seen.append((bool(optimizer.last_step_skipped), int(optimizer.consecutive_skips), int(optimizer.iterations)))
    assert seen == [(False, 0, 1), (True, 1, 1), (True, 2, 1), (False, 0, 2)]


def test_p16_history_shows_skips_and_halvings(tmp_path):
    x = np.ones((8, 4), "float32")
    y = np.zeros((8, 1), "float32")
    y[2] = y[6] = 1e4  # finite loss, gradients beyond float16 once scaled

    def build():
        # Predictions start at 0; the gradient at the first layer is that at the output.
        layers = [keras.layers.Dense(3, kernel_initializer="zeros"), keras.layers.Dense(1, kernel_initializer="ones")]
        return keras.Sequential([keras.Input((4,)), *layers])

    model = compiled(build, "mixed_float16", keras.optimizers.SGD(1e-9), **QUICK_TO_START)
    log = tmp_path / "log.csv"
    history = fit(model, x[:4], y[:4], batch_size=2, epochs=2, callbacks=[keras.callbacks.CSVLogger(str(log))])
    assert history.history["skipped_steps"] == [1, 2]
    assert history.history["loss_scale"] == [2.0**14, 2.0**13]
    header = log.read_text().splitlines()[0].split(",")
    assert {"loss", "loss_scale", "skipped_steps"} <= set(header)


@pytest.mark.parametrize("where", ["layer", "map", "auto_scale_loss=False"])
def test_p18_float16_layers_get_loss_scaling_wherever_the_policy_was_set(where):
    if where == "layer":
        build, policy = linear(hidden=3, dtype="mixed_float16"), "float32"
    elif where == "map":
        mapping = keras.dtype_policies.DTypePolicyMap(default_policy=keras.DTypePolicy("mixed_float16"))
        build, policy = linear(hidden=3, dtype=mapping), "float32"
    else:
        build, policy = linear(hidden=3), "mixed_float16"
    options = {"auto_scale_loss": False} if where == "auto_scale_loss=False" else {}
    model = compiled(build, policy, keras.optimizers.SGD(0.1), **options)
    assert isinstance(model.optimizer, LossScaleOptimizer)
    assert float(model.optimizer.scale_loss(1.0)) == 2.0**15


@pytest.mark.backends("jax")
def test_p24_a_scale_baked_into_a_compiled_loss_is_refused():
    """In a `StatelessScope` the scale is an input: effective / true gradient is 1 after every growth."""
    import jax
    import jax.numpy as jnp

    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.0), dynamic_growth_steps=3)
    v = keras.Variable(np.ones(1, "float32"))
    optimizer.build([v])

    def loss_outside(tv):
        return optimizer.scale_loss(jnp.sum(tv**2))

    def loss_in_a_scope_of_weights(tv):
        with keras.StatelessScope(state_mapping=[(v, tv)]):
            return optimizer.scale_loss(jnp.sum(keras.ops.convert_to_tensor(v) ** 2))

    for loss, received in ((loss_outside, "a call outside"), (loss_in_a_scope_of_weights, "does not map them")):
        with pytest.raises(ValueError, match=f"StatelessScope.*{received}"):
            jax.jit(jax.value_and_grad(loss))(v.value)

    def loss_inside(tv, state):
        with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, state, strict=True))):
            return optimizer.scale_loss(jnp.sum(tv**2))

    grad = jax.jit(jax.grad(loss_inside))
    apply = jax.jit(optimizer.stateless_apply)
    state, weights, ratios = [w.value for w in optimizer.variables], [v.value], []
    for _ in range(12):
        g = grad(weights[0], state)
        with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, state, strict=True))):
            ratios.append(float(g[0] / optimizer.loss_scale) / 2.0)
        weights, state = apply(state, [g], weights)
    assert ratios == [1.0] * 12


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("jit_compile", [False, True])
def test_p30_sparse_gradients_stay_sparse(jit_compile):
    """No tensor of the table's size is made by the check or by unscaling."""
    import tensorflow as tf

    rows, width = 1000, 8
    table = keras.Variable(np.ones((rows, width), "float32"))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=4.0)
    optimizer.build([table])

    @tf.function(jit_compile=jit_compile)
    def one_step(values, indices):
        grad = tf.IndexedSlices(values, indices, tf.constant([rows, width]))
        optimizer.apply([grad], [table])

    indices = tf.constant([1, 3, 3])
    one_step(tf.fill([3, width], 4.0), indices)
    out = numpy(table)
    np.testing.assert_array_equal(out[[0, 1, 2, 3]][:, 0], [1.0, 0.0, 1.0, -1.0])
    one_step(tf.fill([3, width], np.inf), indices)
    np.testing.assert_array_equal(numpy(table), out)
    if not jit_compile:
        graph = one_step.get_concrete_function(tf.fill([3, width], 4.0), indices).graph

        def shapes(g):
            for op in g.get_operations():
                if op.type not in ("ReadVariableOp", "Placeholder"):
                    yield from (o.shape.as_list() for o in op.outputs if o.shape.rank is not None)
            for function in getattr(g, "_functions", {}).values():
                yield from shapes(getattr(function, "graph", function)) if hasattr(function, "graph") else ()

        assert [rows, width] not in list(shapes(graph))


def test_p32_hyper_parameters_and_learning_rate_callbacks():
    optimizer = keras.optimizers.Adam(0.1, beta_1=0.8, clipnorm=0.5)
    model = compiled(linear(), "mixed_float16", optimizer, **QUICK_TO_START)
    assert model.optimizer.beta_1 == 0.8
    assert model.optimizer.clipnorm == 0.5
    x, y = np.full((4, 4), 0.01, "float32"), np.full((4, 1), 0.1, "float32")
    fit(model, x, y, epochs=2, callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch: 0.25 / (epoch + 1))])
    assert float(model.optimizer.learning_rate) == 0.125
