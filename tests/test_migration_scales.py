"""docs/migration.md: with the options that it names the loss scale is, step by step, that of the other library.

The libraries themselves are run; they are no dependencies of mpkeras. tests/scaling/test_scale_trajectories.py shows
that the optimizer moves its scale by the rule, on every backend.
"""

import random
import re
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.training.step import make_train_step
from tests.cases import first_quick

PAGE = (Path(__file__).parents[1] / "docs" / "migration.md").read_text()
WIDEST = {"min_scale": 2.0**-126, "max_scale": 2.0**126}
STEPS = 40
FLOAT32_MAX = float(np.finfo("float32").max)


class Scaler:
    """One scaler of another library: `after(is_finite)` makes a step and returns `(scale, count)`."""

    #: What the options of a case are called there.
    options = ()

    @classmethod
    def random_options(cls, generator):
        known = {
            "initial": 2.0 ** generator.randint(4, 20),
            "growth": generator.choice([2.0, 4.0, 1.7]),
            "backoff": generator.choice([0.5, 0.25, 0.3]),
            "interval": generator.randint(1, 5),
            "floor": 2.0 ** generator.randint(-2, 3),
            "ceiling": 2.0 ** generator.randint(21, 24),
        }
        return {name: known[name] for name in cls.options}


class TfKeras(Scaler):
    options = ("initial", "interval")

    def __init__(self, initial=2.0**15, interval=2000, dynamic=True):
        tf_keras = pytest.importorskip("tf_keras")
        import tensorflow as tf

        self.tf, self.weight = tf, tf.Variable([1.0])
        self.optimizer = tf_keras.mixed_precision.LossScaleOptimizer(
            tf_keras.optimizers.SGD(0.1),
            dynamic,
            initial_scale=initial,
            dynamic_growth_steps=interval if dynamic else None,
        )
        self.optimizer.get_scaled_loss(tf.constant(1.0))

    @staticmethod
    def mapped(initial=2.0**15, interval=2000):
        return mpkeras.DynamicLossScale(initial, dynamic_growth_steps=interval, min_scale=1.0, max_scale=2.0**126)

    def after(self, is_finite):
        grads = self.optimizer.get_unscaled_gradients([self.tf.constant([0.0 if is_finite else np.inf])])
        self.optimizer.apply_gradients(zip(grads, [self.weight], strict=True))
        # At a fixed scale there is no count.
        return float(self.optimizer.loss_scale), int(self.optimizer.dynamic_counter or 0)


class Keras3(Scaler):
    options = ("initial", "interval")

    def __init__(self, initial=2.0**15, interval=2000):
        self.weight = keras.Variable(np.ones(1, "float32"))
        self.optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial, interval)
        self.optimizer.build([self.weight])
        if keras.backend.backend() == "jax":
            import jax

            self.compiled = jax.jit(self.optimizer.stateless_apply)

    @staticmethod
    def mapped(initial=2.0**15, interval=2000):
        return mpkeras.DynamicLossScale(initial, dynamic_growth_steps=interval, **WIDEST)

    def after(self, is_finite):
        grads = [keras.ops.full((1,), 0.0 if is_finite else np.inf)]
        if keras.backend.backend() == "jax":
            # Its `apply` does not work there.
            variables = self.optimizer.variables
            _, values = self.compiled([v.value for v in variables], grads, [self.weight.value])
            for variable, value in zip(variables, values, strict=True):
                variable.assign(value)
        else:
            self.optimizer.apply(grads, [self.weight])
        return float(self.optimizer.dynamic_scale), int(self.optimizer.step_counter)


class TorchAmp(Scaler):
    options = ("initial", "growth", "backoff", "interval")

    def __init__(self, initial=2.0**16, growth=2.0, backoff=0.5, interval=2000):
        self.torch = pytest.importorskip("torch")
        self.weight = self.torch.ones(1, requires_grad=True)
        self.optimizer = self.torch.optim.SGD([self.weight], 0.1)
        self.scaler = self.torch.amp.GradScaler(
            "cpu", init_scale=initial, growth_factor=growth, backoff_factor=backoff, growth_interval=interval
        )

    @staticmethod
    def mapped(initial=2.0**16, growth=2.0, backoff=0.5, interval=2000):
        return mpkeras.DynamicLossScale(initial, growth, backoff, interval, **WIDEST)

    def after(self, is_finite):
        self.scaler.scale(self.weight.sum())
        self.weight.grad = self.torch.full((1,), 0.0 if is_finite else float("nan"))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        state = self.scaler.state_dict()
        return state["scale"], state["_growth_tracker"]


class Apex(Scaler):
    """`LossScaler.update_scale` in apex/amp/scaler.py, in words of our own: Apex does not run without a GPU."""

    options = ("floor", "ceiling")

    def __init__(self, floor=None, ceiling=2.0**24):
        self.floor, self.ceiling = floor or 0.0, ceiling
        self.scale, self.count = min(ceiling, 2.0**16), 0

    @staticmethod
    def mapped(floor=2.0**-126, ceiling=2.0**24):
        return mpkeras.DynamicLossScale(2.0**16, min_scale=floor, max_scale=ceiling)

    def after(self, is_finite):
        if not is_finite:
            self.scale, self.count = max(self.floor, self.scale / 2), 0
        else:
            self.count += 1
        if self.count == 2000:
            self.scale, self.count = min(self.ceiling, self.scale * 2), 0
        return self.scale, self.count


class Jmp(Scaler):
    options = ("initial", "growth", "interval", "floor")

    def __init__(self, initial=2.0**15, growth=2, interval=2000, floor=1.0):
        jmp = pytest.importorskip("jmp")
        import jax.numpy as jnp

        self.jnp = jnp
        self.scale = jmp.DynamicLossScale(
            jnp.float32(initial), period=interval, factor=growth, min_loss_scale=jnp.float32(floor)
        )

    @staticmethod
    def mapped(initial=2.0**15, growth=2, interval=2000, floor=1.0):
        return mpkeras.DynamicLossScale(initial, growth, 1 / growth, interval, min_scale=floor, max_scale=2.0**126)

    def after(self, is_finite):
        self.scale = self.scale.adjust(self.jnp.asarray(is_finite))
        return float(self.scale.loss_scale), int(self.scale.counter)


class Flax(Scaler):
    options = ("initial", "growth", "backoff", "interval", "floor")

    def __init__(self, initial=2.0**16, growth=2.0, backoff=0.5, interval=2000, floor=2.0**-126):
        module = pytest.importorskip("flax.training.dynamic_scale")
        import jax

        self.scale = module.DynamicScale(growth, backoff, interval, scale=initial, minimum_scale=floor)
        self.step = jax.jit(lambda scale, slope: scale.value_and_grad(lambda x: x * slope)(1.0).dynamic_scale)

    @staticmethod
    def mapped(initial=2.0**16, growth=2.0, backoff=0.5, interval=2000, floor=2.0**-126):
        return mpkeras.DynamicLossScale(initial, growth, backoff, interval + 1, floor, 2.0**126)

    def after(self, is_finite):
        self.scale = self.step(self.scale, 1.0 if is_finite else np.inf)
        return float(self.scale.scale), int(self.scale.fin_steps)


SCALERS = {
    "stock Keras 3": Keras3,
    "tf.keras": TfKeras,
    "torch.amp": TorchAmp,
    "NVIDIA Apex": Apex,
    "jmp": Jmp,
    "flax": Flax,
}


class Ours:
    def __init__(self, rule):
        self.rule, self.state = rule, rule.initial_state()

    def after(self, is_finite):
        state = self.rule.next_state(self.state, keras.ops.convert_to_tensor(is_finite))
        # NumPy scalars would be weak types, and Python's have no dtype.
        self.state = {name: keras.ops.convert_to_tensor(value) for name, value in state.items()}
        return float(self.rule.current_scale(self.state)), int(self.state["step_counter"])


@pytest.fixture(autouse=True)
def their_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", SCALERS)
def test_the_scale_moves_as_theirs(name, seed):
    generator = random.Random(f"{name} {seed}")
    options = SCALERS[name].random_options(generator)
    theirs, ours = SCALERS[name](**options), Ours(SCALERS[name].mapped(**options))
    # Powers of two are exact. Otherwise the libraries round a factor, or its reciprocal, in different places.
    exact = all(options.get(factor, 2.0) in (0.25, 0.5, 2.0, 4.0) for factor in ("growth", "backoff"))
    for step in range(STEPS):
        is_finite = generator.random() < 0.8
        found, expected = ours.after(is_finite), theirs.after(is_finite)
        assert found[1] == expected[1], (options, step)
        assert found[0] == (expected[0] if exact else pytest.approx(expected[0], rel=1e-5)), (options, step)


@pytest.mark.parametrize("name", first_quick(SCALERS))
def test_the_rule_of_the_page_is_theirs_with_their_defaults(name):
    code = re.search(rf"^\| {re.escape(name)} \| `(.*?)` \|$", PAGE, flags=re.MULTILINE)[1]
    assert eval(code, {"mpkeras": mpkeras}) == SCALERS[name].mapped()
    theirs, ours = SCALERS[name](), Ours(SCALERS[name].mapped())
    for is_finite in (True, True, False, True):
        assert ours.after(is_finite) == theirs.after(is_finite)


@pytest.mark.parametrize("name", first_quick(SCALERS))
def test_a_running_scale_is_taken_over(name):
    """Its scale and its count go into `dynamic_scale` and `step_counter`."""
    options = {"interval": 3} if "interval" in SCALERS[name].options else {}
    theirs = SCALERS[name](**options)
    for is_finite in (True, False, True):
        scale, count = theirs.after(is_finite)
    optimizer = mpkeras.LossScaleOptimizer("sgd", loss_scale=SCALERS[name].mapped(**options))
    weight = keras.Variable(np.ones(1, "float32"))
    optimizer.build([weight])
    optimizer.dynamic_scale.assign(scale)
    optimizer.step_counter.assign(count)
    for is_finite in (True, True, True, True, False):
        optimizer.scale_loss(1.0)
        optimizer.apply([keras.ops.full((1,), 0.0 if is_finite else np.inf)], [weight])
        assert (float(optimizer.loss_scale), int(optimizer.step_counter)) == theirs.after(is_finite)


# --------------------------------------------------------------------- what the page says is different


@pytest.mark.parametrize(
    ("name", "options", "lowest", "highest"),
    first_quick(
        [
            ("stock Keras 3", {}, 0.0, np.inf),
            ("torch.amp", {}, 0.0, 2.0**127),
            ("flax", {"floor": None}, 0.0, FLOAT32_MAX),
            ("flax", {}, 2.0**-126, FLOAT32_MAX),
            ("tf.keras", {}, 1.0, 2.0**127),
            ("jmp", {}, 1.0, 2.0**127),
        ]
    ),
)
def test_their_bounds(name, options, lowest, highest):
    down, up = SCALERS[name](initial=1024.0, **options), SCALERS[name](initial=2.0**120, interval=1, **options)
    assert [down.after(False) for _ in range(170)][-1][0] == lowest
    assert [up.after(True) for _ in range(20)][-1][0] == highest


def test_our_bounds():
    """By default the floor is far below what a training needs; until 0.1 it was 1."""
    down = Ours(mpkeras.DynamicLossScale(1024.0))
    up = Ours(mpkeras.DynamicLossScale(2.0**20, dynamic_growth_steps=1))
    assert [down.after(False) for _ in range(40)][-1][0] == 2.0**-24
    assert [up.after(True) for _ in range(20)][-1][0] == 2.0**24


def test_jmp_forgets_its_floor_in_jit():
    jax = pytest.importorskip("jax")
    theirs = Jmp(initial=1.0, floor=0.25)
    halved = jax.jit(lambda scale: scale.adjust(jax.numpy.asarray(False)))(theirs.scale)
    assert float(halved.loss_scale) == 1.0
    assert theirs.after(False) == (0.5, 0)
    assert Ours(Jmp.mapped(initial=1.0, floor=0.25)).after(False) == (0.5, 0)


def test_flax_grows_on_the_step_after_its_interval():
    theirs = Flax(initial=8.0, interval=2)
    assert [theirs.after(True) for _ in range(4)] == [(8.0, 1), (8.0, 2), (16.0, 0), (16.0, 1)]


@pytest.mark.backends("torch")
def test_a_loss_that_is_not_finite_moves_their_scale_and_not_ours():
    assert TorchAmp(initial=8.0).after(False) == (4.0, 0)
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    optimizer = mpkeras.LossScaleOptimizer("sgd", initial_scale=8.0)
    step = make_train_step(model, optimizer, "mse", jit_compile=False)
    result = step(np.ones((1, 1), "float32"), np.full((1, 1), np.inf, "float32"))
    assert (float(result["loss_scale"]), bool(result["skipped"])) == (8.0, True)


@pytest.mark.backends("jax")
def test_on_jax_apply_of_stock_keras_does_not_work_and_ours_does():
    from jax.errors import UnexpectedTracerError

    weight = keras.Variable(np.ones(1, "float32"))
    theirs = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), 8.0)
    ours = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.5), 8.0)
    with pytest.raises(UnexpectedTracerError):
        theirs.apply([keras.ops.full((1,), 8.0)], [weight])
        float(theirs.dynamic_scale)
    weight.assign(np.ones(1, "float32"))
    ours.scale_loss(1.0)
    ours.apply([keras.ops.full((1,), 8.0)], [weight])
    assert keras.ops.convert_to_numpy(weight).tolist() == [0.5]


def test_tf_keras_counts_skipped_steps_and_applies_whatever_comes_at_a_fixed_scale():
    theirs = TfKeras()
    theirs.after(True), theirs.after(False)
    assert int(theirs.optimizer.iterations) == 2
    fixed = TfKeras(initial=8.0, dynamic=False)
    fixed.after(False)
    assert not np.isfinite(fixed.weight.numpy()).any()
    for options in ({}, {"dynamic": False, "initial_scale": 8.0}):
        ours, weight = mpkeras.LossScaleOptimizer("sgd", **options), keras.Variable(np.ones(1, "float32"))
        for slope in (0.0, np.inf):
            ours.scale_loss(1.0)
            ours.apply([keras.ops.full((1,), slope)], [weight])
        assert (int(ours.iterations), int(ours.skipped_steps)) == (1, 1)
        assert keras.ops.convert_to_numpy(weight).tolist() == [1.0]
