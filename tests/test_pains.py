"""One test for each pain that mpkeras ends, named after its row in the project's ledger of pains.

`MPKERAS_PAINS_AGAINST=keras python -m pytest tests/test_pains.py` runs the same tests against stock Keras. Outcome with
Keras 3.15.1, TensorFlow 2.21.0, JAX 0.10.2 and torch 2.13.0 on a CPU ("2 of 4": so many of its cases fail, "-": does
not apply):

    test                                                             TensorFlow  JAX   torch
    p3_every_loop_style_matches_float32_or_warns                     2 of 4      -       -
    p4_a_softmax_head_learns                                         fails       passes  passes
    p5_statistics_survive_a_skipped_batch                            fails       fails   fails
    p6_normalization_of_large_inputs                                 3 of 4      3 of 4  3 of 4
    p6_preprocessing_of_raw_inputs_beyond_float16                    fails       fails   fails
    p7_the_scale_never_reaches_zero                                  fails       fails   fails
    p7_an_infinite_loss_does_not_lower_the_scale                     fails       fails   fails
    p9_the_floor_may_lie_below_one                                   passes      passes  passes
    p10_the_scale_stays_finite                                       fails       fails   fails
    p12_fully_masked_attention_rows_are_finite                       passes      passes  passes
    p12_a_masked_softmax_layer_gives_masked_places_exactly_zero      passes      passes  passes
    p13_clipping_sees_unscaled_gradients                             passes      passes  passes
    p15_last_step_skipped_and_the_true_iteration                     fails       fails   fails
    p16_history_shows_skips_and_halvings                             fails       fails   fails
    p17_two_optimizers_decide_for_themselves                         fails       -       fails
    p18_float16_layers_get_loss_scaling_wherever_the_policy_was_set  fails       fails   fails
    p18_pure_float16_is_refused_with_the_remedy                      fails       fails   fails
    p21_scale_loss_of_a_float16_loss                                 1 of 2      1 of 2  passes
    p22_the_compiled_step_has_no_conditional_and_is_traced_once      passes      -       -
    p22_the_compiled_step_has_no_conditional_on_jax                  -           fails   -
    p23_p39_inf_on_one_replica_alone_skips_on_all                    3 of 4      -       -
    p24_a_scale_baked_into_a_compiled_loss_is_refused                -           fails   -
    p28_a_fixed_scale_stays_fixed_and_overflow_is_skipped            fails       fails   fails
    p30_sparse_gradients_stay_sparse                                 1 of 2      -       -
    p32_hyper_parameters_and_learning_rate_callbacks                 fails       fails   fails

With mpkeras all of them pass. Where stock Keras passes too, the test holds us to it.
"""

import os

import keras
import numpy as np
import pytest

from tests.distributed.launch import mirrored_runs
from tests.step_modes import snapshot

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


# ------------------------------------------------------------------------------------------------- P3 … P6


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("loop", ["keras 3", "tf.keras", "forgotten", "train_step"])
def test_p3_every_loop_style_matches_float32_or_warns(loop, recwarn):
    import tensorflow as tf

    x = np.linspace(-1, 1, 32, dtype="float32").reshape(8, 4)
    y = (x.sum(axis=1, keepdims=True) * 2).astype("float32")

    def weights_after(policy):
        keras.config.set_dtype_policy(policy)
        model = linear()()
        inner = keras.optimizers.SGD(0.1)
        optimizer = LossScaleOptimizer(inner) if policy == "mixed_float16" else inner
        warned = []
        for _ in range(20):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.cast(model(x), tf.float32) - y) ** 2)
                scaled = loss
                if policy == "mixed_float16" and loop in ("keras 3", "train_step"):
                    scaled = optimizer.scale_loss(loss)
                elif policy == "mixed_float16" and loop == "tf.keras":
                    scaled = optimizer.get_scaled_loss(loss)
            grads = tape.gradient(scaled, model.trainable_variables)
            if policy == "mixed_float16" and loop == "tf.keras":
                grads = optimizer.get_unscaled_gradients(grads)
            with pytest.warns() if loop == "forgotten" and policy != "float32" and not warned else _nothing():
                optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
            warned.append(True)
        return [numpy(v) for v in model.trainable_variables]

    mixed, single = weights_after("mixed_float16"), weights_after("float32")
    if loop != "forgotten":
        for a, b in zip(mixed, single, strict=True):
            np.testing.assert_allclose(a, b, atol=5e-3)  # float16 has 11 significant bits


class _nothing:
    def __enter__(self):
        return self

    def __exit__(self, *exc):
        return False


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_p4_a_softmax_head_learns(policy):
    """Far from the target, where stock Keras' clipped 16-bit probabilities have a gradient of zero.

    On JAX and torch Keras clips float32 probabilities, too: there mixed precision learns what float32 learns.
    """
    rng = np.random.default_rng(0)
    x = rng.normal(size=(64, 2)).astype("float32")
    y = (x[:, 0] > 0).astype("int32")

    def build():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((2,))
        logits = keras.layers.Dense(2, kernel_initializer=keras.initializers.Constant([[20.0, -20.0], [0.0, 0.0]]))(
            inputs
        )
        return keras.Model(inputs, keras.layers.Activation("softmax")(logits))

    def accuracies(policy):
        model = compiled(
            build, policy, keras.optimizers.SGD(1.0), "sparse_categorical_crossentropy", metrics=["accuracy"]
        )
        return fit(model, x, y, epochs=40, batch_size=64).history["accuracy"]

    mixed, single = accuracies(policy), accuracies("float32")
    assert mixed[0] < 0.2
    assert mixed[-1] == pytest.approx(single[-1], abs=0.05)
    if BACKEND == "tensorflow":
        assert mixed[-1] > 0.9


def test_p5_statistics_survive_a_skipped_batch():
    def build():
        keras.utils.set_random_seed(0)
        return keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(4), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        )

    good, target = np.ones((4, 4), "float32"), np.zeros((4, 1), "float32")
    bad = good.copy()
    bad[0, 0] = 1e6
    model = compiled(build, "mixed_float16", keras.optimizers.Adam())
    model.train_on_batch(good, target)
    before = snapshot(model.variables)
    model.train_on_batch(bad, target)
    assert snapshot(model.variables) == before
    assert np.isfinite(model.predict(good, verbose=0)).all()


@pytest.mark.parametrize(
    ("layer", "value"),
    [
        pytest.param("BatchNormalization", 1e5, id="BatchNormalization"),
        pytest.param("RMSNormalization", 1e5, id="RMSNormalization"),
        pytest.param("UnitNormalization", 300.0, id="UnitNormalization"),
        pytest.param("LayerNormalization", 1e5, id="LayerNormalization"),
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


@pytest.mark.parametrize("kind", ["functional", "sequential"])
def test_p6_preprocessing_of_raw_inputs_beyond_float16(kind):
    """70000 is beyond float16: neither the layer nor the model around it may cast it down first."""

    def build():
        layers = [
            keras.Input((2,)),
            keras.layers.Rescaling(1e-5),
            keras.layers.Dense(1, use_bias=False, kernel_initializer="ones"),
        ]
        if kind == "sequential":
            return keras.Sequential(layers)
        return keras.Model(layers[0], layers[2](layers[1](layers[0])))

    model = compiled(build, "mixed_float16", "sgd")
    np.testing.assert_allclose(numpy(model(np.array([[70000.0, 30000.0]], "float32"))), [[1.0]], rtol=2e-3)


# ------------------------------------------------------------------------------------------------ P7 … P15


def test_p7_the_scale_never_reaches_zero():
    """170 steps with inf gradients, then one good step: stock Keras writes NaN into the weights."""
    v = keras.Variable(np.ones(3, "float32"))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5))
    for _ in range(170):
        step(optimizer, [v], [np.full(3, np.inf)])
    np.testing.assert_array_equal(numpy(v), [1.0, 1.0, 1.0])
    assert float(optimizer.dynamic_scale) == 2.0**-24
    step(optimizer, [v], [np.full(3, float(optimizer.dynamic_scale))])
    np.testing.assert_array_equal(numpy(v), [0.5, 0.5, 0.5])


def test_p7_an_infinite_loss_does_not_lower_the_scale():
    model = compiled(linear(), "mixed_float16", keras.optimizers.SGD(0.1))
    for _ in range(20):
        model.train_on_batch(np.full((2, 4), np.inf, "float32"), np.zeros((2, 1), "float32"))
    assert float(model.optimizer.dynamic_scale) == 2.0**15


def test_p9_the_floor_may_lie_below_one():
    """A gradient of 1e6 overflows float16 at any scale above 2**-4."""
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1e-6))
    v = keras.Variable([1.0])
    for _ in range(30):
        scale = float(optimizer.dynamic_scale) if optimizer.built else 2.0**15
        with np.errstate(over="ignore"):
            grad = np.array([1e6 * scale]).astype("float16").astype("float32")
        step(optimizer, [v], [grad])
    assert float(numpy(v)[0]) < 0.0


def test_p10_the_scale_stays_finite():
    v = keras.Variable(np.ones(3, "float32"))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), dynamic_growth_steps=1)
    for _ in range(130):
        step(optimizer, [v], [np.zeros(3)])
    assert np.isfinite(float(optimizer.dynamic_scale))
    step(optimizer, [v], [np.full(3, float(optimizer.dynamic_scale))])
    np.testing.assert_array_equal(numpy(v), [0.5, 0.5, 0.5])


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_p12_fully_masked_attention_rows_are_finite(policy):
    def build():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((3, 4))
        mask = keras.Input((3, 3), dtype="bool")
        attention = keras.layers.MultiHeadAttention(1, 4)
        return keras.Model([inputs, mask], attention(inputs, inputs, attention_mask=mask))

    model = compiled(build, policy, "sgd")
    x = np.random.default_rng(0).normal(size=(1, 3, 4)).astype("float32")
    mask = np.array([[[False] * 3, [True, False, False], [True] * 3]])
    assert np.isfinite(numpy(keras.ops.cast(model([x, mask]), "float32"))).all()


def test_p12_a_masked_softmax_layer_gives_masked_places_exactly_zero():
    if AGAINST_KERAS:
        layer = keras.layers.Softmax(dtype="mixed_float16")
    else:
        from mpkeras.layers import Softmax

        layer = Softmax()
    scores = np.array([[6e4, -6e4, 0.0], [6e4, 6e4, 6e4]], "float32")
    out = numpy(keras.ops.cast(layer(scores, mask=np.array([[False, True, True], [False] * 3])), "float32"))
    np.testing.assert_array_equal(out, [[0.0, 0.0, 1.0], [0.0, 0.0, 0.0]])


@pytest.mark.parametrize("option", ["clipnorm", "clipvalue", "global_clipnorm"])
def test_p13_clipping_sees_unscaled_gradients(option):
    """One step of SGD from 0 moves by the clipped gradient: [3, 4] has norm 5."""
    expected = {"clipnorm": [-0.6, -0.8], "clipvalue": [-1.0, -1.0], "global_clipnorm": [-0.6, -0.8]}[option]
    for scale in (1.0, 2.0**15):
        v = keras.Variable([0.0, 0.0])
        optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0, **{option: 1.0}), initial_scale=scale)
        step(optimizer, [v], [np.array([3.0, 4.0]) * scale])
        np.testing.assert_allclose(numpy(v), expected, rtol=1e-6)


def test_p15_last_step_skipped_and_the_true_iteration():
    v = keras.Variable([1.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5))
    seen = []
    for bad in (False, True, True, False):
        step(optimizer, [v], [np.array([np.inf if bad else 1.0])])
        seen.append((bool(optimizer.last_step_skipped), int(optimizer.consecutive_skips), int(optimizer.iterations)))
    assert seen == [(False, 0, 1), (True, 1, 1), (True, 2, 1), (False, 0, 2)]


# ----------------------------------------------------------------------------------------------- P16 … P24


def test_p16_history_shows_skips_and_halvings(tmp_path):
    x = np.ones((8, 4), "float32")
    y = np.zeros((8, 1), "float32")
    y[2] = y[6] = 1e4  # finite loss, gradients beyond float16 once scaled

    def build():
        # Predictions start at 0; the gradient at the first layer is that at the output.
        layers = [keras.layers.Dense(3, kernel_initializer="zeros"), keras.layers.Dense(1, kernel_initializer="ones")]
        return keras.Sequential([keras.Input((4,)), *layers])

    model = compiled(build, "mixed_float16", keras.optimizers.SGD(1e-9))
    log = tmp_path / "log.csv"
    history = fit(model, x[:4], y[:4], batch_size=2, epochs=2, callbacks=[keras.callbacks.CSVLogger(str(log))])
    assert history.history["skipped_steps"] == [1, 2]
    assert history.history["loss_scale"] == [2.0**14, 2.0**13]
    header = log.read_text().splitlines()[0].split(",")
    assert {"loss", "loss_scale", "skipped_steps"} <= set(header)


@pytest.mark.backends("tensorflow", "torch")
def test_p17_two_optimizers_decide_for_themselves():
    """The discriminator overflows, the generator does not; only the discriminator skips."""

    class Gan(keras.Model):
        def __init__(self):
            super().__init__()
            self.generator = keras.layers.Dense(4)
            self.discriminator = keras.layers.Dense(1)

        def compile(self, d_optimizer, g_optimizer):
            super().compile()
            self.optimizer = None
            self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

        def call(self, x):
            return self.discriminator(self.generator(x))

        def train_step(self, data):
            x, real, _ = keras.utils.unpack_x_y_sample_weight(data)
            d_loss = self._step(
                self.d_optimizer,
                self.discriminator,
                lambda: keras.ops.mean(self.discriminator(real)) - keras.ops.mean(self.discriminator(x)),
            )
            g_loss = self._step(
                self.g_optimizer, self.generator, lambda: keras.ops.mean(self.discriminator(self.generator(x)))
            )
            return {"d_loss": d_loss, "g_loss": g_loss}

        def _step(self, optimizer, layer, loss_fn):
            if keras.backend.backend() == "tensorflow":
                import tensorflow as tf

                with tf.GradientTape() as tape:
                    loss = loss_fn()
                    scaled = optimizer.scale_loss(loss)
                grads = tape.gradient(scaled, layer.trainable_variables)
            else:
                self.zero_grad()
                loss = loss_fn()
                optimizer.scale_loss(loss).backward()
                grads = [v.value.grad for v in layer.trainable_variables]
            optimizer.apply(grads, layer.trainable_variables)
            return loss

    x = np.random.default_rng(3).normal(size=(2, 4, 4)).astype("float32")

    def run(steps, bad_at=()):
        keras.utils.set_random_seed(4)
        if AGAINST_KERAS:
            keras.config.set_dtype_policy("mixed_float16")
        gan = Gan()
        gan(x[0])
        gan.compile(keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1))
        if not AGAINST_KERAS:
            from mpkeras.training.prepare import prepare

            prepare(gan, "mixed_float16", loss_scale=64.0)
        for i in range(steps):
            real = x[i].copy()
            if i in bad_at:
                real[0, 0] = np.inf
            gan.train_on_batch(x[i], real)
        return gan

    gan = run(2, bad_at=(1,))
    reference = run(1)
    assert int(gan.d_optimizer.skipped_steps) == 1
    assert int(gan.g_optimizer.skipped_steps) == 0
    assert snapshot(gan.discriminator.variables) == snapshot(reference.discriminator.variables)
    assert snapshot(gan.generator.variables) != snapshot(reference.generator.variables)


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


@pytest.mark.filterwarnings("ignore:Under policy .float16. layers make:UserWarning")
def test_p18_pure_float16_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="'mixed_float16'"):
        compiled(linear(), "float16", "adam")


@pytest.mark.parametrize("built", [False, True])
def test_p21_scale_loss_of_a_float16_loss(built):
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.1))
    if built:
        optimizer.build([keras.Variable([1.0])])
    assert float(optimizer.scale_loss(keras.ops.convert_to_tensor(3.0, "float16"))) == 98304.0


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
def test_p22_the_compiled_step_has_no_conditional_and_is_traced_once():
    import tensorflow as tf

    v = keras.Variable(np.ones(64, "float32"))
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.1))
    optimizer.build([v])
    traces = []

    @tf.function(jit_compile=True)
    def one_step(g):
        traces.append(1)
        optimizer.apply([g], [v])

    for i in range(100):
        one_step(tf.fill([64], np.inf if i % 7 == 3 else 1.0))
    hlo = one_step.experimental_get_compiler_ir(tf.fill([64], 1.0))(stage="optimized_hlo")
    assert len(traces) == 1
    assert " conditional(" not in hlo
    assert " while(" not in hlo
    assert np.isfinite(numpy(v)).all()


@pytest.mark.backends("jax")
def test_p22_the_compiled_step_has_no_conditional_on_jax():
    import jax

    v = keras.Variable(np.ones(64, "float32"))
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.1))
    optimizer.build([v])
    step_fn = jax.jit(optimizer.stateless_apply, donate_argnums=(0, 2))
    state = [w.value for w in optimizer.variables]
    hlo = step_fn.lower(state, [v.value], [v.value * 1]).compile().as_text()
    assert " conditional(" not in hlo
    assert " while(" not in hlo


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize(("bad", "scale"), [("input", 1024.0), ("gradient", 512.0)])
def test_p23_p39_inf_on_one_replica_alone_skips_on_all(replica, bad, scale):
    """The scale halves when only a gradient overflowed, and stays when the forward pass is at fault."""
    against = "keras" if AGAINST_KERAS else "mpkeras"
    result = mirrored_runs("input 0", "input 1", "gradient 0", "gradient 1", against=against)[f"{bad} {replica}"]
    assert result["weights_unchanged"]
    assert result["state_finite"]
    assert result["scales"] == [scale, scale]


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

    with pytest.raises(ValueError, match="StatelessScope"):
        jax.jit(jax.value_and_grad(loss_outside))(v.value)

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


# ----------------------------------------------------------------------------------------------- P28 … P32


def test_p28_a_fixed_scale_stays_fixed_and_overflow_is_skipped():
    model = compiled(
        linear(), "mixed_float16", keras.optimizers.SGD(0.1, loss_scale_factor=128.0), auto_scale_loss=False
    )
    weights = snapshot(model.trainable_variables)
    model.train_on_batch(np.full((2, 4), np.inf, "float32"), np.zeros((2, 1), "float32"))
    assert snapshot(model.trainable_variables) == weights
    for _ in range(20):
        model.train_on_batch(np.ones((2, 4), "float32"), np.zeros((2, 1), "float32"))
    assert float(model.optimizer.scale_loss(1.0)) == 128.0


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
    model = compiled(linear(), "mixed_float16", keras.optimizers.Adam(0.1, beta_1=0.8, clipnorm=0.5))
    assert model.optimizer.beta_1 == 0.8
    assert model.optimizer.clipnorm == 0.5
    x, y = np.full((4, 4), 0.01, "float32"), np.full((4, 1), 0.1, "float32")
    fit(model, x, y, epochs=2, callbacks=[keras.callbacks.LearningRateScheduler(lambda epoch: 0.25 / (epoch + 1))])
    assert float(model.optimizer.learning_rate) == 0.125
