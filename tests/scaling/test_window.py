"""P14: windows of accumulated gradients, against a float32 run that leaves out the same data."""

import functools
import itertools

import keras
import numpy as np
import pytest

from mpkeras.policies.loss_scaling import DynamicLossScale, FixedLossScale
from mpkeras.scaling.facts import StepFacts
from mpkeras.scaling.optimizer import LossScaleOptimizer
from mpkeras.scaling.rewrap import rewrapped
from tests.cases import first_quick
from tests.scaling.bare import apply_bare
from tests.step_modes import MODES, applier, snapshot

# The tests hand over gradients that are scaled already.
pytestmark = pytest.mark.filterwarnings("ignore:.*the loss was not scaled:UserWarning")

WINDOW = 4
SCALE = 256.0
INF = np.array([1.0, np.inf, 0.0], "float32")


def variable(value=(1.0, -2.0, 0.5), dtype="float32"):
    return keras.Variable(np.array(value, "float32"), dtype=dtype)


def numpy(tensor):
    return np.asarray(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(tensor)))


def apply_each(optimizer, values, v):
    """Takes a step for each of these gradients of the scaled loss."""
    for value in values:
        optimizer.apply([keras.ops.convert_to_tensor([float(value)])], [v])


def apply_each_bare(plain, values, v):
    for value in values:
        apply_bare(plain, [np.array([value], "float32")], [v])


def accumulating(on_overflow="drop_micro", steps=WINDOW, rule=SCALE, **options):
    inner = keras.optimizers.SGD(0.5, momentum=0.9, gradient_accumulation_steps=steps, **options)
    return LossScaleOptimizer(inner, loss_scale=rule, on_overflow=on_overflow)


def gradients(count, seed=0):
    # Multiples of 1/8: sums of a few and their halves and quarters are exact.
    return [g.astype("float32") / 8 for g in np.random.default_rng(seed).integers(-16, 16, size=(count, 3))]


def trained_on_means(means):
    """The reference: plain NumPy SGD with momentum, in float64."""
    weights, velocity = np.array([1.0, -2.0, 0.5]), np.zeros(3)
    for mean in means:
        velocity = 0.9 * velocity - 0.5 * mean
        weights = weights + velocity
    return weights


@pytest.mark.parametrize("mode", first_quick(MODES))
@pytest.mark.parametrize("on_overflow", first_quick(["drop_micro", "drop_window"]))
def test_an_inf_at_each_position_of_a_window(on_overflow, mode):
    optimizer, v = accumulating(on_overflow), variable()
    apply = applier(optimizer, [v], mode)
    means = []
    for seed, bad in enumerate((None, *range(WINDOW), None)):
        grads = gradients(WINDOW, seed)
        for i, g in enumerate(grads):
            apply([INF if i == bad else g * SCALE])
        if bad is None or on_overflow == "drop_micro":
            means.append(np.mean([g for i, g in enumerate(grads) if i != bad], axis=0, dtype="float64"))
        np.testing.assert_allclose(numpy(v), trained_on_means(means), rtol=2e-6, err_msg=f"{bad}")
        assert int(optimizer.iterations) == len(means)
    assert (int(optimizer.skipped_steps), int(optimizer.accepted_steps)) == (WINDOW, 5 * WINDOW)


@pytest.mark.parametrize("mode", first_quick(MODES))
@pytest.mark.parametrize("on_overflow", first_quick(["drop_window", "drop_micro"]))
def test_nothing_moves_inside_a_window_and_by_one_of_nothing_but_infs(on_overflow, mode):
    rule = DynamicLossScale(SCALE, dynamic_growth_steps=1)
    optimizer, v = accumulating(on_overflow, rule=rule, weight_decay=0.1), variable()
    apply = applier(optimizer, [v], mode)
    scales = []
    for i, g in enumerate(gradients(8)):
        before = snapshot([v])
        apply([INF if i == 1 else g * SCALE])
        scales.append(float(optimizer.loss_scale))
        updates = i == 7 or i == 3 and on_overflow == "drop_micro"
        assert (snapshot([v]) != before) == updates
    # The window with an inf in it backs off at its end, the next one grows at its end.
    assert scales == [256.0] * 3 + [128.0] * 4 + [256.0]
    before = snapshot([v, *optimizer.inner_optimizer.variables, *optimizer.window.sums])
    for _ in range(WINDOW):
        apply([INF])
    assert snapshot([v, *optimizer.inner_optimizer.variables, *optimizer.window.sums]) == before
    assert float(optimizer.loss_scale) == SCALE / 2
    assert int(optimizer.consecutive_skips) == WINDOW


@pytest.mark.parametrize("mode", first_quick(MODES))
def test_a_window_begins_anew_whatever_is_in_the_sums(mode):
    """The sums are not cleared when a window ends; a file may be of a run that was compiled otherwise."""
    optimizer, v = accumulating(), variable()
    apply = applier(optimizer, [v], mode)
    optimizer.build([v])
    optimizer.window.sums[0].assign(np.full(3, 1000.0, "float32"))
    grads = gradients(WINDOW)
    for g in [INF * SCALE, *[g * SCALE for g in grads[1:]]]:
        apply([g])
    np.testing.assert_allclose(numpy(v), trained_on_means([np.mean(grads[1:], axis=0, dtype="float64")]), rtol=1e-6)


@pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning")
@pytest.mark.parametrize("mode", first_quick(MODES))
def test_a_gradient_that_is_missing_when_a_window_begins(mode):
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), loss_scale=SCALE)
    variables = [variable([1.0]), variable([1.0])]
    apply = applier(optimizer, variables, mode)
    for grads in [(1.0, 4.0), (3.0, 8.0), (1.0, None), (3.0, 16.0)]:
        apply([None if g is None else np.array([g * SCALE], "float32") for g in grads])
    # Means of (1 + 3) / 2 twice; of (4 + 8) / 2 and (0 + 16) / 2.
    assert [numpy(v).tolist() for v in variables] == [[1.0 - 2 - 2], [1.0 - 6 - 8]]


@pytest.mark.parametrize("mode", first_quick([mode for mode in MODES if mode != "jit"]))
def test_a_variable_that_is_missing_when_a_window_begins(mode):
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), loss_scale=SCALE)
    variables = [variable([1.0]), variable([1.0])]
    optimizer.build(variables)
    apply_both, apply_second = (applier(optimizer, some, mode) for some in (variables, variables[1:]))
    for grads in [(1.0, 4.0), (3.0, 8.0), (16.0,), (3.0, 2.0)]:
        apply = apply_both if len(grads) == 2 else apply_second
        apply([np.array([g * SCALE], "float32") for g in grads])
    # Means of (1 + 3) / 2 and (0 + 3) / 2; of (4 + 8) / 2 and (16 + 2) / 2.
    assert [numpy(v).tolist() for v in variables] == [[1.0 - 2 - 1.5], [1.0 - 6 - 9]]


@pytest.mark.parametrize("mode", first_quick(MODES[::-1]))
@pytest.mark.parametrize("on_overflow", first_quick(["drop_micro", "drop_window"]))
def test_random_windows_against_the_reference(on_overflow, mode):
    """16 windows of 2 with every pattern of faults."""
    optimizer, v = accumulating(on_overflow, steps=2), variable()
    apply = applier(optimizer, [v], mode)
    means = []
    for seed, faults in enumerate(itertools.product([False, True], repeat=4)):
        grads = gradients(4, seed)
        for start in (0, 2):
            kept = [g for g, bad in zip(grads[start : start + 2], faults[start : start + 2], strict=True) if not bad]
            if len(kept) == 2 or (kept and on_overflow == "drop_micro"):
                means.append(np.mean(kept, axis=0, dtype="float64"))
        for g, bad in zip(grads, faults, strict=True):
            apply([INF if bad else g * SCALE])
    np.testing.assert_allclose(numpy(v), trained_on_means(means), rtol=2e-5, atol=1e-5)
    assert int(optimizer.iterations) == len(means)


@pytest.mark.filterwarnings("ignore:.*16 bits:UserWarning")
@pytest.mark.parametrize("mode", first_quick(MODES))
def test_sums_are_float32_for_16_bit_variables(mode):
    """16 gradients of 1 + 2**-7 each: bfloat16 has 8 significant bits, and holds neither three of them nor 15."""
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=16), loss_scale=1.0)
    v = variable([0.0], "bfloat16")
    apply = applier(optimizer, [v], mode)
    for _ in range(15):
        apply([np.array([1.0 + 2**-7], "float32")])
    assert optimizer.window.sums[0].dtype == "float32"
    assert float(numpy(optimizer.window.sums[0].value)[0]) == 15 * (1 + 2**-7)
    apply([np.array([1.0 + 2**-7], "float32")])
    assert numpy(keras.ops.cast(v.value, "float32")).tolist() == [-(1 + 2**-7)]


@pytest.mark.parametrize("values", [(7.0, 9.0), (9.0, 7.0)])
def test_a_variable_that_takes_its_gradient_as_value_takes_the_largest_accepted_one(values):
    """float8 scales and largest values: not summed, not averaged, not unscaled; as Keras' own accumulation."""
    weight, scale = variable([1.0]), variable([0.0])
    scale.overwrite_with_gradient = True
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), loss_scale=4.0)
    for gradient, new in zip((4.0, 8.0), values, strict=True):
        optimizer.apply([keras.ops.convert_to_tensor([gradient]), keras.ops.convert_to_tensor([new])], [weight, scale])
    np.testing.assert_array_equal(numpy(scale), [9.0])
    np.testing.assert_array_equal(numpy(weight), [1.0 - 1.5])


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("mode", first_quick(["eager", "graph", "xla"]))
def test_sparse_gradients_are_summed(mode):
    import tensorflow as tf

    table = keras.Variable(np.zeros((4, 2), "float32"))
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), loss_scale=2.0)
    optimizer.build([table])

    def step(values, rows):
        optimizer.apply([tf.IndexedSlices(values, rows, (4, 2))], [table])

    step = step if mode == "eager" else tf.function(step, jit_compile=mode == "xla")
    step(tf.ones((2, 2)) * 4.0, tf.constant([1, 1]))
    step(tf.ones((2, 2)) * 8.0, tf.constant([0, 1]))
    # mean of (0, 4, 0, 0) and (4, 4, 0, 0), unscaled
    np.testing.assert_array_equal(numpy(table)[:, 0], [-2.0, -4.0, 0.0, 0.0])


@pytest.mark.backends("tensorflow", "torch")
def test_missing_gradients_stay_missing():
    weight, unused = variable([1.0]), variable([5.0])
    optimizer = LossScaleOptimizer(
        keras.optimizers.SGD(1.0, weight_decay=0.5, gradient_accumulation_steps=2), loss_scale=2.0
    )
    gradient = keras.ops.convert_to_tensor([2.0])
    optimizer.apply([gradient, None], [weight, unused])
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([gradient, None], [weight, unused])
    np.testing.assert_array_equal(numpy(unused), [5.0])


def half_full(steps, values):
    """Returns a plain optimizer that has seen these gradients, the last of them in a window to be filled."""
    plain, v = keras.optimizers.SGD(1.0, gradient_accumulation_steps=steps), variable([0.0])
    plain.build([v])
    apply_each_bare(plain, values, v)
    return plain, v


def test_a_half_full_window_of_stock_keras_goes_on():
    plain, v = half_full(4, (1.0, 2.0, 3.0, 6.0, 10.0, 20.0))
    np.testing.assert_array_equal(numpy(v), [-3.0])
    optimizer = rewrapped(plain, DynamicLossScale(2.0))
    assert int(optimizer.iterations) == 1
    apply_each(optimizer, (60.0, 120.0), v)
    np.testing.assert_array_equal(numpy(v), [-33.0])
    assert int(optimizer.iterations) == 2
    # By itself again, the plain one begins with nothing in its sums.
    apply_each_bare(plain, (4.0, 8.0, 12.0, 16.0), v)
    np.testing.assert_array_equal(numpy(v), [-43.0])


def test_a_half_full_window_of_another_length_goes_on():
    plain, v = half_full(2, (1.0, 3.0, 4.0))
    optimizer = LossScaleOptimizer(plain, initial_scale=2.0)
    optimizer.accumulate(4)
    # One of four is there: the plain one has begun its second window of two.
    apply_each(optimizer, (12.0, 16.0), v)
    np.testing.assert_array_equal(numpy(v), [-2.0])
    apply_each(optimizer, [20.0], v)
    np.testing.assert_array_equal(numpy(v), [-9.0])


def test_rewrapping_keeps_a_half_full_window():
    optimizer, v = accumulating("drop_window"), variable([0.0])
    apply_each(optimizer, (2.0 * SCALE, 4.0 * SCALE), v)
    again = rewrapped(optimizer, DynamicLossScale(SCALE))
    assert (again.window.steps, again.window.on_overflow) == (4, "drop_window")
    apply_each(again, (6.0 * SCALE, 8.0 * SCALE), v)
    np.testing.assert_array_equal(numpy(v), [-2.5])


@pytest.mark.parametrize(
    ("steps", "grads", "expected"),
    [
        # Two calls, of 2 and 4, are there. By hand: the mean of all three, or of all five; then the next window begins.
        (1, (9.0, 1.0), (-5.0, -6.0)),
        (2, (9.0, 1.0, 3.0), (-5.0, -5.0, -7.0)),
        (5, (9.0, 1.0, 4.0, 7.0), (0.0, 0.0, -4.0, -4.0)),
    ],
)
@pytest.mark.parametrize("mode", first_quick(MODES))
def test_a_half_full_window_goes_on_in_one_of_another_length(mode, steps, grads, expected):
    v, old = variable([0.0]), LossScaleOptimizer(keras.optimizers.SGD(1.0), loss_scale=SCALE)
    old.accumulate(3)
    apply_each(old, (2.0 * SCALE, 4.0 * SCALE), v)
    new = rewrapped(old, DynamicLossScale(SCALE), steps=steps)
    assert new.gradient_accumulation_steps == (None if steps == 1 else steps)
    apply = applier(new, [v], mode)
    for grad, after in zip(grads, expected, strict=True):
        apply([np.array([grad * SCALE], "float32")])
        np.testing.assert_array_equal(numpy(v), [after])
    assert old.window.steps == 3 and int(new.accepted_steps) == 2 + len(grads)


@pytest.mark.parametrize("calls", [0, 6])
def test_without_half_full_sums_a_window_goes(calls):
    v, old = variable([0.0]), LossScaleOptimizer(keras.optimizers.SGD(1.0), loss_scale=SCALE)
    old.accumulate(3)
    apply_each(old, calls * [SCALE], v)
    new = rewrapped(old, DynamicLossScale(SCALE), steps=1)
    assert new.window is None and int(new.accepted_steps) == calls / 3
    assert int(rewrapped(new, DynamicLossScale(SCALE), steps=4).accepted_steps) == calls / 3


@pytest.mark.parametrize("scale", [1.0, DynamicLossScale(SCALE)])
def test_a_scale_that_begins_anew_in_a_window_awaits_its_first_step(scale):
    """So that a batch for which it is too large is taken again."""
    old = LossScaleOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), loss_scale=scale)
    apply_each(old, 3 * [SCALE], variable([0.0]))
    new = rewrapped(old, DynamicLossScale(SCALE))
    assert int(new.accepted_steps) == 3 and new.record.steps_before_scale == (3 if scale == 1.0 else 0)


def test_configuration_tells_stock_keras_and_comes_back():
    optimizer = accumulating("drop_window")
    config = optimizer.get_config()
    assert config["inner_optimizer"]["config"]["gradient_accumulation_steps"] == 4
    again = LossScaleOptimizer.from_config(config)
    assert (again.gradient_accumulation_steps, again.window.on_overflow) == (4, "drop_window")
    assert again.get_config() == config
    assert "on_overflow" not in accumulating().get_config()


@pytest.mark.parametrize("own", [None, 2])
def test_a_file_of_what_accumulates_beside_its_inner_optimizer_brings_no_second_sums(own):
    """Another counter in the inner optimizer is another seed: a resumed training would round in another way."""
    optimizer = LossScaleOptimizer(
        keras.optimizers.SGD(0.5, momentum=0.9, gradient_accumulation_steps=own), loss_scale=SCALE
    )
    optimizer.accumulate(3, "drop_window")
    apply_each(optimizer, [SCALE * n for n in (1.0, 2.0, 3.0, 4.0)], variable([0.0]))
    optimizer.save_own_variables(store := {})
    again = LossScaleOptimizer.from_config(optimizer.get_config())
    again.build([variable([0.0])])
    again.load_own_variables(store)
    assert (again.inner_optimizer.gradient_accumulation_steps, again.window.steps) == (own, 3)
    assert again.window.on_overflow == "drop_window" and again.get_config() == optimizer.get_config()
    assert snapshot(again.variables) == snapshot(optimizer.variables)


def test_a_saved_half_full_window_is_restored():
    optimizer, other, store = accumulating(), accumulating(), {}
    apply_each(optimizer, (2.0 * SCALE, 4.0 * SCALE), variable([0.0]))
    optimizer.save_own_variables(store)
    other.build([variable([0.0])])
    other.load_own_variables(store)
    assert snapshot(other.variables) == snapshot(optimizer.variables)

    # Files of an optimizer that did not accumulate load without the window.
    without = LossScaleOptimizer(keras.optimizers.SGD(0.5, momentum=0.9), loss_scale=64.0)
    apply_each(without, [64.0], variable([0.0]))
    without.save_own_variables(store := {})
    other.load_own_variables(store)
    assert float(other.loss_scale) == 256.0 and int(other.iterations) == 1


def test_accumulation_can_be_asked_for_later():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0), loss_scale=1.0)
    v = variable([0.0])
    optimizer.build([v])
    optimizer.gradient_accumulation_steps = 2
    assert optimizer.gradient_accumulation_steps == 2
    apply_each(optimizer, (1.0, 3.0), v)
    np.testing.assert_array_equal(numpy(v), [-2.0])
    optimizer.accumulate(2)
    with pytest.raises(ValueError, match="Create a new optimizer"):
        optimizer.accumulate(3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda inner: LossScaleOptimizer(inner, on_overflow="drop_all"), "drop_micro.*Received.*drop_all"),
        (lambda inner: LossScaleOptimizer("sgd", on_overflow="drop_micro"), "gradient_accumulation_steps"),
        (lambda inner: LossScaleOptimizer(inner).accumulate(0), "accumulate_steps=0"),
        (lambda inner: LossScaleOptimizer(inner).accumulate(True), "accumulate_steps=True"),
    ],
    ids=["on_overflow", "nothing to drop", "no steps", "a bool"],
)
def test_bad_windows_are_refused_and_leave_the_inner_optimizer_as_it_was(make, message):
    inner = keras.optimizers.SGD(gradient_accumulation_steps=4)
    with pytest.raises(ValueError, match=message):
        make(inner)
    assert inner.gradient_accumulation_steps == 4


@pytest.mark.parametrize("mode", first_quick(MODES))
def test_one_optimizer_wrapped_twice_accumulates_twice(mode):
    """G16: its settings are the user's, who reads them and its updates, and moves the learning rate through either."""
    inner = keras.optimizers.SGD(0.5, momentum=0.9, gradient_accumulation_steps=3, loss_scale_factor=2.0)
    grads = gradients(9)
    v = variable()
    for i, start in enumerate((0, 3, 6)):
        optimizer = LossScaleOptimizer(inner, loss_scale=FixedLossScale(SCALE))
        apply = applier(optimizer, [v], mode)
        for g in grads[start : start + 3]:
            before = snapshot([v])
            apply([g * SCALE])
        assert snapshot([v]) != before
        assert (inner.gradient_accumulation_steps, inner.loss_scale_factor) == (3, 2.0)
        assert int(inner.iterations) == int(optimizer.iterations) == i + 1
    expected = trained_on_means([np.mean(grads[i : i + 3], axis=0, dtype="float64") for i in (0, 3, 6)])
    np.testing.assert_allclose(numpy(v), expected, rtol=1e-6)
    inner.learning_rate = 0.25
    assert float(optimizer.learning_rate) == 0.25
    optimizer.learning_rate = 0.125
    assert float(inner.learning_rate) == 0.125


def test_a_wrapped_optimizer_accumulates_by_itself_afterwards():
    inner = keras.optimizers.SGD(0.5, momentum=0.9, gradient_accumulation_steps=3)
    grads = gradients(12)
    v = variable()
    optimizer = LossScaleOptimizer(inner, loss_scale=SCALE)
    for g in grads[:6]:
        optimizer.apply([keras.ops.convert_to_tensor(g * SCALE)], [v])
    for g in grads[6:]:
        apply_bare(inner, [g], [v])
    expected = trained_on_means([np.mean(grads[i : i + 3], axis=0, dtype="float64") for i in (0, 3, 6, 9)])
    np.testing.assert_allclose(numpy(v), expected, rtol=1e-6)
    assert int(inner.iterations) == 4


@pytest.mark.parametrize("mode", first_quick(MODES))
def test_a_schedule_counts_calls_as_in_keras(mode):
    """Keras: "schedules will look at real iterations". The calls that update are number 1, 3 and 5."""
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([1, 3], [1.0, 0.5, 0.25])
    inner = keras.optimizers.SGD(schedule, gradient_accumulation_steps=2)
    v = variable([0.0])
    optimizer = LossScaleOptimizer(inner, loss_scale=2.0)
    apply = applier(optimizer, [v], mode)
    for g in (8.0, 8.0, np.inf, 16.0, 4.0, 12.0):
        apply([np.array([g], "float32")])
    # Means of unscaled gradients: 4, 8 and 4.
    np.testing.assert_array_equal(numpy(v), [-(4.0 * 1.0 + 8.0 * 0.5 + 4.0 * 0.25)])


@pytest.mark.parametrize("mode", first_quick(MODES))
def test_adam_counts_updates(mode):
    """Means are clipped. The bias correction and the overwriting by the average are those of as many plain updates."""
    options = {"clipnorm": 0.5, "weight_decay": 0.25}
    options |= {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2}
    make = functools.partial(keras.optimizers.AdamW, 0.5, **options)
    plain, accumulates = make(), make(gradient_accumulation_steps=3)
    v, expected = variable(), variable()
    apply = applier(LossScaleOptimizer(accumulates, loss_scale=SCALE), [v], mode)
    grads = gradients(9)
    for g in grads:
        apply([g * SCALE])
    for start in (0, 3, 6):
        apply_bare(plain, [np.mean(grads[start : start + 3], axis=0)], [expected])
    np.testing.assert_allclose(numpy(v), numpy(expected), rtol=1e-5)


def test_a_file_of_an_optimizer_that_accumulates_by_itself_is_gone_on_with():
    stock = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=4))
    v, w, store = variable([0.0]), variable([-3.0]), {}
    stock.build([v])
    apply_each_bare(stock.inner_optimizer, (1.0, 2.0, 3.0, 6.0, 10.0, 20.0), v)
    stock.save_own_variables(store)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=4), loss_scale=2.0)
    optimizer.build([w])
    optimizer.load_own_variables(store)
    assert int(optimizer.iterations) == 1
    apply_each(optimizer, (60.0, 120.0), w)
    np.testing.assert_array_equal(numpy(w), [-33.0])
    assert int(optimizer.iterations) == 2


@pytest.mark.parametrize("numbers_alone", [False, True])
def test_a_file_of_0_1_0_is_gone_on_with(numbers_alone):
    """It built the inner optimizer without sums of its own, counted updates in it, and wrote all arrays by number."""
    old = LossScaleOptimizer(keras.optimizers.SGD(1.0), loss_scale=2.0)
    old.accumulate(3)
    v = variable([0.0])
    apply_each(old, (2.0, 4.0, 6.0, 10.0), v)
    store = {}
    if numbers_alone:
        of_this_version = {id(variable) for variable in old.step_outcome}
        values = [numpy(variable) for variable in old.variables_as_stored if id(variable) not in of_this_version]
        store = {str(i): value for i, value in enumerate(values)}
    else:
        old.save_own_variables(store)
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=3), loss_scale=2.0)
    optimizer.build([v])
    optimizer.load_own_variables(store)
    assert int(optimizer.iterations) == 1
    apply_each(optimizer, (20.0, 30.0), v)
    np.testing.assert_array_equal(numpy(v), [-2.0 - 10.0])


def test_sums_of_complex_gradients_are_complex():
    v = keras.Variable(np.array([0j], "complex64"), dtype="complex64")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), loss_scale=2.0)
    for value in (4 + 8j, 8 - 4j):
        optimizer.apply([keras.ops.convert_to_tensor(np.array([value], "complex64"))], [v])
    np.testing.assert_array_equal(numpy(v), [-(6 + 2j) / 2])


def test_accumulation_can_be_turned_off_before_the_first_step():
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=3), loss_scale=2.0)
    optimizer.gradient_accumulation_steps = None
    assert optimizer.gradient_accumulation_steps is None
    v = variable([0.0])
    apply_each(optimizer, (4.0, 4.0), v)
    np.testing.assert_array_equal(numpy(v), [-4.0])
    assert (int(optimizer.iterations), int(optimizer.accepted_steps)) == (2, 2)
    assert LossScaleOptimizer.from_config(optimizer.get_config()).gradient_accumulation_steps is None


@pytest.mark.parametrize("on_overflow", ["drop_micro", "drop_window"])
def test_the_scale_stays_at_the_end_of_a_window_without_an_update(on_overflow):
    """Losses that are not finite: no update, and no step of the rule either, growth included."""
    optimizer = accumulating(on_overflow, steps=2, rule=DynamicLossScale(SCALE, dynamic_growth_steps=2))
    optimizer.build([variable()])

    def decide(loss_is_finite):
        for v, value in optimizer.decide(StepFacts(), keras.ops.array(True), keras.ops.array(loss_is_finite))[1]:
            v.assign(value)
        return float(optimizer.loss_scale), int(optimizer.step_counter)

    assert [decide(True) for _ in range(2)] == [(SCALE, 0), (SCALE, 1)]
    assert [decide(False) for _ in range(4)] == [(SCALE, 1)] * 4
    assert [decide(True) for _ in range(2)] == [(SCALE, 1), (2 * SCALE, 0)]


@pytest.mark.backends("tensorflow")
def test_a_checkpoint_that_is_read_before_the_optimizer_is_built_fills_the_window(tmp_path):
    """Its build began a new window, and what had been summed was lost."""
    import tensorflow as tf

    def begun():
        return LossScaleOptimizer(keras.optimizers.SGD(0.5, gradient_accumulation_steps=WINDOW), initial_scale=SCALE)

    first, second = variable([5.0]), variable([5.0])
    whole = begun()
    apply_each(whole, [SCALE, 3 * SCALE], first)
    path = tf.train.Checkpoint(optimizer=whole).write(str(tmp_path / "half"))
    resumed = begun()
    tf.train.Checkpoint(optimizer=resumed).read(path)
    for optimizer, v in ((whole, first), (resumed, second)):
        apply_each(optimizer, [4 * SCALE, 8 * SCALE], v)
    assert numpy(first).tolist() == numpy(second).tolist() == [3.0]  # 5 - 0.5 * (1 + 3 + 4 + 8) / 4
    assert snapshot(whole.variables) == snapshot(resumed.variables)
