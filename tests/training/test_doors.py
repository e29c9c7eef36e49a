"""A prepared model stays prepared, and says in `fit` what the callback says."""

import gc
import inspect
import warnings
import weakref

import keras
import numpy as np
import pytest
from keras import layers

import mpkeras
from mpkeras.callbacks import MixedPrecision
from mpkeras.policies.loss_scaling import DynamicLossScale, FixedLossScale
from mpkeras.scaling.optimizer import LossScaleOptimizer
from mpkeras.training import guard
from mpkeras.training.prepare import prepare
from tests.cases import first_quick
from tests.sixteen_bits import without_outputs
from tests.step_modes import snapshot

X = np.linspace(-1, 1, 48, dtype="float32").reshape(8, 6)
Y = np.full((8, 1), 0.1, "float32")
COVERED = ("train_step", "compile", "fit", "evaluate", "predict", "make_train_function", "_get_metrics_result_or_logs")


def sequential():
    return keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(1)])


def functional():
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(1)(layers.Dense(4)(inputs)))


@keras.saving.register_keras_serializable("test_doors")
class Subclassed(keras.Model):
    def __init__(self, **options):
        super().__init__(**options)
        self.dense = layers.Dense(4)
        self.head = layers.Dense(1)

    def call(self, x):
        return self.head(self.dense(x))


MODELS = [sequential, functional, Subclassed]


def compiled(make=sequential, **options):
    keras.utils.set_random_seed(5)
    model = make()
    model.compile(keras.optimizers.SGD(0.01), "mse", **options)
    return model


def fit(model, *callbacks, y=Y, **options):
    return model.fit(X, y, **{"batch_size": 2, "verbose": 0, "shuffle": False, "callbacks": list(callbacks), **options})


def own_attributes(model):
    return {name: value for name, value in vars(model).items() if name in COVERED or name.startswith("_mpkeras")}


# ----------------------------------------------------------------------------------------- compiled once more


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS)
def test_compiled_again_a_model_is_prepared_again_with_the_same_arguments(make):
    model = compiled(make)
    prepare(model, "mixed_float16", loss_scale=DynamicLossScale(64.0))
    model.compile(keras.optimizers.Adam(0.01), "mae")
    assert isinstance(model.optimizer, LossScaleOptimizer)
    assert isinstance(model.optimizer.inner_optimizer, keras.optimizers.Adam)
    assert model.optimizer.loss_scale_rule == DynamicLossScale(64.0)
    assert guard.is_guarded(model)
    assert fit(model).history["loss_scale"] == [64.0]
    model.compile("sgd", "mse")
    assert isinstance(model.optimizer, LossScaleOptimizer)
    assert model.train_step.mpkeras_guard.rollback


@pytest.mark.backends("tensorflow", "jax")
@pytest.mark.parametrize("policy", first_quick(["mixed_float16", "mixed_bfloat16"]))
def test_compiled_again_without_rollback_and_with_xla_as_it_was_asked_for(policy):
    model = compiled(jit_compile=False)
    prepare(model, policy, jit_compile=True, rollback=False)
    model.compile("sgd", "mse", jit_compile=False)
    assert model.jit_compile is True
    # In bfloat16 that leaves nothing to guard.
    assert (guard.guard_of(model).rollback is False) if policy == "mixed_float16" else "train_step" not in vars(model)


def test_compiled_again_after_another_policy_and_without_an_optimizer():
    model = compiled()
    prepare(model, "mixed_float16")
    mpkeras.apply_policy(model, "float32")
    model.compile("sgd", "mse")
    assert {layer.compute_dtype for layer in model.layers} == {"float32"}
    assert guard.is_guarded(model)
    model.compile(optimizer=None, loss="mse", run_eagerly=True)
    assert np.isfinite(model.evaluate(X, Y, verbose=0))


def of_float16_layers():
    return keras.Sequential([keras.Input((6,)), *[layers.Dense(n, dtype="mixed_float16") for n in (3, 1)]])


@pytest.mark.slow
@pytest.mark.parametrize("make", [*MODELS, of_float16_layers])
@pytest.mark.parametrize("made_under", ["mixed_float16", "float32"])
def test_after_the_callback_a_compile_wraps_as_stock_keras_does(make, made_under):
    """Its layers stay float16: an optimizer that scales no loss would lose small gradients without a word."""
    keras.config.set_dtype_policy(made_under)
    model = compiled(make)
    fit(model, MixedPrecision(None if make is of_float16_layers else "mixed_float16"))
    model.compile("sgd", "mse")
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer
    assert set(fit(model).history) == {"loss"}
    # Of the loss, which it scales.
    assert float(model.optimizer.dynamic_scale) > 2.0**10
    mpkeras.apply_policy(model, "float32")
    assert model.dtype_policy.name == "float32"


@pytest.mark.parametrize("make", first_quick(MODELS))
def test_a_clone_of_a_converted_model_is_wrapped_by_compile_as_stock_keras_does(make):
    keras.config.set_dtype_policy("mixed_float16")
    model = compiled(make)
    model(X)
    mpkeras.apply_policy(model, "mixed_float16")
    clone = keras.models.clone_model(model)
    clone.compile("sgd", "mse")
    assert type(clone.optimizer) is keras.optimizers.LossScaleOptimizer


# ---------------------------------------------------------------------------------- raw inputs, own policy


class Rescaled(Subclassed):
    def call(self, x):
        return self.head(self.dense(layers.Rescaling(1e-5)(x)))


def rescaled_by_a_part():
    inputs = keras.Input((6,))
    scale = keras.Sequential([keras.Input((6,)), layers.Rescaling(1e-5)])
    return keras.Model(inputs, layers.Dense(1)(layers.Dense(4)(scale(inputs))))


def rescaled_first():
    return keras.Sequential([layers.Rescaling(1e-5), layers.Dense(4), layers.Dense(1)])


@pytest.mark.parametrize("make", first_quick([Rescaled, rescaled_first, rescaled_by_a_part]))
def test_a_16_bit_model_passes_its_inputs_on_as_they_are(make):
    """1e5 is beyond float16: a layer casts its own inputs, and Rescaling, kept in float32, does not."""
    model = compiled(make)
    prepare(model, "mixed_float16")
    x = np.full((1, 6), 1e5, "float32")
    model(x)
    for variable in model.trainable_variables:
        variable.assign(keras.ops.full(variable.shape, len(variable.shape) - 1))
    # A kernel of ones and a bias of zeros, twice: 4 units, each of 6 * 1.
    np.testing.assert_allclose(keras.ops.convert_to_numpy(model(x)), [[24.0]], rtol=1e-3)  # float16: 11 bits
    dense = next(layer for layer in model.layers if isinstance(layer, layers.Dense))
    assert dense.compute_dtype == "float16" and model.dtype_policy.name == "mixed_float16"


def test_the_way_back_leaves_nothing_behind():
    model = sequential()
    attributes, config = set(vars(model)), model.get_config()
    mpkeras.apply_policy(model, "mixed_float16")
    assert model.autocast is False
    mpkeras.apply_policy(model, "float32")
    assert (set(vars(model)), model.get_config(), model.autocast) == (attributes, config, True)


@pytest.mark.parametrize("made_under", first_quick(["float32", "mixed_float16"]))
def test_a_subclassed_model_is_saved_with_the_policy_it_was_made_with(made_under, tmp_path):
    """Its layers are made anew when it is loaded: with another policy of its own it would cast their inputs."""
    keras.config.set_dtype_policy(made_under)
    model = compiled(Subclassed)
    prepare(model, "mixed_float16")
    model(X)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", compile=False)
    assert loaded.dtype_policy.name == made_under
    assert loaded.dense.dtype_policy.name == made_under


# ------------------------------------------------------------------------------------------- logs and words


def messages(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        run()
    return [str(w.message) for w in caught if w.category is UserWarning]


def logs_and_messages(door, y, **options):
    """Returns the history and the messages of `fit` with the callback, or after `prepare`."""
    model = compiled()
    policy = without_outputs("mixed_float16")
    callbacks = [MixedPrecision(policy, **options)] if door == "callback" else []
    if door == "prepare":
        prepare(model, policy, **options)
    said = messages(lambda: fit(model, *callbacks, y=y, epochs=3))
    return model.history.history, said


# Finite losses, whose gradients are beyond float16 at any scale from 1 up.
OVERFLOWING = np.full((8, 1), 1e6, "float32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("y", "options", "skipped_steps", "expected"),
    [
        pytest.param(Y, {"loss_scale": 64.0}, [0, 0, 0], [], id="nothing to say"),
        pytest.param(
            OVERFLOWING,
            {"loss_scale": DynamicLossScale(4.0, min_scale=1.0)},
            [4, 8, 12],
            ["All 4 steps of epoch 1 were skipped, nothing was learned", "at every loss scale down to its lowest, 1:"],
            id="gradients overflow at the lowest scale",
        ),
        pytest.param(
            np.where(np.arange(8)[:, None] == 3, np.nan, Y).astype("float32"),
            {"loss_scale": DynamicLossScale(4.0)},
            [1, 2, 3],
            ["1 of 4 steps skipped in epoch 1: each time the loss itself was not finite"],
            id="a loss that is not finite",
        ),
    ],
)
def test_prepare_logs_and_warns_as_the_callback_does(y, options, skipped_steps, expected):
    (history, said), (prepared_history, prepared_said) = (
        logs_and_messages(door, y, **options) for door in ("callback", "prepare")
    )
    assert prepared_said == said
    assert all(part in message for part, message in zip(expected, said, strict=True))
    assert {"loss", "loss_scale", "skipped_steps"} == set(prepared_history)
    assert prepared_history["loss_scale"] == history["loss_scale"]
    assert prepared_history["skipped_steps"] == history["skipped_steps"] == skipped_steps


@pytest.mark.slow
@pytest.mark.parametrize(
    "callbacks", first_quick([[], [MixedPrecision(loss_scale=FixedLossScale(2.0))]]), ids=["prepared", "both"]
)
def test_it_warns_once_over_several_fits_and_through_both_doors(callbacks):
    model = compiled(run_eagerly=True)
    prepare(model, without_outputs("mixed_float16"), loss_scale=FixedLossScale(2.0), rollback=False)
    assert len(messages(lambda: fit(model, *callbacks, y=OVERFLOWING))) == 1
    assert callbacks or messages(lambda: fit(model, y=OVERFLOWING)) == []
    # The callback leaves it prepared, as it was.
    assert model.train_step.mpkeras_guard.rollback is False
    model.compile("sgd", "mse")
    assert isinstance(model.optimizer, LossScaleOptimizer)


@pytest.mark.slow
def test_outside_of_fit_a_prepared_model_returns_what_keras_returns():
    stock, model = compiled(metrics=["mae"]), compiled(metrics=["mae"])
    prepare(model, "float32")
    fit(stock)
    fit(model)
    result, expected = model.train_on_batch(X, Y), stock.train_on_batch(X, Y)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    assert set(model.train_on_batch(X, Y, return_dict=True)) == {"loss", "mae"}
    assert set(fit(model).history) == {"loss", "mae", "loss_scale", "skipped_steps"}


class CountsTraces(layers.Dense):
    traces = 0

    def call(self, x):
        CountsTraces.traces += 1
        return super().call(x)


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "jax")
def test_the_same_trace_serves_one_fit_after_the_other():
    model = compiled(lambda: keras.Sequential([keras.Input((6,)), CountsTraces(1)]))
    prepare(model, "mixed_bfloat16")
    fit(model, batch_size=8)
    traces = CountsTraces.traces
    fit(model, batch_size=8)
    assert CountsTraces.traces == traces
    # Keras itself traces for it once more; for `fit` nothing changes by that.
    model.train_on_batch(X, Y)
    traces = CountsTraces.traces
    fit(model, batch_size=8)
    assert CountsTraces.traces == traces


class OwnFit(keras.Sequential):
    """Its `fit` takes no callbacks."""

    def fit(self, x, y):
        return super().fit(x, y, batch_size=2, verbose=0)


class FitByName(keras.Sequential):
    """Its `fit` takes data by place, and callbacks by name alone."""

    def fit(self, *data, callbacks=None):
        return super().fit(*data, batch_size=4, verbose=0, callbacks=callbacks)


class AnyFit(keras.Sequential):
    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [OwnFit, FitByName])
def test_a_fit_of_ones_own_trains_whatever_arguments_it_takes(kind):
    model = compiled(lambda: kind(sequential().layers))
    prepare(model, "mixed_bfloat16")
    assert set(model.fit(X, Y).history) == {"loss", "loss_scale", "skipped_steps"}


@pytest.mark.slow
def test_callbacks_given_by_place_in_a_list_or_in_a_container_are_kept():
    counted = []

    def counting():
        return keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: counted.append(set(logs)))

    model = compiled()
    prepare(model, "mixed_bfloat16")
    model.fit(X, Y, 4, 1, 0, [counting()])
    model.fit(X, Y, 4, 1, 0, counting())
    container = keras.callbacks.CallbackList([counting()], add_history=True, model=model)
    model.fit(X, Y, batch_size=4, verbose=0, callbacks=container)
    other = compiled(lambda: AnyFit(sequential().layers))
    prepare(other, "mixed_bfloat16")
    other.fit(X, Y, 4, 1, 0, [counting()])
    other.fit(X, Y, batch_size=4, verbose=0, callbacks=[counting()])
    assert counted == [{"loss", "loss_scale", "skipped_steps"}] * 5
    assert not any(type(callback).__name__ == "SkipWatch" for callback in container.callbacks)


# --------------------------------------------------------------------------------- what is covered, and undone


def test_what_is_covered_is_listed_and_taken_back_exactly():
    model = compiled()
    assert own_attributes(model) == {}
    prepare(model, "float32")
    assert set(own_attributes(model)) == {*COVERED, "_mpkeras_prepared", "_mpkeras_replaced"}
    assert inspect.signature(model.fit) == inspect.signature(compiled().fit)
    with pytest.raises(TypeError, match="epoch_count"):
        model.fit(X, Y, epoch_count=2)
    model.optimizer = model.optimizer.inner_optimizer
    prepare(model, "float32", rollback=False)
    assert own_attributes(model) == {}


def test_what_the_user_put_there_since_stays():
    def mine(*args, **kwargs):
        return "mine"

    model = compiled()
    prepare(model, "float32")
    model.compile, model.train_step = mine, mine
    model.optimizer = model.optimizer.inner_optimizer
    prepare(model, "float32", rollback=False)
    assert (model.compile, model.train_step) == (mine, mine)
    assert "fit" not in vars(model)


def test_a_prepared_model_is_let_go_of_with_its_last_reference():
    model = compiled()
    prepare(model, "mixed_bfloat16")
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None


# ------------------------------------------------------------------------- models inside that are compiled


class Outer(keras.Model):
    """A GAN of the old kind: its discriminator is compiled, and trained by `train_on_batch`."""

    def __init__(self):
        super().__init__()
        self.inner = sequential()
        self.head = layers.Dense(1)
        self.inner.build((None, 6))
        self.head.build((None, 1))
        self.built = True

    def call(self, x, training=False):
        return self.head(self.inner(x, training=training))


def outer(inner_optimizer, make=Outer):
    keras.utils.set_random_seed(5)
    model = make()
    model.inner.compile(inner_optimizer, "mse")
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


@pytest.mark.slow
@pytest.mark.parametrize("door", ["callback", "prepare"])
def test_compiled_models_inside_are_wrapped_too(door):
    model = outer(keras.optimizers.Adam(0.01))
    if door == "prepare":
        prepare(model, "mixed_float16", loss_scale=64.0)
    fit(model, *([MixedPrecision("mixed_float16", loss_scale=64.0)] if door == "callback" else []))
    assert isinstance(model.inner.optimizer, LossScaleOptimizer)
    assert model.inner.optimizer.loss_scale_rule == FixedLossScale(64.0)
    assert isinstance(model.inner.optimizer.inner_optimizer, keras.optimizers.Adam)
    # Alone it trains on, with its optimizer scaled; guarded where it was prepared.
    assert np.ndim(model.inner.train_on_batch(X, Y)) == 0
    assert int(model.inner.optimizer.iterations) == 1
    assert guard.is_guarded(model.inner) == (door == "prepare")
    if door == "prepare":
        model.inner.compile("adam", "mse")
        assert model.inner.optimizer.loss_scale_rule == FixedLossScale(64.0)


def test_one_optimizer_in_two_places_is_wrapped_once():
    model = outer(keras.optimizers.SGD(0.01))
    model.d_optimizer = model.inner.optimizer
    prepare(model, "mixed_bfloat16")
    assert isinstance(model.d_optimizer, LossScaleOptimizer)
    assert model.d_optimizer is model.inner.optimizer
    assert isinstance(model.d_optimizer.inner_optimizer, keras.optimizers.SGD)


def test_a_model_whose_parts_alone_are_compiled_is_not_compiled():
    model = Outer()
    model.inner.compile("sgd", "mse")
    with pytest.raises(ValueError, match="has no optimizer"):
        prepare(model, "mixed_bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_part_skips_its_step_without_a_trace(policy):
    """P5: trained on its own, a part of a prepared model is guarded as the whole is."""
    model = outer(keras.optimizers.SGD(0.01))
    prepare(model, policy, loss_scale=64.0)
    model.inner.train_on_batch(X, Y)
    variables = snapshot(model.variables)
    model.inner.train_on_batch(np.where(X == X[2, 1], np.inf, X), Y)
    assert snapshot(model.variables) == variables
    assert int(model.inner.optimizer.skipped_steps) == 1
    assert int(model.optimizer.skipped_steps) == 0


class TrainsItsPart(Outer):
    """Takes a step of its part in the middle of its own."""

    def train_step(self, data):
        self.inner_loss = self.inner.train_on_batch(*data[:2])
        return super().train_step(data)


@pytest.mark.backends("torch")  # on TensorFlow Keras refuses it: "requires being in cross-replica context"
def test_a_part_trained_within_the_step_of_the_whole_learns_as_without_us():
    def run(door):
        model = outer(keras.optimizers.SGD(0.02), TrainsItsPart)
        if door == "prepare":
            prepare(model, "float32")
        fit(model, *([MixedPrecision("float32")] if door == "callback" else []))
        assert np.isscalar(model.inner_loss)
        return snapshot(model.variables)

    assert run("prepare") == run("callback") == run(None)
