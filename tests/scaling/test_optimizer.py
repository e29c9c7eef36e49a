import contextlib
import inspect
import warnings

import keras
import numpy as np
import pytest
from keras import ops

import mpkeras
from mpkeras.policies.loss_scaling import DynamicLossScale, FixedLossScale, LossScale
from mpkeras.scaling.optimizer import LossScaleOptimizer
from mpkeras.scaling.rewrap import rewrapped
from tests.cases import first_quick
from tests.scaling.bare import apply_bare
from tests.step_modes import MODES, applier, snapshot

# The optimizer's own tests hand it scaled gradients without a loss; P3's own test checks the warning.
pytestmark = pytest.mark.filterwarnings("ignore:.*the loss was not scaled since the last step")

START = [1.0, 2.0, 3.0, 4.0]
GRADIENT = [1.0, 6.0, 7.0, 2.0]

OPTIMIZERS = {
    "SGD": lambda **kw: keras.optimizers.SGD(0.5, **kw),
    "nesterov": lambda **kw: keras.optimizers.SGD(0.5, momentum=0.9, nesterov=True, **kw),
    "Adam": lambda **kw: keras.optimizers.Adam(0.1, amsgrad=True, **kw),
    "AdamW": lambda **kw: keras.optimizers.AdamW(0.1, **{"weight_decay": 0.01, **kw}),
    "Adamax": lambda **kw: keras.optimizers.Adamax(0.1, **kw),
    "Nadam": lambda **kw: keras.optimizers.Nadam(0.1, **kw),
    "RMSprop": lambda **kw: keras.optimizers.RMSprop(0.1, centered=True, momentum=0.5, **kw),
    "Adagrad": lambda **kw: keras.optimizers.Adagrad(0.1, **kw),
    "Adadelta": lambda **kw: keras.optimizers.Adadelta(0.1, **kw),
    "Adafactor": lambda **kw: keras.optimizers.Adafactor(0.1, **kw),
    "Ftrl": lambda **kw: keras.optimizers.Ftrl(0.1, **kw),
    "Lion": lambda **kw: keras.optimizers.Lion(0.1, **kw),
    "Lamb": lambda **kw: keras.optimizers.Lamb(0.1, **kw),
}


def variable(values=START, name="weight"):
    return keras.Variable(np.array(values, "float32"), name=name)


def numpy(v):
    return keras.ops.convert_to_numpy(v)


def counters(optimizer):
    names = ("skipped_steps", "consecutive_skips", "step_counter", "iterations", "last_step_skipped", "dynamic_scale")
    return [float(getattr(optimizer, name)) for name in names]


@pytest.mark.parametrize("mode", MODES)
def test_a_finite_step_takes_unscaled_gradients_and_bad_numbers_skip_the_whole_step(mode):
    variables = [variable(), variable([5.0, 6.0])]
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5, momentum=0.5), initial_scale=1024.0)
    apply = applier(optimizer, variables, mode)
    good = [1024.0 * np.array(GRADIENT, "float32"), np.zeros(2, "float32")]
    apply(good)
    # weight - 0.5 * gradient, exact: the scale is a power of two
    np.testing.assert_array_equal(numpy(variables[0]), [0.5, -1.0, -0.5, 3.0])
    assert counters(optimizer) == [0, 0, 1, 1, False, 1024.0]
    before = snapshot(variables + optimizer.inner_optimizer.variables)
    for i, bad in enumerate([(1.0, np.inf), (-np.inf, 0.0), (1.0, np.nan), (np.inf, -np.inf)], start=1):
        apply([good[0], np.array(bad, "float32")])
        assert snapshot(variables + optimizer.inner_optimizer.variables) == before
        assert counters(optimizer) == [i, i, 0, 1, True, 1024.0 / 2**i]
    apply(good)
    assert counters(optimizer) == [4, 0, 1, 2, False, 64.0]


def test_variables_of_float16_are_warned_of_once():
    v = keras.Variable(np.array(START, "float32"), dtype="float16", name="narrow")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=4.0)
    with pytest.warns(UserWarning, match="built on 1 trainable variables of float16.*narrow.*'mixed_float16'"):
        optimizer.build([v])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.build([v])
        optimizer.scale_loss(keras.ops.convert_to_tensor(1.0))
        optimizer.apply([keras.ops.convert_to_tensor([4.0, 0.0, 8.0, 0.0])], [v])
    np.testing.assert_array_equal(numpy(keras.ops.cast(v.value, "float32")), [0.5, 2.0, 2.0, 4.0])


@pytest.mark.parametrize("mode", first_quick(MODES))
def test_complex_gradients_keep_both_parts(mode):
    v = keras.Variable(np.array([1 + 1j, 2j], "complex64"), dtype="complex64")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=8.0)
    apply = applier(optimizer, [v], mode)
    apply([np.array([8 + 16j, -16j], "complex64")])
    for bad in (complex(8, np.inf), complex(np.nan, 8), complex(np.inf, -np.inf)):
        apply([np.array([1j, bad], "complex64")])
    np.testing.assert_array_equal(numpy(v), [1 + 1j - (1 + 2j) / 2, 2j + 2j / 2])
    assert (int(optimizer.skipped_steps), float(optimizer.loss_scale)) == (3, 1.0)


@pytest.mark.matrix
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_with_a_bad_step_equals_training_without_it(make, mode):
    """G2 for the optimizer: at a fixed scale, bit for bit, the sign of zero included."""
    rng = np.random.default_rng(0)
    grads = [rng.normal(size=4).astype("float32") * 64.0 for _ in range(4)]
    bad = np.array([1.0, np.nan, 0.0, np.inf], "float32")

    def train(sequence):
        variables = [variable([1.0, -0.0, 3.0, 1e-40])]
        optimizer = LossScaleOptimizer(make(), loss_scale=64.0)
        apply = applier(optimizer, variables, mode)
        for g in sequence:
            apply([g])
        return snapshot(variables + optimizer.inner_optimizer.variables)

    with_faults = train([bad, grads[0], grads[1], bad, bad, grads[2], grads[3], bad])
    assert with_faults == train(grads)


class DecaysHalf(keras.optimizers.SGD):
    """A user's own decay: of matrices alone, and not by the learning rate."""

    def _apply_weight_decay(self, variables):
        for v in variables:
            if len(v.shape) == 2:
                v.assign(v - v * self.weight_decay)


class AssignsTwice(keras.optimizers.SGD):
    def assign_sub(self, variable, value):
        super().assign_sub(variable, value * 2.0)


class Centralized(keras.optimizers.SGD):
    """A user's own change of gradients, of matrices alone."""

    def apply(self, grads, trainable_variables=None):
        axes = [tuple(range(len(g.shape) - 1)) for g in grads]
        grads = [g - ops.mean(g, axis=a, keepdims=True) if a else g for g, a in zip(grads, axes, strict=True)]
        return super().apply(grads, trainable_variables)


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("mode", first_quick(["graph", "eager", "xla"]))
def test_an_optimizer_of_the_users_own_may_change_some_gradients(mode):
    """Nothing is unscaled: what it hands on as it is would be of the graph around the branch that updates."""
    matrix, vector = variable([[1.0, 2.0], [3.0, 4.0]], "kernel"), variable([1.0, 2.0], "bias")
    apply = applier(LossScaleOptimizer(Centralized(0.5), loss_scale=1.0), [matrix, vector], mode)
    apply([np.array([[2.0, 4.0], [6.0, 0.0]], "float32"), np.array([8.0, -2.0], "float32")])
    apply([np.array([[2.0, np.nan], [6.0, 0.0]], "float32"), np.array([8.0, -2.0], "float32")])
    # By hand: the means of the columns are 4 and 2.
    np.testing.assert_array_equal(numpy(matrix), [[2.0, 1.0], [2.0, 5.0]])
    np.testing.assert_array_equal(numpy(vector), [-3.0, 3.0])


def keeps_its_own_on_the_instance():
    optimizer = keras.optimizers.SGD(0.1, weight_decay=0.3)
    plain = optimizer.assign_sub
    optimizer.__dict__["assign_sub"] = lambda variable, value: plain(variable, value * 3.0)
    return optimizer


def without_decay_of_vectors():
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.3)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


# In Keras 3.10 it has one decay for all, and does not run on TensorFlow.
MUON = pytest.mark.skipif(
    "adam_weight_decay" not in inspect.signature(keras.optimizers.Muon).parameters, reason="this Muon fails on its own"
)

DECAYING = [
    *(pytest.param(lambda make=make: make(weight_decay=0.3), id=name) for name, make in OPTIMIZERS.items()),
    pytest.param(without_decay_of_vectors, id="excluded"),
    pytest.param(lambda: keras.optimizers.Muon(0.1, weight_decay=0.3, adam_weight_decay=None), id="Muon", marks=MUON),
    pytest.param(
        lambda: keras.optimizers.Muon(0.1, weight_decay=None, adam_weight_decay=0.2), id="Muon's Adam", marks=MUON
    ),
    pytest.param(lambda: DecaysHalf(0.1, weight_decay=0.3), id="a subclass's decay"),
    pytest.param(lambda: AssignsTwice(0.1, weight_decay=0.3), id="a subclass's assignment"),
    pytest.param(keeps_its_own_on_the_instance, id="on the instance"),
]


@pytest.mark.matrix
@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("make", DECAYING)
def test_xla_decays_as_the_optimizer_itself_does(make):
    """Against the bare optimizer, op by op, that never saw the skipped step."""
    rng = np.random.default_rng(2)
    starts = [rng.normal(size=(3, 2)).astype("float32"), rng.normal(size=3).astype("float32")]
    steps = [[rng.normal(size=start.shape).astype("float32") for start in starts] for _ in range(3)]

    def fresh():
        return [variable(start, name) for start, name in zip(starts, ("kernel", "bias"), strict=True)]

    expected, variables = fresh(), fresh()
    plain = make()
    for grads in steps:
        plain.apply([keras.ops.convert_to_tensor(g) for g in grads], expected)
    inner = make()
    own = set(vars(inner))
    apply = applier(LossScaleOptimizer(inner, loss_scale=64.0), variables, "xla")
    for i, grads in enumerate(steps):
        apply([64.0 * g for g in grads])
        if i == 1:
            apply([grads[0], np.array([1.0, np.inf, 0.0], "float32")])
    for v, e in zip(variables, expected, strict=True):
        # XLA fuses a multiplication and an addition into one rounding.
        np.testing.assert_allclose(numpy(v), numpy(e), rtol=2e-5, atol=1e-6)
    assert {"assign_sub"} & own <= set(vars(inner)), "what was on the instance is still there"


def test_scale_loss_is_float32_built_or_not():
    """P21: 3.0 * 2**15 is beyond float16."""
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5))
    half = keras.ops.convert_to_tensor(3.0, "float16")
    for _ in range(2):
        scaled = optimizer.scale_loss(half)
        assert keras.backend.standardize_dtype(scaled.dtype) == "float32"
        assert float(scaled) == 98304.0
        optimizer.build([variable()])


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "options",
    [
        {"clipnorm": 0.5},
        {"global_clipnorm": 0.5},
        {"clipvalue": 0.25},
        {"weight_decay": 0.1},
        {"use_ema": True, "ema_momentum": 0.5},
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
    ],
    ids=lambda options: list(options)[-1],
)
def test_inner_options_act_on_unscaled_gradients_and_applied_steps_only(options, mode):
    """P13, P15: the same as the plain optimizer on unscaled gradients that never saw the bad step."""
    grads = [np.array(GRADIENT, "float32") * k for k in (1.0, -0.5, 0.25, 2.0)]
    plain_variables = [variable()]
    plain = keras.optimizers.SGD(0.5, momentum=0.9, **options)
    plain.build(plain_variables)
    for g in grads:
        apply_bare(plain, [g], plain_variables)
    variables = [variable()]
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5, momentum=0.9, **options), loss_scale=256.0)
    apply = applier(optimizer, variables, mode)
    for g in grads:
        apply([g * 256.0])
        apply([np.array([np.inf, 0.0, 0.0, 0.0], "float32")])
    # XLA may fuse a multiplication and an addition into one rounding
    np.testing.assert_allclose(numpy(variables[0]), numpy(plain_variables[0]), rtol=1e-6)
    for ours, theirs in zip(optimizer.inner_optimizer.variables, plain.variables, strict=True):
        np.testing.assert_allclose(numpy(ours), numpy(theirs), rtol=1e-6)
    assert int(optimizer.skipped_steps) == 4


@pytest.mark.parametrize("mode", first_quick(MODES))
def test_schedule_counts_applied_steps_only(mode):
    """P15: a cosine schedule with three skips is where the float32 run is after as many applied steps."""
    schedule = keras.optimizers.schedules.CosineDecay(0.5, decay_steps=5)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(schedule), loss_scale=8.0)
    v = variable([0.0])
    apply = applier(optimizer, [v], mode)
    bad, good = np.array([np.nan], "float32"), np.array([8.0], "float32")
    for g in (good, bad, good, bad, bad, good):
        apply([g])
    # sum over t = 0, 1, 2 of 0.5 * (1 + cos(pi t / 5)) / 2
    expected = -sum(0.25 * (1 + np.cos(np.pi * t / 5)) for t in range(3))
    np.testing.assert_allclose(numpy(v), [expected], rtol=1e-6)
    assert int(optimizer.iterations) == 3


def test_without_an_update_there_are_no_averages_to_end_with():
    """The averages begin at zero: `fit` would end with weights of zero where all its steps were skipped."""
    variable = keras.Variable([3.0, -2.0])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.75), loss_scale=4.0)
    optimizer.finalize_variable_values([variable])
    optimizer.apply([ops.array([np.inf, 1.0])], [variable])
    optimizer.finalize_variable_values([variable])
    assert variable.numpy().tolist() == [3.0, -2.0]
    for grad in (4.0, 8.0):
        optimizer.scale_loss(1.0)
        optimizer.apply([ops.array([grad, 0.0])], [variable])
    optimizer.finalize_variable_values([variable])
    assert variable.numpy().tolist() == [2.25, -2.0]  # 0.75 * 2.5 + 0.25 * 1.5


@pytest.mark.slow
def test_averages_that_are_swapped_in_before_an_update_counts_are_the_weights():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.5, use_ema=True, ema_momentum=0.75), "mse")
    mpkeras.prepare(model, "mixed_bfloat16")
    with pytest.warns(UserWarning, match="All 1 steps of epoch 1 were skipped"):
        swap = keras.callbacks.SwapEMAWeights(True)
        model.fit(np.full((4, 2), np.nan), np.ones((4, 1)), verbose=0, callbacks=[swap])
    assert model.get_weights()[0].tolist() == [[1.0], [1.0]]


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["at the end", "in the middle", "swapped", "stopped"])
@pytest.mark.parametrize("policy", ["float32", "bfloat16"])
def test_training_goes_on_behind_averaged_weights(policy, ends):
    """On JAX, Keras' weights are then the very arrays of their averages, which the next step cannot be given twice."""
    x = np.random.default_rng(1).normal(size=(24, 3)).astype("float32")
    if ends == "swapped" and policy == "bfloat16" and keras.backend.backend() == "tensorflow":
        pytest.skip("Keras adds averages to weights in place, and TensorFlow refuses to add float32 to bfloat16.")

    class Ending(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if batch == 2 and ends == "stopped":
                raise KeyboardInterrupt

        def on_epoch_end(self, epoch, logs=None):
            if epoch == 0 and ends == "in the middle":
                self.model.optimizer.finalize_variable_values(self.model.trainable_variables)

    class Copied(Ending):
        """The same, with values of its own for each variable whenever Keras has given averages."""

        def on_epoch_begin(self, epoch, logs=None):
            for variable in (*self.model.variables, *self.model.optimizer.variables):
                variable.assign(np.array(ops.convert_to_numpy(ops.copy(variable.value))))

    def trained(callback):
        keras.utils.set_random_seed(2)
        layers = [keras.layers.Dense(4, "relu"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((3,)), *layers])
        model.compile(keras.optimizers.Adam(0.02, use_ema=True, ema_momentum=0.5), "mse")
        mpkeras.prepare(model, policy)
        swaps = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)] if ends == "swapped" else []
        for _ in range(3):
            with contextlib.suppress(KeyboardInterrupt):
                model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, shuffle=False, callbacks=[callback, *swaps])
        variables = (*model.variables, *model.optimizer.variables)
        return [ops.convert_to_numpy(ops.cast(variable.value, "float32")).tolist() for variable in variables]

    assert trained(Ending()) == trained(Copied())


def test_missing_gradients_stay_missing():
    variables = [variable(), variable([5.0])]
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=2.0)
    optimizer.build(variables)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([keras.ops.ones(4) * 2.0, None], variables)
    assert [numpy(v).tolist() for v in variables] == [[0.5, 1.5, 2.5, 3.5], [5.0]]


@pytest.mark.parametrize("mode", first_quick(MODES))
def test_overwrite_with_gradient_variables_take_the_gradient_as_it_is(mode):
    v = variable()
    v.overwrite_with_gradient = True
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=1024.0)
    applier(optimizer, [v], mode)([np.array(GRADIENT, "float32")])
    np.testing.assert_array_equal(numpy(v), GRADIENT)


@pytest.mark.parametrize("mode", first_quick(MODES))
def test_scale_moves_as_the_rule_says(mode):
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=8.0, dynamic_growth_steps=3)
    apply = applier(optimizer, [variable()], mode)
    seen = []
    for step in "..x...x...":
        apply([np.full(4, 0.0 if step == "." else np.inf, "float32")])
        seen.append(float(optimizer.dynamic_scale))
    assert seen == [8, 8, 4, 4, 4, 8, 4, 4, 4, 8]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", [2**31, 2**32 + 1, 10**10])
def test_numbers_of_steps_beyond_int32(steps, mode):
    """On torch they became other numbers, and 2**32 + 1 a growth at every step."""
    rule = DynamicLossScale(8.0, dynamic_growth_steps=steps)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=rule)
    patient = LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=DynamicLossScale(8.0, hysteresis=steps))
    apply, apply_patiently = applier(optimizer, [variable()], mode), applier(patient, [variable()], mode)
    for step in "..xx..":
        grad = np.full(4, 0.0 if step == "." else np.inf, "float32")
        apply([grad])
        apply_patiently([grad])
    assert (float(optimizer.loss_scale), float(patient.loss_scale)) == (2.0, 8.0)
    assert LossScaleOptimizer.from_config(optimizer.get_config()).loss_scale_rule == rule


@pytest.mark.backends("jax")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "make",
    [
        lambda: keras.optimizers.SGD(0.5, momentum=0.9),
        lambda: keras.optimizers.Adam(0.5, weight_decay=0.1),
        lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.25),
        lambda: keras.optimizers.SGD(0.5, gradient_accumulation_steps=2),
    ],
    ids=["SGD", "Adam", "clipped", "accumulated"],
)
def test_sparse_arrays_of_jax(make, mode):
    """A row that is there twice, against the dense gradient, with a skipped step between."""
    import jax
    import jax.numpy as jnp
    from jax.experimental import sparse

    def trained(gradient):
        v = variable(np.ones((4, 2)))
        optimizer = LossScaleOptimizer(make(), loss_scale=8.0)
        optimizer.build([v])
        step = jax.jit(optimizer.stateless_apply) if mode == "jit" else optimizer.stateless_apply
        state, values = [u.value for u in optimizer.variables], [v.value]
        for factor in (8.0, np.inf, -16.0, 4.0):
            rows = sparse.BCOO((factor * jnp.arange(6.0).reshape(3, 2), jnp.array([[1], [3], [1]])), shape=(4, 2))
            if mode == "eager":
                optimizer.apply([gradient(rows)], [v])
            else:
                values, state = step(state, [gradient(rows)], values)
        return numpy(v if mode == "eager" else values[0])

    np.testing.assert_allclose(trained(lambda rows: rows), trained(lambda rows: rows.todense()), rtol=1e-6)


@pytest.mark.parametrize("steps", [None, 2], ids=["", "accumulates"])
def test_build_adds_to_the_end_of_the_variables_as_in_keras(steps):
    v = variable([1.0])
    inner = keras.optimizers.SGD(0.25, momentum=0.5, gradient_accumulation_steps=steps)
    optimizer = LossScaleOptimizer(inner, initial_scale=16.0)
    before_build = optimizer.variables
    values = [numpy(u).copy() for u in before_build]
    optimizer.build([v])
    assert [id(u) for u in optimizer.variables[: len(before_build)]] == [id(u) for u in before_build]
    for _ in range(4):
        optimizer.scale_loss(1.0)
        optimizer.apply([keras.ops.convert_to_tensor([16.0])], [v])
    optimizer.learning_rate = 4.0
    # As a callback does that looks for a learning rate.
    for u, value in zip(optimizer.variables, values, strict=False):
        u.assign(value)
    assert (float(optimizer.learning_rate), int(optimizer.iterations), float(optimizer.loss_scale)) == (0.25, 0, 16.0)


@pytest.mark.parametrize("mode", first_quick(MODES))
@pytest.mark.parametrize(
    ("stored", "used"), [(0.0, 2.0**15), (2.0**-30, 2.0**-24), (float("inf"), 2.0**24), (2.0**40, 2.0**24)]
)
def test_restored_scale_outside_the_bounds_is_never_used(stored, used, mode):
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0))
    v = variable([0.0])
    optimizer.build([v])
    apply = applier(optimizer, [v], mode)
    optimizer.dynamic_scale.assign(stored)
    assert float(optimizer.loss_scale) == used
    apply([np.array([used], "float32")])
    np.testing.assert_array_equal(numpy(v), [-1.0])
    assert float(optimizer.dynamic_scale) == used


@pytest.mark.backends("jax")
def test_the_scale_of_a_scope_is_not_noted_for_what_comes_after():
    """A `StatelessScope` has a state of its own, and with it a scale."""
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=1024.0)
    v = variable()
    optimizer.build([v])
    state = [u.value * 4.0 if u is optimizer.dynamic_scale else u.value for u in optimizer.variables]
    one = keras.ops.convert_to_tensor(1.0)
    with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, state, strict=True))):
        assert float(optimizer.scale_loss(one)) == 4096.0
    assert float(optimizer.scale_loss(one)) == 1024.0
    optimizer.apply([keras.ops.convert_to_tensor(GRADIENT) * 1024.0], [v])
    np.testing.assert_array_equal(numpy(v), [0.5, -1.0, -0.5, 3.0])


def test_tf_keras_loop():
    """get_scaled_loss, get_unscaled_gradients, then apply_gradients takes them as they are, however often."""
    variables = [variable([1.0]), variable([2.0])]
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=512.0)
    optimizer.build(variables)
    loss = keras.ops.convert_to_tensor(2.0)
    assert float(optimizer.get_scaled_loss(lambda: loss)()) == 1024.0
    for expected in ([0.0, 1.0], [-1.0, 0.0]):
        assert float(optimizer.get_scaled_loss(loss)) == 1024.0
        *grads, missing = optimizer.get_unscaled_gradients([keras.ops.convert_to_tensor([1024.0])] * 2 + [None])
        assert [float(grad[0]) for grad in grads] == [2.0, 2.0] and missing is None
        for grad, v in zip(grads, variables, strict=True):
            optimizer.apply_gradients([(grad, v)])
        assert [float(numpy(v)[0]) for v in variables] == expected
    # the Keras 3 loop again
    optimizer.scale_loss(loss)
    optimizer.apply([keras.ops.convert_to_tensor([1024.0])] * 2, variables)
    assert [float(numpy(v)[0]) for v in variables] == [-2.0, -1.0]


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        ({}, DynamicLossScale()),
        ({"initial_scale": 4.0}, DynamicLossScale(4.0)),
        ({"dynamic_growth_steps": 7}, DynamicLossScale(dynamic_growth_steps=7)),
        ({"loss_scale": 128}, FixedLossScale(128.0)),
        ({"loss_scale": DynamicLossScale(8.0)}, DynamicLossScale(8.0)),
        ({"dynamic": False, "initial_scale": 64.0}, FixedLossScale(64.0)),
        ({"dynamic": True}, DynamicLossScale()),
        ({"loss_scale": None}, FixedLossScale(1.0)),
        # Neutral arguments of early configurations.
        ({"clipnorm": None, "use_ema": False, "ema_momentum": 0.99}, DynamicLossScale()),
    ],
)
def test_constructor_of_three_generations(arguments, rule):
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), **arguments)
    assert optimizer.loss_scale_rule == rule
    assert optimizer.dynamic == isinstance(rule, DynamicLossScale)
    assert optimizer.initial_scale == rule.initial_scale
    assert float(optimizer.loss_scale) == rule.initial_scale


@pytest.mark.parametrize("inner", ["adam", keras.optimizers.Adam(0.1).get_config()])
def test_inner_optimizer_by_name_or_configuration(inner):
    if isinstance(inner, dict):
        inner = {"class_name": "Adam", "config": inner}
    assert isinstance(LossScaleOptimizer(inner).inner_optimizer, keras.optimizers.Adam)


NO_ANSWER = (TypeError, r"`dynamic` to be True or False\. Received: dynamic=.*Leave it out")
NOT_SHARED = (
    TypeError,
    r"each optimizer has a scale of its own\. Received: .*LossScaleOptimizer.*not shared any more"
    r".*loss_scale=mpkeras\.DynamicLossScale\(\)`, or use one optimizer for the sum of the losses",
)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"clipnorm": 1.0}, ValueError, "set `clipnorm` on the `inner_optimizer`"),
        ({"use_ema": True}, ValueError, "set `use_ema` on the `inner_optimizer`"),
        ({"loss_scale_factor": 2.0}, ValueError, "set `loss_scale_factor` on the `inner_optimizer`"),
        ({"foo": 1, "bar": 2}, ValueError, "arguments: `foo`, `bar`"),
        ({"dynamic": False}, ValueError, "`initial_scale` with `dynamic=False`"),
        ({"dynamic": False, "initial_scale": 2.0, "dynamic_growth_steps": 3}, ValueError, "a fixed scale never grows"),
        ({"dynamic": True, "loss_scale": 2.0}, ValueError, "moving scale"),
        ({"initial_scale": 2.0, "loss_scale": 4.0}, ValueError, "given once"),
        ({"loss_scale": "automatic"}, ValueError, "'dynamic', a number"),
        *(({"initial_scale": 8.0, "dynamic": value}, *NO_ANSWER) for value in ("no", 0, 1, np.False_, np.True_, 32.0)),
        # In 0.1.0 an optimizer was a scale that both share.
        ({"loss_scale": LossScaleOptimizer("sgd")}, *NOT_SHARED),
        (
            {"loss_scale": keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "initial_scale": 8.0},
            *NOT_SHARED,
        ),
        ({"loss_scale": LossScaleOptimizer("sgd"), "initial_scale": 8.0, "dynamic": False}, *NOT_SHARED),
        ({"inner_optimizer": LossScaleOptimizer("sgd")}, ValueError, "scaled twice"),
        ({"inner_optimizer": 3}, TypeError, "of type int"),
    ],
)
def test_contradictions_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        LossScaleOptimizer(**{"inner_optimizer": keras.optimizers.SGD(0.5), **arguments})


@pytest.mark.parametrize("mode", first_quick(MODES))
def test_a_loss_scale_factor_of_the_inner_optimizer_gives_way_aloud_and_stays(mode):
    inner = keras.optimizers.SGD(0.5, loss_scale_factor=128.0)
    with pytest.warns(UserWarning, match="`loss_scale=128"):
        optimizer = LossScaleOptimizer(inner, initial_scale=4.0)
    v = variable()
    applier(optimizer, [v], mode)([4.0 * np.array(GRADIENT, "float32")])
    np.testing.assert_array_equal(numpy(v), [0.5, -1.0, -0.5, 3.0])
    assert inner.loss_scale_factor == 128.0
    # A file says which rule holds.
    again = LossScaleOptimizer.from_config(optimizer.get_config())
    assert (again.inner_optimizer.loss_scale_factor, again.loss_scale_rule) == (128.0, DynamicLossScale(4.0))
    # By itself it scales by its own factor again.
    inner.apply([128.0 * ops.convert_to_tensor(GRADIENT)], [v])
    np.testing.assert_array_equal(numpy(v), [0.0, -4.0, -4.0, 2.0])


@pytest.mark.parametrize("name", ["Adam", "RMSprop"])
def test_every_public_attribute_of_the_inner_optimizer_is_readable_and_writable(name):
    """P32"""
    inner = OPTIMIZERS[name](clipnorm=0.5)
    optimizer = LossScaleOptimizer(inner)
    for name, value in vars(inner).items():
        if not name.startswith("_") and name not in ("name", "built"):
            assert getattr(optimizer, name) is value or getattr(optimizer, name) == value, name
    assert optimizer.clipnorm == 0.5
    written = {"clipnorm": 0.25, "clipvalue": 0.75, "global_clipnorm": 2.0, "weight_decay": 0.125, "use_ema": True}
    written |= {"ema_momentum": 0.5, "ema_overwrite_frequency": 3, "loss_scale_factor": 4.0}
    for name, value in written.items():
        setattr(optimizer, name, value)
        assert getattr(inner, name) == getattr(optimizer, name) == value
        assert name not in vars(optimizer)
    optimizer.learning_rate = 0.125
    assert float(inner.learning_rate) == 0.125


def test_attributes_of_the_wrapper_and_new_ones_stay_on_the_wrapper():
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.1, beta_1=0.8))
    optimizer.beta_1 = 0.7
    assert optimizer.inner_optimizer.beta_1 == 0.7
    optimizer.my_note = "hello"
    assert not hasattr(optimizer.inner_optimizer, "my_note")
    inner_name = optimizer.inner_optimizer.name
    optimizer.name = "outer"
    assert optimizer.inner_optimizer.name == inner_name
    # A method that the user puts in the place of the wrapper's own.
    optimizer.get_config = lambda: {"mine": True}
    assert optimizer.get_config() == {"mine": True} and "beta_1" in optimizer.inner_optimizer.get_config()
    with pytest.raises(AttributeError, match="no_such_thing"):
        _ = optimizer.no_such_thing


def test_rule_settings_can_be_set_or_are_refused():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5))
    optimizer.dynamic_growth_steps = 5
    assert optimizer.loss_scale_rule == DynamicLossScale(dynamic_growth_steps=5)
    fixed = LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=2.0)
    with pytest.raises(ValueError, match="loss scale with `dynamic_growth_steps`"):
        fixed.dynamic_growth_steps = 5
    for scaled, rule in ((optimizer, DynamicLossScale(8.0, dynamic_growth_steps=5)), (fixed, FixedLossScale(8.0))):
        scaled.initial_scale = 8.0
        assert scaled.loss_scale_rule == rule and float(scaled.loss_scale) == 8.0


def test_configurations_of_stock_keras_and_of_tf_keras():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), initial_scale=4.0, dynamic_growth_steps=2, name="mine")
    config = optimizer.get_config()
    assert sorted(config) == ["dynamic_growth_steps", "initial_scale", "inner_optimizer", "name"]
    assert keras.optimizers.LossScaleOptimizer.from_config(dict(config)).initial_scale == 4.0
    inner = keras.optimizers.serialize(keras.optimizers.SGD(0.5))
    config = {"inner_optimizer": inner, "dynamic": False, "initial_scale": 8.0, "dynamic_growth_steps": None}
    assert LossScaleOptimizer.from_config(config).loss_scale_rule == FixedLossScale(8.0)


def trained(optimizer):
    v = variable()
    optimizer.build([v])
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    inner.variables[0].assign(3)
    if inner is not optimizer:
        optimizer.step_counter.assign(5)
        optimizer.dynamic_scale.assign(256.0)
    for slot in inner.variables[2:]:
        slot.assign(keras.ops.full(slot.shape, 7.0))
    return optimizer


@pytest.mark.parametrize("is_plain", [False, True])
def test_state_of_a_stock_or_plain_optimizer_loads(is_plain):
    inner = keras.optimizers.Adam(0.5)
    stock = trained(inner if is_plain else keras.optimizers.LossScaleOptimizer(inner))
    store = {}
    stock.save_own_variables(store)
    loaded = LossScaleOptimizer(keras.optimizers.Adam(0.1))
    loaded.build([variable()])
    loaded.load_own_variables(store)
    assert (float(loaded.dynamic_scale), int(loaded.step_counter)) == ((2.0**15, 0) if is_plain else (256.0, 5))
    assert int(loaded.skipped_steps) == 0
    assert snapshot(loaded.inner_optimizer.variables) == snapshot(inner.variables)


def test_the_inner_optimizer_loads_for_itself_after_a_file_of_a_plain_one():
    """The wrapper has given it the arrays of that file, and keeps it from a warning that nothing is left for it."""
    stores = []
    for momentum in (2.0, 3.0):
        plain = keras.optimizers.SGD(0.5, momentum=0.5)
        plain.build([variable()])
        plain.variables[2].assign([momentum] * 4)
        stores.append({})
        plain.save_own_variables(stores[-1])
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5, momentum=0.5))
    optimizer.build([variable()])
    optimizer.load_own_variables(stores[0])
    np.testing.assert_array_equal(numpy(optimizer.inner_optimizer.variables[2]), [2.0] * 4)
    optimizer.inner_optimizer.load_own_variables({})
    for _ in range(2):
        optimizer.load_own_variables(stores[0])
        optimizer.inner_optimizer.load_own_variables(stores[1])
        np.testing.assert_array_equal(numpy(optimizer.inner_optimizer.variables[2]), [3.0] * 4)


def test_rewrapped_keeps_every_counter_and_leaves_the_old_one_whole():
    old = LossScaleOptimizer(keras.optimizers.SGD(0.5))
    old.build([variable()])
    counters = {"skipped_steps": 5, "consecutive_skips": 3, "nonfinite_losses": 2, "_last_step_skipped": True}
    for name, value in counters.items():
        getattr(old, name).assign(value)
    new = rewrapped(old, DynamicLossScale(4.0))
    assert {name: int(getattr(new, name)) for name in counters} == counters and bool(new.last_step_skipped)
    if keras.backend.backend() == "jax":
        # A compiled step takes the buffers of the new one for its own.
        buffers = {v.value.unsafe_buffer_pointer() for v in old.variables if v not in old.inner_optimizer.variables}
        assert not buffers & {v.value.unsafe_buffer_pointer() for v in new.variables}


@pytest.mark.parametrize(
    ("loss_scale", "steps", "expected"),
    [
        # The scale has grown at the last step, so its counter says 0.
        pytest.param(DynamicLossScale(64.0), 3, 64.0, id="found by training"),
        pytest.param(DynamicLossScale(64.0), 0, 4.0, id="of an optimizer that took no step"),
        pytest.param(64.0, 3, 4.0, id="fixed"),
    ],
)
def test_rewrapped_keeps_a_scale_that_training_has_found(loss_scale, steps, expected):
    old = LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=loss_scale)
    old.build([variable()])
    old.inner_optimizer.iterations.assign(steps)
    assert float(rewrapped(old, DynamicLossScale(4.0)).loss_scale) == expected


@pytest.mark.parametrize("cls", [None, keras.optimizers.LossScaleOptimizer, LossScaleOptimizer])
def test_rewrapped_keeps_state_and_schedule(cls):
    inner = keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.5))
    old = trained(inner if cls is None else cls(inner))
    before = snapshot(inner.variables)
    new = rewrapped(old, DynamicLossScale())
    assert new.inner_optimizer is inner and snapshot(inner.variables) == before
    assert int(new.iterations) == 3
    assert (float(new.dynamic_scale), int(new.step_counter)) == ((2.0**15, 0) if cls is None else (256.0, 5))


def test_unbuilt_optimizer_has_no_skips_and_says_what_it_needs():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5))
    assert optimizer.skipped_steps == 0
    with pytest.raises(ValueError, match="must already be built"):
        optimizer.apply([keras.ops.ones(4)])
    with pytest.raises(ValueError, match="must be built"):
        optimizer.stateless_apply([], [], [])
    optimizer.build([variable()])
    with pytest.raises(ValueError, match="one gradient for each variable"):
        optimizer.apply([keras.ops.ones(4)] * 2, [variable()])


def test_apply_without_variables_uses_those_it_was_built_on_and_leaves_the_gradients_alone():
    v, grad = variable(), keras.ops.ones(4) * 8.0
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=8.0)
    optimizer.build([v])
    optimizer.apply([grad])
    np.testing.assert_array_equal(numpy(v), [0.5, 1.5, 2.5, 3.5])
    np.testing.assert_array_equal(numpy(grad), [8.0] * 4)


@pytest.mark.backends("torch")
def test_on_torch_the_gradients_of_a_stateless_step_are_left_alone_too():
    """`apply` unscales a variable's own `.grad` in place, as torch's scaler does; a stateless step changes nothing."""
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=8.0)
    v = variable()
    optimizer.build([v])
    before = numpy(v).copy()
    v.value.grad = keras.ops.ones(4) * 8.0
    (new_value,), _ = optimizer.stateless_apply([w.value for w in optimizer.variables], [v.value.grad], [v.value])
    np.testing.assert_array_equal(numpy(v.value.grad), [8.0] * 4)
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(new_value), before - 0.5)
    optimizer.apply([v.value.grad], [v])
    np.testing.assert_array_equal(numpy(v.value.grad), [1.0] * 4)


@pytest.mark.backends("torch")
def test_on_torch_a_gradient_that_is_the_new_value_is_not_unscaled_in_place():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=8.0)
    v = variable()
    v.overwrite_with_gradient = True
    optimizer.build([v])
    v.value.grad = keras.ops.ones(4) * 24.0
    optimizer.apply([v.value.grad], [v])
    np.testing.assert_array_equal(numpy(v), [24.0] * 4)


def test_set_weights_reaches_the_inner_optimizer():
    source = trained(LossScaleOptimizer(keras.optimizers.Adam(0.5)))
    target = LossScaleOptimizer(keras.optimizers.Adam(0.5))
    target.build([variable()])
    target.set_weights([numpy(v) for v in source.variables])
    assert snapshot(target.variables) == snapshot(source.variables)


@pytest.mark.parametrize("unscales", [False, True])
def test_statistics_are_those_of_unscaled_gradients_whoever_unscales(unscales):
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=8.0)
    v = variable()
    optimizer.scale_loss(keras.ops.convert_to_tensor(1.0))
    optimizer.facts.wants_statistics = True
    grads = [keras.ops.convert_to_tensor([24.0, 0.0, 32.0, 0.0])]
    optimizer.apply(optimizer.get_unscaled_gradients(grads) if unscales else grads, [v])
    assert [float(value) for value in optimizer.facts.statistics] == [5.0, 0.5]
    np.testing.assert_array_equal(numpy(v), [-0.5, 2.0, 1.0, 4.0])


class Remembers(LossScale):
    """Hands a value on to another name, and counts the steps that were not finite."""

    def initial_state(self):
        return {"dynamic_scale": 4.0, "before": 0.0, "first": 0.0, "bad": 0}

    def next_state(self, state, is_finite):
        scale, before = state["dynamic_scale"], state["before"]
        bad = state["bad"] + ops.cast(ops.logical_not(is_finite), "int32")
        return {"dynamic_scale": 2.0 * scale, "before": scale, "first": before, "bad": bad}


@pytest.mark.parametrize("mode", first_quick(MODES))
def test_a_rule_of_ones_own_is_kept_in_the_state_and_what_was_read_stays_as_it_was(mode):
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=Remembers())
    apply = applier(optimizer, [variable()], mode)
    skipped, scales = [], []
    for g in (np.inf, 0.0, np.nan):
        apply([np.full(4, g, "float32")])
        skipped.append(optimizer.last_step_skipped)
        scales.append(optimizer.loss_scale)
    found = {key: float(value) for key, value in optimizer.scale_state.items() if key != "step_counter"}
    assert found == {"dynamic_scale": 32.0, "before": 16.0, "first": 8.0, "bad": 2.0}
    assert [bool(flag) for flag in skipped] == [True, False, True]
    assert [float(scale) for scale in scales] == [8.0, 16.0, 32.0]


@pytest.mark.backends("jax")
def test_on_jax_what_a_rule_returns_has_the_dtypes_of_its_state():
    """Or the next step, given Python's numbers, would be compiled anew."""

    class Alternates(LossScale):
        def initial_state(self):
            return {"dynamic_scale": 4.0, "steps": 0}

        def next_state(self, state, is_finite):
            del is_finite
            return {"dynamic_scale": 8, "steps": keras.ops.cast(state["steps"], "float32") + 1.0}

    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=Alternates())
    v = variable()
    optimizer.build([v])
    values = [w.value for w in optimizer.variables]
    _, new_values = optimizer.stateless_apply(values, [keras.ops.zeros(4)], [v.value])
    assert [new.dtype for new in new_values] == [old.dtype for old in values]
    scale = optimizer.variables.index(optimizer.dynamic_scale)
    assert float(new_values[scale]) == 8.0


def test_fixed_scale_of_one_multiplies_nothing_and_misses_no_scaled_loss():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        v = variable()
        optimizer.apply([keras.ops.ones(4)], [v])
    np.testing.assert_array_equal(numpy(v), [0.5, 1.5, 2.5, 3.5])
    assert float(optimizer.scale_loss(3.0)) == 3.0


@pytest.mark.backends("tensorflow")
def test_the_loss_of_an_eager_call_does_not_decide_the_steps_of_a_graph():
    import tensorflow as tf

    v = variable()
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=2.0)
    optimizer.build([v])
    apply = tf.function(lambda grad: optimizer.apply([grad], [v]))
    optimizer.scale_loss(tf.constant(np.nan))
    apply(tf.constant([np.nan, 0.0, 0.0, 0.0]))
    optimizer.scale_loss(tf.constant(1.0))
    apply(2.0 * tf.constant(GRADIENT))
    np.testing.assert_array_equal(numpy(v), [0.5, -1.0, -0.5, 3.0])
    assert int(optimizer.skipped_steps) == 1


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("mode", first_quick(["xla", "eager", "graph"]))
def test_rows_of_a_table_are_chosen_whole(mode):
    """-0.0 and what float32 holds below its normal numbers stay as they are where a step is skipped."""
    import tensorflow as tf

    start = np.array([[-0.0, 3.0], [1e-40, -0.0], [5.0, 7.0], [-2e-41, 9.0]], "float32")
    table = keras.Variable(start)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.25), loss_scale=4.0)
    optimizer.build([table])

    def step(values, rows):
        optimizer.apply([tf.IndexedSlices(values, rows, (4, 2))], [table])

    step = step if mode == "eager" else tf.function(step, jit_compile=mode == "xla")
    step(tf.constant([[1.0, np.nan], [2.0, 3.0]]), tf.constant([1, 0]))
    assert table.numpy().tobytes() == start.tobytes()
    # Row 2 twice: 0.25 * (8 + 16) / 4 is taken away, and 0.25 * 32 / 4 of row 3; the others are not touched.
    step(tf.constant([[8.0, 8.0], [16.0, 16.0], [32.0, 32.0]]), tf.constant([2, 2, 3]))
    assert table.numpy()[:2].tobytes() == start[:2].tobytes()
    np.testing.assert_array_equal(table.numpy()[2:], [[3.5, 5.5], [-2.0, 7.0]])


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("slot_dtype", first_quick(["bfloat16", "float32"]))
@pytest.mark.parametrize("mode", first_quick(["xla", "eager", "graph"]))
def test_rows_that_an_optimizer_replaces_stay_where_a_step_is_skipped(mode, slot_dtype):
    """No optimizer of Keras' assigns rows; one of a user's may, as Keras' `assign` takes them."""
    import tensorflow as tf

    class Replacing(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            self.assign(variable, tf.IndexedSlices(gradient.values - 1.0, gradient.indices))

    start = np.array([[-0.0, 3.0], [1e-40, -0.0], [5.0, 7.0]], "float32")
    table = keras.Variable(start)
    optimizer = LossScaleOptimizer(Replacing(0.25, momentum=0.5), loss_scale=2.0, slot_dtype=slot_dtype)
    optimizer.build([table])

    def step(values, rows):
        optimizer.apply([tf.IndexedSlices(values, rows, (3, 2))], [table])

    step = step if mode == "eager" else tf.function(step, jit_compile=mode == "xla")
    step(tf.constant([[1.0, 4.0], [np.inf, 3.0]]), tf.constant([1, 0]))
    assert table.numpy().tobytes() == start.tobytes()
    step(tf.constant([[8.0, 4.0], [-6.0, 2.0]]), tf.constant([2, 0]))
    np.testing.assert_array_equal(table.numpy()[[0, 2]], [[-4.0, 0.0], [3.0, 1.0]])
    assert table.numpy()[1].tobytes() == start[1].tobytes()


@pytest.mark.parametrize("mode", first_quick(MODES))
def test_one_number_that_is_not_finite_in_any_gradient_skips_the_step(mode):
    """Of one shape there are several, small and large, and one that is alone; the number is the last of it."""
    shapes = [(3,), (3,), (3,), (2, 4), (2, 4), (), (), (70, 70), (70, 70), (9000,)]
    ones = [np.ones(shape, "float32") for shape in shapes]
    weights = [keras.Variable(gradient) for gradient in ones]
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=1.0)
    apply = applier(optimizer, weights, mode)
    for bad in range(len(shapes)):
        grads = [gradient.copy() for gradient in ones]
        grads[bad][(-1,) * grads[bad].ndim] = (np.nan, np.inf, -np.inf)[bad % 3]
        apply(grads)
        assert int(optimizer.skipped_steps) == bad + 1
    apply(ones)
    assert int(optimizer.skipped_steps) == len(shapes)
    for weight in weights:
        np.testing.assert_array_equal(ops.convert_to_numpy(weight), 0.5)


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
def test_autograph_says_nothing_of_an_optimizer_that_a_function_builds(caplog):
    import tensorflow as tf

    weight = keras.Variable(np.ones((2,), "float32"))
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=4.0)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            scaled_loss = optimizer.scale_loss(tf.reduce_sum(weight * x))
        optimizer.apply(tape.gradient(scaled_loss, [weight.value]), [weight])

    step(tf.constant([1.0, 2.0]))
    assert np.array_equal(weight.numpy(), [0.5, 0.0])
    assert "AutoGraph" not in caplog.text
