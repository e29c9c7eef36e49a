"""Optimizers on bfloat16 weights and slots, against the same optimizers in float32."""

import itertools

import keras
import ml_dtypes
import numpy as np
import pytest

import mpkeras
from mpkeras import LossScaleOptimizer
from mpkeras._keras import copies_of_weights, stored_dtype, weight_averages
from mpkeras.scaling.small_state import Rounding
from tests.cases import first_quick
from tests.step_modes import MODES, applier, snapshot

pytestmark = pytest.mark.filterwarnings("ignore:.*the loss was not scaled since the last step")
STEPS, COUNT, STEP_OF_BFLOAT16 = 24, 4096, 2.0**-7


@keras.saving.register_keras_serializable("tests")
class SignDescent(keras.optimizers.Optimizer):
    """An optimizer of a user's own, written as a user would: it assigns to variables itself, and casts nothing."""

    def __init__(self, learning_rate=0.1, name="sign_descent", **kwargs):
        super().__init__(learning_rate=learning_rate, name=name, **kwargs)

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.means = self.add_optimizer_variables(variables, "mean")

    def update_step(self, gradient, variable, learning_rate):
        mean = self.means[self._get_variable_index(variable)]
        mean.assign(0.9 * mean + 0.1 * gradient)
        variable.assign(variable - learning_rate * keras.ops.sign(mean))


class SlowCopy(keras.optimizers.Optimizer):
    """A user's own around another optimizer: every second step the weights go back half of the way that they went."""

    def __init__(self, optimizer, name="slow_copy", **kwargs):
        super().__init__(learning_rate=0.0, name=name, **kwargs)
        self.fast = optimizer

    def build(self, variables):
        if self.built:
            return
        super().build(variables)
        self.fast.build(variables)
        self.slow = self.add_optimizer_variables(variables, "slow", initializer="ones")

    @property
    def variables(self):
        return [*self._variables, *self.fast.variables]

    def apply(self, grads, trainable_variables=None):
        variables = self._trainable_variables if trainable_variables is None else list(trainable_variables)
        self.build(variables)
        self.fast.apply(grads, variables)
        is_due = keras.ops.equal(keras.ops.mod(self.iterations, 2), 1)
        for variable, slow in zip(variables, self.slow, strict=True):
            middle = 0.5 * (keras.ops.convert_to_tensor(variable) + keras.ops.convert_to_tensor(slow))
            for target in (variable, slow):
                target.assign(keras.ops.where(is_due, middle, keras.ops.convert_to_tensor(target)))
        self.iterations.assign_add(1)


class Counting(keras.optimizers.SGD):
    """A user's own that counts its updates in an array, from a number on that bfloat16 does not hold."""

    def __init__(self, *args, size, **kwargs):
        super().__init__(*args, **kwargs)
        self.size = size

    def build(self, variables):
        super().build(variables)
        initializer = keras.initializers.Constant(301.0)
        self.counts = self.add_variable((self.size,), initializer, dtype="float32", name="counts")

    def apply(self, grads, trainable_variables=None):
        super().apply(grads, trainable_variables)
        self.counts.assign_add(np.ones(self.size, "float32"))


@pytest.mark.parametrize("size", [1, 5])
def test_counters_in_an_array_count_on(size):
    """In bfloat16 a count of 301 is 300 or 302. No weight has the shape of the array."""
    optimizer = LossScaleOptimizer(Counting(0.1, momentum=0.9, size=size), loss_scale=1.0, slot_dtype="bfloat16")
    variable = keras.Variable([1.0, 2.0])
    for _ in range(2):
        optimizer.apply([keras.ops.ones(2)], [variable])
    np.testing.assert_array_equal(keras.ops.convert_to_numpy(optimizer.inner_optimizer.counts), [303.0] * size)
    assert stored_dtype(optimizer.inner_optimizer.momentums[0]) == "bfloat16"


def test_two_assignments_of_one_update_are_rounded_by_other_draws():
    """Weight decay and the update: by the same draw both would go up, or both down, and the mean would be off."""
    variable = keras.Variable(np.ones(COUNT), dtype="bfloat16")
    step_count = keras.Variable(3, dtype="int32", trainable=False)
    rounding = Rounding([variable], step_count)
    halfway = np.full(COUNT, 1.0 + STEP_OF_BFLOAT16 / 2, "float32")

    def goes_up(rounding):
        return keras.ops.convert_to_numpy(keras.ops.cast(rounding.rounded(variable, halfway), "float32")) > 1.0

    ups = [goes_up(rounding) for _ in range(3)]
    # Of independent draws half agree: 2048 +- 32 of 4096.
    for first, second in itertools.combinations(ups, 2):
        assert abs(int((first == second).sum()) - COUNT // 2) < 6 * 32
    # The next step begins anew with the same number of draws.
    other_step = Rounding([variable], keras.Variable(4, dtype="int32", trainable=False))
    assert abs(int(goes_up(other_step).sum()) - COUNT // 2) < 6 * 32


def multi_optimizer():
    """Two optimizers, one for each of two weights."""
    parts = {".*kernel.*": keras.optimizers.Adam(1e-3)}
    sgd = keras.optimizers.SGD(1e-3, momentum=0.5)
    return keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(sgd, parts))


# Learning rates that move a weight near 1 by a fraction of the distance to the next bfloat16 number a step.
OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(1e-3),
    "momentum": lambda: keras.optimizers.SGD(1e-4, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(1e-3),
    "amsgrad": lambda: keras.optimizers.Adam(1e-3, amsgrad=True),
    "AdamW": lambda: keras.optimizers.AdamW(1e-3, weight_decay=0.5),
    "Nadam": lambda: keras.optimizers.Nadam(1e-3),
    "Adamax": lambda: keras.optimizers.Adamax(1e-3),
    "Adagrad": lambda: keras.optimizers.Adagrad(3e-3),
    "Adadelta": lambda: keras.optimizers.Adadelta(0.1, epsilon=1e-5),
    "RMSprop": lambda: keras.optimizers.RMSprop(2e-4, momentum=0.5, centered=True),
    "Adafactor": lambda: keras.optimizers.Adafactor(1e-3),
    "Lamb": lambda: keras.optimizers.Lamb(1e-3),
    "Lion": lambda: keras.optimizers.Lion(1e-3),
    "Ftrl": lambda: keras.optimizers.Ftrl(1e-2, beta=1.0),
    "Muon": lambda: keras.optimizers.Muon(2e-2),
    "ScheduleFreeAdamW": lambda: keras.optimizers.ScheduleFreeAdamW(1e-3),
    "MultiOptimizer": multi_optimizer,
    "a user's own": lambda: SignDescent(1e-3),
    "a user's own around another": lambda: SlowCopy(keras.optimizers.Adam(2e-3)),
}
# Later versions of Keras have more of them.
for later in ("Muon", "ScheduleFreeAdamW", "MultiOptimizer"):
    if not hasattr(keras.optimizers, later):
        del OPTIMIZERS[later]


def weights(dtype, value=1.0, shape=(COUNT // 64, 64), names=("kernel",)):
    return [keras.Variable(np.full(shape, value, "float32"), dtype=dtype, name=name) for name in names]


def float32(variable):
    return np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(variable.value, "float32")))


def trained(make, dtype, slot_dtype, mode="eager", steps=STEPS, faults=(), **options):
    """Returns the variables and the optimizer after `steps` with gradients near 0.5, scaled by 8 as the loss."""
    variables = weights(dtype, names=("kernel", "head") if make is multi_optimizer else ("kernel",))
    optimizer = LossScaleOptimizer(make(), loss_scale=8.0, slot_dtype=slot_dtype, **options)
    step = applier(optimizer, variables, mode)
    rng = np.random.default_rng(5)
    for number in range(steps):
        grads = [(0.5 + 0.1 * rng.standard_normal(v.shape)).astype("float32") for v in variables]
        if number in faults:
            bad = [np.full_like(grad, 0.25) for grad in grads]
            bad[-1][3, 1] = np.inf
            step([grad * 8 for grad in bad])
        step([grad * 8 for grad in grads])
    return variables, optimizer


def slots_of(optimizer):
    return [v for v in optimizer.inner_optimizer.variables if len(v.shape) > 0]


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moves_as_in_float32(name):
    """Single steps are too small for bfloat16: to the nearest nothing would move, or everything too far."""
    make = OPTIMIZERS[name]
    references, _ = trained(make, "float32", None)
    small, optimizer = trained(make, "bfloat16", None)
    kept, with_small_slots = trained(make, "float32", "bfloat16")
    assert {stored_dtype(v) for v in small} == {"bfloat16"} and {stored_dtype(v) for v in kept} == {"float32"}
    copies = copies_of_weights(with_small_slots.inner_optimizer)
    assert {stored_dtype(v) for v in copies} <= {"float32"}
    small_slots = [v for v in slots_of(with_small_slots) if not any(v is copy for copy in copies)]
    assert all(stored_dtype(v) == "bfloat16" for v in slots_of(optimizer) + small_slots)
    for reference, of_small, of_kept in zip(references, small, kept, strict=True):
        moved = float32(reference).mean() - 1
        # (Ftrl makes the weights anew from its sums, in one step.)
        assert 0.3 * STEP_OF_BFLOAT16 < abs(moved) and (name == "Ftrl" or abs(moved) < 6 * STEP_OF_BFLOAT16)
        # The rounding of each element is a random walk of steps below 2**-7; the mean of 4096 of them is known to 1/64.
        tolerance = 3 * STEP_OF_BFLOAT16 * np.sqrt(STEPS) / np.sqrt(COUNT) / 2 + 0.03 * abs(moved)
        assert abs(float32(of_small).mean() - 1 - moved) < tolerance
        assert abs(float32(of_kept).mean() - 1 - moved) < tolerance


@pytest.mark.skipif("ScheduleFreeAdamW" not in OPTIMIZERS, reason="Keras 3.15 has it")
def test_weights_that_an_optimizer_makes_of_a_copy_are_not_rounded_as_small_slots_are():
    """A step of 3e-5 is a hundredth of one of bfloat16 at 0.7. Each weight moves by it, as in float32."""
    moved = []
    for slot_dtype in (None, "bfloat16"):
        variables = weights("float32", 0.7)
        optimizer = LossScaleOptimizer(keras.optimizers.ScheduleFreeAdamW(3e-5), loss_scale=1.0, slot_dtype=slot_dtype)
        for _ in range(5):
            optimizer.apply([keras.ops.full(variables[0].shape, 0.5)], variables)
        moved.append(float32(variables[0]) - np.float32(0.7))
    assert moved[0].max() < -1e-5
    np.testing.assert_allclose(moved[1], moved[0], rtol=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtypes", [("bfloat16", None), ("float32", "bfloat16"), ("bfloat16", "float32")], ids=str)
@pytest.mark.parametrize(
    "name",
    ["AdamW", "Nadam", "Muon", "ScheduleFreeAdamW", "MultiOptimizer", "a user's own", "a user's own around another"],
)
def test_a_skipped_step_leaves_no_trace(name, dtypes, mode):
    if name not in OPTIMIZERS:
        pytest.skip("not in this Keras")
    runs = [trained(OPTIMIZERS[name], *dtypes, mode=mode, steps=4, faults=faults) for faults in ((), (0, 2))]
    (clean, clean_optimizer), (variables, optimizer) = runs
    assert int(optimizer.skipped_steps) == 2
    states = [snapshot(v + o.inner_optimizer.variables) for v, o in runs]
    assert states[0] == states[1]
    assert snapshot(clean)[:1] != snapshot(weights(dtypes[0]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Adam", "AdamW", "momentum", "Muon", "a user's own"])
def test_the_same_bits_in_every_mode(name):
    """To float32's last bit: small weights show it where it decides a rounding, in one of some 60,000."""
    results = []
    for mode in MODES:
        variables, optimizer = trained(OPTIMIZERS[name], "bfloat16", None, mode=mode, steps=3)
        results.append(np.concatenate([float32(v).ravel() for v in variables + slots_of(optimizer)]))
    for other in results[1:]:
        assert np.mean(results[0] != other) < 1e-3


def test_one_step_of_adam_by_hand():
    """Each new value is one of the two bfloat16 neighbours of what float64 says of the stored values."""
    variables, optimizer = trained(
        lambda: keras.optimizers.Adam(2e-3, beta_1=0.8, beta_2=0.95), "bfloat16", None, steps=1
    )
    grad = 0.5 + 0.1 * np.random.default_rng(5).standard_normal((COUNT // 64, 64)).astype("float32")
    m, v = slots_of(optimizer)

    def is_neighbour(found, exact):
        below = np.asarray(exact, np.float32).view(np.uint32) & 0xFFFF0000
        neighbours = [bits.view(np.float32) for bits in (below, below + 0x10000)]
        # Where float32's own rounding crosses a bfloat16 number.
        return np.isclose(found, neighbours[0], rtol=1e-6) | np.isclose(found, neighbours[1], rtol=1e-6)

    assert is_neighbour(float32(m), 0.2 * grad.astype(np.float64)).all()
    assert is_neighbour(float32(v), 0.05 * grad.astype(np.float64) ** 2).all()
    stored_m, stored_v = float32(m).astype(np.float64), float32(v).astype(np.float64)
    alpha = 2e-3 * np.sqrt(1 - 0.95) / (1 - 0.8)
    assert is_neighbour(float32(variables[0]), 1 - alpha * stored_m / (np.sqrt(stored_v) + 1e-7)).all()
    assert len(np.unique(float32(variables[0]))) > 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_averages_sums_and_single_numbers_stay_float32(mode):
    def make():
        return keras.optimizers.Nadam(1e-3, use_ema=True, ema_momentum=0.75, gradient_accumulation_steps=2)

    (reference,), in_float32 = trained(make, "float32", None, mode=mode, steps=8)
    (small,), optimizer = trained(make, "bfloat16", None, mode=mode, steps=8)
    (average,), (reference_average,) = (weight_averages(o.inner_optimizer) for o in (optimizer, in_float32))
    assert stored_dtype(average) == "float32"
    assert [stored_dtype(total) for total in optimizer.window.sums] == ["float32"]
    floats = [v for v in optimizer.inner_optimizer.variables if "float" in stored_dtype(v) and len(v.shape) == 0]
    assert len(floats) >= 1 and all(stored_dtype(v) == "float32" for v in floats)
    assert int(optimizer.inner_optimizer.iterations) == 4
    moved = float32(reference_average).mean() - 1
    assert abs(moved) > 1e-3 and abs(float32(average).mean() - 1 - moved) < 0.1 * abs(moved)


@pytest.mark.parametrize("frequency", first_quick([None, 3]))
def test_at_the_end_small_weights_become_their_float32_averages(frequency):
    def make():
        return keras.optimizers.SGD(1e-2, use_ema=True, ema_momentum=0.75, ema_overwrite_frequency=frequency)

    (weight,), optimizer = trained(make, "bfloat16", None, steps=4)
    (average,) = weight_averages(optimizer.inner_optimizer)
    optimizer.finalize_variable_values([weight])
    expected = float32(average).astype(ml_dtypes.bfloat16).astype("float32")
    np.testing.assert_array_equal(float32(weight), expected)
    assert len(np.unique(expected)) > 1 and stored_dtype(weight) == "bfloat16"


@pytest.mark.parametrize("mode", first_quick(MODES))
def test_clipping_decay_and_constraints_are_computed_in_float32(mode):
    def run(dtype):
        variables = weights(dtype, 2.0)
        variables[0].constraint = keras.constraints.MaxNorm(12.0, axis=0)
        schedule = keras.optimizers.schedules.ExponentialDecay(0.02, 2, 0.5)
        optimizer = LossScaleOptimizer(keras.optimizers.SGD(schedule, weight_decay=0.05, global_clipnorm=3.0))
        step = applier(optimizer, variables, mode)
        for number in range(6):
            grad = np.full(variables[0].shape, 40.0 + number, "float32") * 2.0**15
            step([keras.ops.convert_to_numpy(keras.ops.cast(grad, "float32"))])
        return float32(variables[0])

    reference, small = run("float32"), run("bfloat16")
    assert np.allclose(np.linalg.norm(reference, axis=0), 12.0, rtol=1e-2) and reference.mean() < 1.6
    assert abs(small.mean() - reference.mean()) < 2.0**-8


def test_bfloat16_gradients_give_what_their_float32_values_give():
    results = []
    for dtype in ("bfloat16", "float32"):
        variables = weights("bfloat16")
        optimizer = LossScaleOptimizer(keras.optimizers.Adam(1e-3, clipnorm=0.5), loss_scale=None)
        optimizer.build(variables)
        for number in range(3):
            grad = np.random.default_rng(number).standard_normal(variables[0].shape).astype("float32")
            grad = keras.ops.cast(keras.ops.cast(grad, "bfloat16"), dtype)
            optimizer.apply([grad], variables)
        results.append(snapshot(variables + optimizer.inner_optimizer.variables))
    assert results[0] == results[1]


def test_a_built_optimizer_is_converted_with_its_state():
    variables, optimizer = trained(OPTIMIZERS["Adam"], "float32", None, steps=3)
    before = [float32(v) for v in slots_of(optimizer)]
    optimizer.slot_dtype = "bfloat16"
    assert all(stored_dtype(v) == "bfloat16" for v in slots_of(optimizer))
    for old, slot in zip(before, slots_of(optimizer), strict=True):
        np.testing.assert_allclose(float32(slot), old, rtol=2.0**-8)  # to the nearest of 8 bits
    optimizer.apply([keras.ops.full(variables[0].shape, 4.0)], variables)
    assert int(optimizer.inner_optimizer.iterations) == 4
    optimizer.slot_dtype = "float32"
    assert all(stored_dtype(v) == "float32" for v in slots_of(optimizer))


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize("slot_dtype", [None, "bfloat16"])
def test_an_optimizer_that_assigns_native_variables_leaves_no_trace_under_xla(slot_dtype):
    class Native(keras.optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(gradient, variable, learning_rate)
            native = variable.value if isinstance(variable, keras.Variable) else variable
            native.assign_sub(0.25 * keras.ops.cast(gradient, native.dtype))

    variables = weights("float32")
    optimizer = LossScaleOptimizer(Native(1e-3, momentum=0.5), loss_scale=8.0, slot_dtype=slot_dtype)
    step = applier(optimizer, variables, "xla")
    states = []
    for value in (np.inf, 4.0, np.nan, 4.0):
        step([np.full(variables[0].shape, value, "float32")])
        states.append(snapshot(variables + optimizer.inner_optimizer.variables))
    assert states[0][:1] == snapshot(weights("float32"))
    assert states[0] != states[1] == states[2] != states[3]
    assert int(optimizer.skipped_steps) == 2


@pytest.mark.backends("tensorflow", "jax")
@pytest.mark.parametrize("mode", first_quick([mode for mode in MODES if mode != "graph"]))
def test_sparse_gradients(mode):
    """Of an embedding: rows without a gradient stay as they are, bit for bit."""
    rows, shape = np.array([1, 3], np.int32), (64, 256)
    table = keras.Variable(np.ones(shape, "float32"), dtype="bfloat16", name="embeddings")
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(1e-3), loss_scale=4.0)
    optimizer.build([table])
    values = np.full((2, 256), 0.5, "float32") * 4
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        def apply():
            optimizer.apply([tf.IndexedSlices(tf.constant(values), tf.constant(rows), shape)], [table])

        apply = tf.function(apply, jit_compile=True) if mode == "xla" else apply
    else:
        from jax.experimental import sparse

        def apply():
            optimizer.apply([sparse.BCOO((values, rows[:, None]), shape=shape)], [table])

    for _ in range(20):
        apply()
    small = float32(table)
    assert (small[[0, 2, 4]] == 1).all()
    # 20 times 1e-3 * 0.5 is taken away, 1/16 of what bfloat16 holds below 1 each time.
    assert abs(small[rows].mean() - 0.99) < 1e-3 and len(np.unique(small[rows])) > 1


@pytest.mark.parametrize("mode", first_quick(MODES))
def test_no_value_of_16_bit_gradients_escapes_the_check(mode):
    """Also where the check goes over them in groups: those that divide a shape, and those that do not."""
    shapes = [(), (31,), (37,), (34, 6), (3, 3, 5, 7)]
    variables = [keras.Variable(np.ones(shape), dtype="bfloat16") for shape in shapes]
    optimizer = LossScaleOptimizer(keras.optimizers.SGD(0.5), loss_scale=4.0)
    apply = applier(optimizer, variables, mode)
    rng = np.random.default_rng(3)
    before = snapshot(variables)
    for i, shape in enumerate(shapes):
        count = int(np.prod(shape))
        for position in sorted({0, count - 1, *rng.integers(count, size=4).tolist()}):
            values = [np.full(shape, 1.0, ml_dtypes.bfloat16) for shape in shapes]
            values[i].reshape(-1)[position] = [np.inf, -np.inf, np.nan][position % 3]
            apply(values)
            assert snapshot(variables) == before, (shape, position)
    apply([np.full(shape, -1.0, ml_dtypes.bfloat16) for shape in shapes])
    assert all((float32(variable) == 1.125).all() for variable in variables)


def test_configuration_and_errors():
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(), slot_dtype="bfloat16")
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))
    assert (optimizer.slot_dtype, again.slot_dtype) == ("bfloat16", "bfloat16")
    assert LossScaleOptimizer(keras.optimizers.Adam()).slot_dtype == "auto"
    with pytest.raises(ValueError, match="slot_dtype='float16'. Use 'bfloat16'"):
        LossScaleOptimizer(keras.optimizers.Adam(), slot_dtype="float16")
    with pytest.raises(ValueError, match="slot_dtype='half'"):
        mpkeras.Policy("mixed_bfloat16", slot_dtype="half")


@pytest.mark.skipif("MultiOptimizer" not in OPTIMIZERS, reason="not in this Keras")
def test_a_part_of_a_multi_optimizer_does_not_accumulate():
    part = keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)
    multi = keras.optimizers.MultiOptimizer(keras.optimizers.OptimizerMap(part))
    with pytest.raises(ValueError, match=r"gradient_accumulation_steps=3\. Make it without"):
        LossScaleOptimizer(multi).build(weights("float32"))
