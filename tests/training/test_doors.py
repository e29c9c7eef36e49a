"""A prepared model stays prepared, and says in `fit` what the callback says."""

import inspect
import warnings

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
from tests.sixteen_bits import without_outputs
from tests.step_modes import snapshot

X = np.linspace(-1, 1, 48, dtype="float32").reshape(8, 6)
Y = np.full((8, 1), 0.1, "float32")
COVERED = ("train_step", "compile", "fit", "evaluate", "make_train_function")


def sequential():
    return keras.Sequential([keras.Input((6,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(1)])


def functional():
    inputs = keras.Input((6,))
    return keras.Model(inputs, layers.Dense(1)(layers.Dense(4)(inputs)))


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
    history = fit(model).history
    assert history["loss_scale"] == [64.0]
    model.compile("sgd", "mse")
    assert isinstance(model.optimizer, LossScaleOptimizer)
    assert model.train_step.mpkeras_guard.rollback


@pytest.mark.backends("tensorflow", "jax")
def test_compiled_again_without_rollback_and_with_xla_as_it_was_asked_for():
    model = compiled(jit_compile=False)
    prepare(model, "mixed_float16", jit_compile=True, rollback=False)
    model.compile("sgd", "mse", jit_compile=False)
    assert model.jit_compile is True
    assert model.train_step.mpkeras_guard.rollback is False
    # In bfloat16 that leaves nothing to guard.
    model = compiled(jit_compile=False)
    prepare(model, "mixed_bfloat16", jit_compile=True, rollback=False)
    model.compile("sgd", "mse", jit_compile=False)
    assert model.jit_compile is True
    assert "train_step" not in vars(model)


def test_a_policy_that_apply_policy_has_changed_since_is_not_brought_back():
    model = compiled()
    prepare(model, "mixed_float16")
    mpkeras.apply_policy(model, "float32")
    model.compile("sgd", "mse")
    assert {layer.compute_dtype for layer in model.layers} == {"float32"}
    assert guard.is_guarded(model)


def test_compiled_without_an_optimizer_it_can_still_be_evaluated():
    model = compiled()
    prepare(model, "mixed_bfloat16")
    model.compile(optimizer=None, loss="mse")
    assert np.isfinite(model.evaluate(X, Y, verbose=0))


@pytest.mark.slow
@pytest.mark.parametrize("make", MODELS)
def test_after_the_callback_a_compile_wraps_as_stock_keras_does(make):
    """Its layers stay float16: an optimizer that scales no loss would lose small gradients without a word."""
    keras.config.set_dtype_policy("mixed_float16")
    stock = compiled(make)
    model = compiled(make)
    fit(model, MixedPrecision())
    for one in (stock, model):
        one.compile("sgd", "mse")
    assert type(stock.optimizer) is keras.optimizers.LossScaleOptimizer
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer
    assert set(fit(model).history) == {"loss"}
    # Of the loss, which it scales.
    assert float(model.optimizer.dynamic_scale) > 2.0**10


@pytest.mark.parametrize("make", MODELS)
def test_a_float32_model_that_the_callback_made_float16_is_wrapped_by_the_next_compile(make):
    model = compiled(make)
    fit(model, MixedPrecision("mixed_float16"))
    model.compile("sgd", "mse")
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer


def test_a_model_of_float16_layers_is_wrapped_by_the_next_compile_wherever_the_policy_was_set():
    options = {"dtype": "mixed_float16"}
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3, **options), layers.Dense(1, **options)])
    model.compile("sgd", "mse")
    fit(model, MixedPrecision())
    model.compile("sgd", "mse")
    assert type(model.optimizer) is keras.optimizers.LossScaleOptimizer
    mpkeras.apply_policy(model, "float32")
    assert model.dtype_policy.name == "float32"


@pytest.mark.parametrize("make", MODELS)
def test_a_clone_of_a_converted_model_is_wrapped_by_compile_as_stock_keras_does(make):
    keras.config.set_dtype_policy("mixed_float16")
    model = compiled(make)
    model(X)
    mpkeras.apply_policy(model, "mixed_float16")
    clone = keras.models.clone_model(model)
    clone.compile("sgd", "mse")
    assert type(clone.optimizer) is keras.optimizers.LossScaleOptimizer


# ---------------------------------------------------------------------------------- raw inputs, own policy


@pytest.mark.parametrize("make", [Subclassed, lambda: keras.Sequential([layers.Rescaling(1e-5), layers.Dense(1)])])
def test_inputs_pass_by_a_16_bit_model_and_its_policy_keeps_its_name(make):
    model = compiled(make)
    prepare(model, "mixed_float16")
    assert model.dtype_policy.name == "mixed_float16"
    seen = []
    first = model.layers[0]
    call = first.call
    first.call = lambda x: seen.append(keras.backend.standardize_dtype(x.dtype)) or call(x)
    model(np.full((2, 6), 1e5, "float32"))
    # A layer casts its own inputs: Dense to float16, Rescaling, kept in float32, does not.
    assert set(seen) == {"float32" if isinstance(first, layers.Rescaling) else "float16"}


def test_a_sequential_inside_a_model_passes_its_inputs_on_too():
    scale = keras.Sequential([keras.Input((6,)), layers.Rescaling(1e-5)])
    inputs = keras.Input((6,))
    model = keras.Model(inputs, layers.Dense(1, kernel_initializer="ones")(scale(inputs)))
    model.compile("sgd", "mse")
    prepare(model, "mixed_float16")
    out = keras.ops.convert_to_numpy(model(np.full((1, 6), 1e5, "float32")))
    np.testing.assert_allclose(out, [[6.0]], rtol=1e-3)  # float16 has 11 significant bits


def test_the_way_back_leaves_nothing_behind():
    model = sequential()
    attributes, config = set(vars(model)), model.get_config()
    mpkeras.apply_policy(model, "mixed_float16")
    assert model.autocast is False
    mpkeras.apply_policy(model, "float32")
    assert (set(vars(model)), model.get_config(), model.autocast) == (attributes, config, True)


@keras.saving.register_keras_serializable("test_doors")
class Saved(Subclassed):
    pass


@pytest.mark.parametrize("made_under", ["float32", "mixed_float16"])
def test_a_subclassed_model_is_saved_with_the_policy_it_was_made_with(made_under, tmp_path):
    """Its layers are made anew when it is loaded: with another policy of its own it would cast their inputs."""
    keras.config.set_dtype_policy(made_under)
    model = compiled(Saved)
    prepare(model, "mixed_float16")
    model.train_on_batch(X, Y)
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


def both_doors(y, **options):
    """Returns history and messages of `fit` with the callback, and after `prepare`."""
    found = []
    for door in ("callback", "prepare"):
        model = compiled()
        policy = without_outputs("mixed_float16")
        callbacks = [MixedPrecision(policy, **options)] if door == "callback" else []
        if door == "prepare":
            prepare(model, policy, **options)
        histories = []
        said = messages(lambda m=model, c=callbacks, h=histories: h.append(fit(m, *c, y=y, epochs=3).history))
        found.append((histories[0], said))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("y", "options", "expected"),
    [
        pytest.param(Y, {"loss_scale": 64.0}, [], id="nothing to say"),
        pytest.param(
            # Finite losses, whose gradients are beyond float16 at any scale from 1 up.
            np.full((8, 1), 1e6, "float32"),
            {"loss_scale": DynamicLossScale(4.0, min_scale=1.0)},
            ["All 4 steps of epoch 1 were skipped, nothing was learned", "with the loss scale at its lowest, 1.0"],
            id="gradients overflow at the lowest scale",
        ),
        pytest.param(
            np.where(np.arange(8)[:, None] == 3, np.nan, Y).astype("float32"),
            {"loss_scale": DynamicLossScale(4.0)},
            ["1 of 4 steps skipped in epoch 1: each time the loss itself was not finite"],
            id="a loss that is not finite",
        ),
    ],
)
def test_prepare_logs_and_warns_as_the_callback_does(y, options, expected):
    (history, said), (prepared_history, prepared_said) = both_doors(y, **options)
    assert prepared_said == said
    assert len(said) == len(expected)
    assert all(part in message for part, message in zip(expected, said, strict=True))
    assert {"loss", "loss_scale", "skipped_steps"} == set(prepared_history)
    assert prepared_history["loss_scale"] == history["loss_scale"]
    assert prepared_history["skipped_steps"] == history["skipped_steps"]
    # Each skipped step of 3 epochs of 4.
    assert prepared_history["skipped_steps"] == {0: [0, 0, 0], 2: [4, 8, 12], 1: [1, 2, 3]}[len(expected)]


def test_it_warns_once_over_several_fits():
    model = compiled()
    prepare(model, without_outputs("mixed_float16"), loss_scale=FixedLossScale(2.0))
    bad = np.full((8, 1), 1e6, "float32")
    assert len(messages(lambda: fit(model, y=bad))) == 1
    assert messages(lambda: fit(model, y=bad)) == []


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


@pytest.mark.backends("tensorflow", "jax")
def test_the_same_trace_serves_one_fit_after_the_other():
    model = compiled(lambda: keras.Sequential([keras.Input((6,)), CountsTraces(1)]))
    prepare(model, "mixed_bfloat16")
    fit(model, batch_size=8)
    before = CountsTraces.traces
    fit(model, batch_size=8)
    assert CountsTraces.traces == before
    # Keras itself traces for it once more; for `fit` nothing changes by that.
    model.train_on_batch(X, Y)
    after_batch = CountsTraces.traces
    fit(model, batch_size=8)
    assert CountsTraces.traces == after_batch


def test_the_callback_on_a_prepared_model_warns_once_and_leaves_it_prepared():
    model = compiled()
    prepare(model, without_outputs("mixed_float16"), loss_scale=FixedLossScale(2.0), rollback=False)
    bad = np.full((8, 1), 1e6, "float32")
    said = messages(lambda: fit(model, MixedPrecision(loss_scale=FixedLossScale(2.0)), y=bad))
    assert len(said) == 1
    assert guard.is_guarded(model)
    assert model.train_step.mpkeras_guard.rollback is False
    model.compile("sgd", "mse")
    assert isinstance(model.optimizer, LossScaleOptimizer)


class OwnFit(keras.Sequential):
    """Its `fit` takes no callbacks."""

    def fit(self, x, y):
        return super().fit(x, y, batch_size=2, verbose=0)


class AnyFit(keras.Sequential):
    def fit(self, *args, **kwargs):
        return super().fit(*args, **kwargs)


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


def test_a_fit_of_ones_own_without_callbacks_trains():
    model = compiled(lambda: OwnFit(sequential().layers))
    prepare(model, "mixed_bfloat16")
    assert set(model.fit(X, Y).history) == {"loss", "loss_scale", "skipped_steps"}


class FitByName(keras.Sequential):
    """Its `fit` takes data by place, and callbacks by name alone."""

    def fit(self, *data, callbacks=None):
        return super().fit(*data, batch_size=4, verbose=0, callbacks=callbacks)


def test_a_fit_that_takes_callbacks_by_name_alone_trains_on_its_data():
    model = compiled(lambda: FitByName(sequential().layers))
    prepare(model, "mixed_bfloat16")
    assert set(model.fit(X, Y).history) == {"loss", "loss_scale", "skipped_steps"}


def test_wrong_arguments_of_fit_are_named_as_by_keras():
    model = compiled()
    prepare(model, "mixed_bfloat16")
    with pytest.raises(TypeError, match="epoch_count"):
        model.fit(X, Y, epoch_count=2)
    assert inspect.signature(model.fit) == inspect.signature(compiled().fit)


# --------------------------------------------------------------------------------- what is covered, and undone


def test_what_is_covered_is_listed_and_taken_back_exactly():
    model = compiled()
    before = own_attributes(model)
    assert before == {}
    prepare(model, "float32")
    assert set(own_attributes(model)) == {*COVERED, "_mpkeras_prepared", "_mpkeras_replaced"}
    model.optimizer = model.optimizer.inner_optimizer
    prepare(model, "float32", rollback=False)
    assert own_attributes(model) == before


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


@pytest.mark.slow
def test_a_prepared_model_is_let_go_of_with_its_last_reference():
    import gc
    import weakref

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


def outer(inner_optimizer, **options):
    keras.utils.set_random_seed(5)
    model = Outer()
    model.inner.compile(inner_optimizer, "mse", **options)
    model.compile(keras.optimizers.SGD(0.01), "mse", **options)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("door", ["callback", "prepare"])
def test_compiled_models_inside_are_wrapped_too(door):
    model = outer(keras.optimizers.Adam(0.01))
    if door == "prepare":
        prepare(model, "mixed_float16", loss_scale=64.0)
        fit(model)
    else:
        fit(model, MixedPrecision("mixed_float16", loss_scale=64.0))
    assert isinstance(model.inner.optimizer, LossScaleOptimizer)
    assert model.inner.optimizer.loss_scale_rule == FixedLossScale(64.0)
    assert isinstance(model.inner.optimizer.inner_optimizer, keras.optimizers.Adam)
    # Alone it trains on, with its optimizer scaled; guarded where it was prepared.
    assert np.ndim(model.inner.train_on_batch(X, Y)) == 0
    assert int(model.inner.optimizer.iterations) == 1
    assert guard.is_guarded(model.inner) == (door == "prepare")


def test_one_optimizer_in_two_places_is_wrapped_once():
    model = outer(keras.optimizers.SGD(0.01))
    model.d_optimizer = model.inner.optimizer
    prepare(model, "mixed_bfloat16")
    assert isinstance(model.d_optimizer, LossScaleOptimizer)
    assert model.d_optimizer is model.inner.optimizer
    assert isinstance(model.d_optimizer.inner_optimizer, keras.optimizers.SGD)


def test_a_part_that_is_compiled_again_stays_prepared():
    model = outer(keras.optimizers.SGD(0.01))
    prepare(model, "mixed_float16", loss_scale=64.0)
    model.inner.compile("adam", "mse")
    assert model.inner.optimizer.loss_scale_rule == FixedLossScale(64.0)


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
    before = snapshot(model.variables)
    model.inner.train_on_batch(np.where(X == X[2, 1], np.inf, X), Y)
    assert snapshot(model.variables) == before
    assert int(model.inner.optimizer.skipped_steps) == 1
    assert int(model.optimizer.skipped_steps) == 0


class TrainsItsPart(Outer):
    """Takes a step of its part in the middle of its own."""

    def train_step(self, data):
        x, y = data[:2]
        self.inner_loss = self.inner.train_on_batch(x, y)
        return super().train_step(data)


@pytest.mark.backends("torch")  # on TensorFlow Keras refuses it: "requires being in cross-replica context"
def test_a_part_trained_within_the_step_of_the_whole_learns_as_without_us():
    def run(door):
        keras.utils.set_random_seed(5)
        model = TrainsItsPart()
        model.inner.compile(keras.optimizers.SGD(0.02), "mse")
        model.compile(keras.optimizers.SGD(0.01), "mse")
        if door == "prepare":
            prepare(model, "float32")
        fit(model, *([MixedPrecision("float32")] if door == "callback" else []))
        assert np.isscalar(model.inner_loss)
        return snapshot(model.variables)

    stock = run(None)
    assert run("prepare") == stock
    assert run("callback") == stock
