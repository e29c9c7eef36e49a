"""`autoprepare`: programs of stock Keras, prepared at every `compile`; nothing is left of it afterwards."""

import sys

import keras
import numpy as np
import pytest
from keras import layers

import mpkeras
from mpkeras.policies.loss_scaling import DynamicLossScale, FixedLossScale
from mpkeras.scaling.optimizer import LossScaleOptimizer
from mpkeras.training import guard
from tests.cases import first_quick

X, Y = np.full((4, 6), 0.1, "float32"), np.full((4, 1), 0.1, "float32")


def small():
    return keras.Sequential([keras.Input((6,)), layers.Dense(3), layers.Dense(1)])


def compiled(**options):
    model = small()
    model.compile("sgd", "mse", **options)
    return model


class Gan(keras.Model):
    """Its optimizers are there only after `super().compile()`."""

    def __init__(self):
        super().__init__()
        self.generator, self.discriminator = small(), small()

    def compile(self, d_optimizer, g_optimizer, fails=False):
        super().compile()
        self.d_optimizer = d_optimizer
        self.dtype_in_compile = self.generator.layers[0].compute_dtype
        if fails:
            raise RuntimeError("no second optimizer")
        self.g_optimizer = g_optimizer


class CompilesTwice:
    """A class that is no model, with which models are mixed."""

    def compile(self, *args, **kwargs):
        super().compile("adam", "mse")
        super().compile(*args, **kwargs)


class Mixed(CompilesTwice, keras.Sequential):
    pass


def picture():
    """Every attribute of every class of Keras' models and of the tests', by identity."""
    classes = [Gan, Mixed, CompilesTwice, *keras.Model.__mro__, *keras.Model.__subclasses__()]
    for name, module in list(sys.modules.items()):
        if name.startswith("keras."):
            classes += [value for value in vars(module).values() if isinstance(value, type)]
    return {
        (cls, name): id(value) for cls in set(classes) for name, value in list(vars(cls).items()) if name != "__doc__"
    }


@pytest.fixture(autouse=True)
def nothing_is_left():
    compile = keras.Model.compile
    yield
    mpkeras.set_global_policy(None)
    assert keras.Model.compile is compile


@pytest.mark.parametrize("policy", first_quick(["mixed_float16", "mixed_bfloat16"]))
def test_every_compile_is_followed_by_prepare_until_the_block_ends(policy):
    with mpkeras.autoprepare(policy):
        model = compiled(run_eagerly=True)
        assert [layer.compute_dtype for layer in model.layers] == [policy.removeprefix("mixed_"), "float32"]
        assert isinstance(model.optimizer, LossScaleOptimizer)
        assert guard.is_guarded(model)
        history = model.fit(X, Y, verbose=0).history
        assert set(history) == {"loss", "loss_scale", "skipped_steps"}
        # A model without an optimizer is left alone.
        without = small()
        without.compile(optimizer=None, loss="mse")
        assert without.layers[0].compute_dtype == "float32" and "train_step" not in vars(without)
    after = compiled()
    assert isinstance(after.optimizer, keras.optimizers.SGD)
    assert after.layers[0].compute_dtype == "float32"
    # What was prepared stays prepared.
    model.compile("adam", "mse")
    assert isinstance(model.optimizer, LossScaleOptimizer)


def test_a_model_that_was_prepared_by_hand_keeps_what_it_was_prepared_with():
    by_hand = compiled()
    mpkeras.prepare(by_hand, "mixed_float16", loss_scale=DynamicLossScale(64.0))
    converted = mpkeras.apply_policy(compiled(), "mixed_bfloat16")
    with mpkeras.autoprepare("mixed_float16"):
        # By the dtype that its layers have by then.
        mpkeras.prepare(converted, loss_scale=2.0, rollback=False)
        converted.compile("adam", "mse")
    assert converted.layers[0].compute_dtype == "bfloat16"
    assert converted.optimizer.loss_scale_rule == FixedLossScale(2.0)
    assert not guard.guard_of(converted).rollback
    with mpkeras.autoprepare("mixed_bfloat16"):
        by_hand.compile("adam", "mse")
        automatic = compiled()
    assert by_hand.layers[0].compute_dtype == "float16"
    assert by_hand.optimizer.loss_scale_rule == DynamicLossScale(64.0)
    # A model that was not prepared by hand is prepared anew.
    with mpkeras.autoprepare("mixed_float16"):
        automatic.compile("adam", "mse")
    assert automatic.layers[0].compute_dtype == "float16"


def test_the_global_policy_is_the_default():
    with mpkeras.autoprepare(), mpkeras.policy_scope(mpkeras.Policy("mixed_float16", loss_scale=32.0)):
        model = compiled()
    assert model.layers[0].compute_dtype == "float16"
    assert model.optimizer.loss_scale_rule == FixedLossScale(32.0)


@pytest.mark.parametrize("door", [mpkeras.autoprepare, mpkeras.policy_scope])
def test_a_compile_of_ones_own_is_prepared_when_it_is_done(door):
    with door("mixed_float16"):
        gan = Gan()
        gan.compile(keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.1))
    assert gan.dtype_in_compile == ("float32" if door is mpkeras.autoprepare else "float16")
    for part in (gan.generator, gan.discriminator):
        assert [layer.compute_dtype for layer in part.layers] == ["float16", "float32"]
    assert [type(o) for o in (gan.optimizer, gan.d_optimizer, gan.g_optimizer)] == [LossScaleOptimizer] * 3


def test_classes_defined_later_and_mixed_with_others_are_found():
    with mpkeras.autoprepare("mixed_bfloat16"):

        class Later(Gan):
            def compile(self, optimizer):
                super().compile(optimizer, keras.optimizers.Adam(0.1))
                self.extra = keras.optimizers.SGD(0.5)

        later = Later()
        later.compile(keras.optimizers.SGD(0.1))
        assert isinstance(later.extra, LossScaleOptimizer)
        mixed = Mixed([layers.Dense(1)])
        mixed.compile("sgd", "mse")
        assert isinstance(mixed.optimizer, LossScaleOptimizer)
        assert isinstance(mixed.optimizer.inner_optimizer, keras.optimizers.SGD)
    later = Later()
    later.compile(keras.optimizers.SGD(0.1))
    assert isinstance(later.extra, keras.optimizers.SGD)


def test_all_classes_are_as_before_also_after_an_error():
    class Defined(keras.Model):
        def compile(self, **options):
            super().compile(**options)

    before = picture()
    own = dict(vars(Defined))
    gan, optimizers = Gan(), (keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.1))
    with mpkeras.autoprepare("mixed_float16"):
        assert vars(Defined) != own
        with pytest.raises(RuntimeError, match="no second optimizer"):
            gan.compile(*optimizers, fails=True)
        assert isinstance(gan.d_optimizer, keras.optimizers.SGD)
        # Called again, it is followed by `prepare`.
        gan.compile(*optimizers)
    assert isinstance(gan.d_optimizer, LossScaleOptimizer)
    with pytest.raises(RuntimeError, match="no second optimizer"), mpkeras.autoprepare("mixed_float16"):
        gan.compile(*optimizers, fails=True)
    assert picture() == before
    assert dict(vars(Defined)) == own


def test_the_innermost_decides_and_each_is_undone_once():
    before = picture()
    outer = mpkeras.autoprepare("mixed_float16")
    with mpkeras.autoprepare("mixed_bfloat16") as inner:
        assert compiled().layers[0].compute_dtype == "bfloat16"
    inner.undo()
    assert compiled().layers[0].compute_dtype == "float16"
    with inner:
        assert compiled().layers[0].compute_dtype == "bfloat16"
        outer.undo()
        outer.undo()
        assert compiled().layers[0].compute_dtype == "bfloat16"
    assert picture() == before


def test_repr_says_what_is_covered():
    automatic = mpkeras.autoprepare("mixed_float16")
    try:
        text = repr(automatic)
        assert text.startswith("<mpkeras.autoprepare: 'mixed_float16'; covers ")
        for covered in ("Trainer.compile", "Model.__init_subclass__", "test_autoprepare.Gan.compile"):
            assert covered in text
        with mpkeras.autoprepare() as inner:
            assert "the global policy" in repr(inner)
    finally:
        automatic.undo()
    assert repr(automatic) == "<mpkeras.autoprepare: undone>"


def test_what_the_user_put_there_since_stays():
    class Own(keras.Model):
        def compile(self, **options):
            super().compile(**options)

    def mine(self):
        return "mine"

    with mpkeras.autoprepare("mixed_float16"):
        Own.compile = mine
    assert Own.compile is mine


def test_a_loaded_model_is_prepared_and_has_its_optimizer_state(tmp_path):
    model = small()
    model.compile(keras.optimizers.Adam(0.01), "mse", run_eagerly=True)
    model.train_on_batch(X, Y)
    model.save(tmp_path / "model.keras")
    with mpkeras.autoprepare("mixed_float16"):
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.optimizer, LossScaleOptimizer)
    assert loaded.layers[0].compute_dtype == "float16"
    assert int(loaded.optimizer.iterations) == 1
    for new, old in zip(loaded.optimizer.inner_optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(new.numpy(), old.numpy())


def test_a_clone_is_prepared_when_it_is_compiled():
    keras.config.set_dtype_policy("mixed_float16")
    model = compiled()
    with mpkeras.autoprepare():
        clone = keras.models.clone_model(model)
        assert isinstance(clone.optimizer, LossScaleOptimizer)
        clone.compile("adam", "mse")
        assert guard.is_guarded(clone)
