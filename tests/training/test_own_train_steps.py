"""Models without a `call`, as keras.io teaches them: a train step of their own, parts, and one optimizer or several."""

import functools
import warnings

import keras
import numpy as np
import pytest
from keras import layers, ops

from mpkeras import _keras
from mpkeras.callbacks import MixedPrecision
from mpkeras.policies.loss_scaling import DynamicLossScale
from mpkeras.scaling.optimizer import LossScaleOptimizer
from mpkeras.training.prepare import prepare
from tests.cases import first_quick
from tests.sixteen_bits import without_outputs
from tests.step_modes import snapshot
from tests.training.models import MakesItsLayers, are_finite, loss_and_gradients, scaled_losses, without_gradients

BACKEND = keras.backend.backend()
BATCH = 8
DATA = np.random.default_rng(7).normal(size=(3 * BATCH, 6)).astype("float32")
# What the loops of keras.io forget, as they were written for float32.
UNSCALED = "ignore:.*the loss was not scaled since the last step.*gradients are taken as unscaled"


def updated(optimizer, parts, loss_of):
    """Takes one step of `optimizer` and returns the loss, which is not scaled, as in the loops of keras.io."""
    variables = [variable for part in parts for variable in part.trainable_weights]
    loss, grads = loss_and_gradients(loss_of, variables)
    with without_gradients():
        optimizer.apply(grads, variables)
    return loss


class Program(keras.Model):
    """What the programs below have in common: Keras' trainers on JAX and torch want to hear that all is built."""

    # Whether its parts know their inputs; only TensorFlow's trainer takes parts that do not.
    knows_inputs = True

    def __init__(self):
        super().__init__()
        self.means = {}
        self.seed = keras.random.SeedGenerator(3)
        self.make_parts()
        self.built = self.knows_inputs

    def part(self, size, *stack):
        return keras.Sequential([*([keras.Input((size,))] if self.knows_inputs else []), *stack])

    def normal(self, rows, size):
        return keras.random.normal((rows, size), seed=self.seed)

    @property
    def metrics(self):
        return list(self.means.values())

    def results(self, **losses):
        for name, loss in losses.items():
            self.means[name].update_state(ops.stop_gradient(loss))
        return {name: self.means[name].result() for name in losses}

    def parts(self):
        return [layer for layer in self.layers if isinstance(layer, keras.Model)]

    def optimizers(self):
        return [self.optimizer]


class Gan(Program):
    """`super().compile()` in `compile` gives it a third optimizer, which nothing uses."""

    def make_parts(self):
        self.discriminator = self.part(6, layers.Dense(12), layers.LeakyReLU(), layers.Dense(1))
        self.generator = self.part(4, MakesItsLayers(), layers.ReLU(), layers.Dense(6))

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.means = {name: keras.metrics.Mean(name=name) for name in ("d_loss", "g_loss")}

    def compile_for_test(self):
        self.compile(keras.optimizers.Adam(1e-3), keras.optimizers.Adam(2e-3), keras.losses.BinaryCrossentropy(True))

    def optimizers(self):
        return [self.d_optimizer, self.g_optimizer]

    def train_step(self, real):
        real = ops.convert_to_tensor(real[0] if isinstance(real, tuple) else real)
        fake = self.generator(self.normal(BATCH, 4), training=True)
        images = ops.concatenate([fake, real], axis=0)
        labels = ops.concatenate([ops.ones((BATCH, 1)), ops.zeros((BATCH, 1))], axis=0)
        d_loss = updated(
            self.d_optimizer,
            [self.discriminator],
            lambda: self.loss_fn(labels, self.discriminator(ops.stop_gradient(images))),
        )
        noise, wrong = self.normal(BATCH, 4), ops.zeros((BATCH, 1))
        g_loss = updated(
            self.g_optimizer,
            [self.generator],
            lambda: self.loss_fn(wrong, self.discriminator(self.generator(noise, training=True))),
        )
        return self.results(d_loss=d_loss, g_loss=g_loss)


class Vae(Program):
    def make_parts(self):
        self.encoder = self.part(6, layers.Dense(12, activation="relu"), layers.Dense(4))
        self.decoder = self.part(2, layers.Dense(12, activation="relu"), layers.Dense(6, activation="sigmoid"))
        self.means = {name: keras.metrics.Mean(name=name) for name in ("total", "reconstruction", "kl")}

    def compile_for_test(self):
        self.compile(optimizer=keras.optimizers.Adam(1e-3))

    def losses_of(self, data, encoder, decoder, noise):
        z_mean, z_log_var = ops.split(encoder(data), 2, axis=-1)
        decoded = decoder(z_mean + ops.exp(0.5 * z_log_var) * noise)
        reconstruction = ops.mean(ops.sum(ops.square(data - decoded), axis=-1))
        kl = ops.mean(ops.sum(-0.5 * (1 + z_log_var - ops.square(z_mean) - ops.exp(z_log_var)), axis=1))
        return reconstruction, kl

    def train_step(self, data):
        data = ops.convert_to_tensor(data[0] if isinstance(data, tuple) else data)
        noise, found = self.normal(BATCH, 2), []

        def total():
            found[:] = self.losses_of(data, self.encoder, self.decoder, noise)
            return found[0] + found[1]

        loss = updated(self.optimizer, [self.encoder, self.decoder], total)
        return self.results(total=loss, reconstruction=found[0], kl=found[1])


def compiled(program, knows_inputs=True):
    keras.utils.set_random_seed(11)
    kind = type(program.__name__, (program,), {"knows_inputs": knows_inputs})
    model = kind()
    model.compile_for_test()
    return model


def fit(model, door=None, policy=None, data=DATA, **options):
    callbacks = []
    if door == "callback":
        callbacks = [MixedPrecision(policy, **options)]
    elif door == "prepare":
        prepare(model, policy, **options)
    return model.fit(data, batch_size=BATCH, epochs=2, shuffle=False, verbose=0, callbacks=callbacks).history


@functools.cache
def stock(program):
    """Returns what stock Keras makes of `program` in float32: history, variables, and steps of each optimizer."""
    model = compiled(program)
    history = fit(model)
    return history, snapshot(model.variables), [int(optimizer.iterations) for optimizer in model.optimizers()]


def dtypes(model):
    """What the layers compute in that no default rule keeps in float32, of all parts together."""
    found = {layer for part in model.parts() for layer in _keras.flatten_layers(part)}
    sigmoid = keras.activations.sigmoid
    return {
        layer.compute_dtype
        for layer in found
        if not isinstance(layer, layers.BatchNormalization) and getattr(layer, "activation", None) is not sigmoid
    }


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "torch")
@pytest.mark.parametrize(("program", "door"), [(Gan, "prepare"), (Vae, "callback")])
def test_in_float32_every_bit_is_as_without(program, door):
    expected, variables, _ = stock(program)
    guarded = compiled(program)
    history = fit(guarded, door, "float32")
    assert {name: history[name] for name in expected} == expected
    assert set(history) - set(expected) == {"loss_scale", "skipped_steps"}
    assert snapshot(guarded.variables) == variables
    assert all(isinstance(optimizer, LossScaleOptimizer) for optimizer in guarded.optimizers())


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "torch")
@pytest.mark.filterwarnings(UNSCALED)
@pytest.mark.parametrize(("policy", "rtol"), [("mixed_bfloat16", 0.03), ("mixed_float16", 0.005)])
@pytest.mark.parametrize(("program", "door"), [(Gan, "callback"), (Vae, "prepare")])
def test_in_16_bits_all_parts_train_as_in_float32(program, door, policy, rtol):
    expected, _, iterations = stock(program)
    mixed = compiled(program)
    # Without a graph where that is quicker; bfloat16 is the same in both.
    mixed.run_eagerly = policy == "mixed_bfloat16"
    history = fit(mixed, door, without_outputs(policy))
    assert dtypes(mixed) == {policy.removeprefix("mixed_")}
    assert history["skipped_steps"] == [0, 0]
    if policy == "mixed_float16" and BACKEND == "tensorflow":
        # Of an optimizer in use: the third one of the GANs would stay at its first scale. None is scaled but by us.
        assert history["loss_scale"][-1] == float(mixed.optimizers()[0].loss_scale)
    assert [int(o.iterations) for o in mixed.optimizers()] == iterations
    for name in expected:
        # bfloat16 has 8 significant bits, float16 has 11; the losses are of the order of 1.
        np.testing.assert_allclose(history[name], expected[name], rtol=rtol, atol=rtol)


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
@pytest.mark.filterwarnings(UNSCALED)
@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"jit_compile": True}], ids=["graph", "eager", "xla"])
def test_parts_without_inputs_are_converted_before_the_first_step_is_trained(options):
    """Not one step in a mixture: what the first step would build is built by a trial of it."""
    reference, mixed = compiled(Gan), compiled(Gan, knows_inputs=False)
    for model in (reference, mixed):
        model.run_eagerly, model.jit_compile = options.get("run_eagerly", False), options.get("jit_compile", False)
    fit(reference, "prepare", "mixed_float16", data=DATA[:BATCH])
    fit(mixed, "prepare", "mixed_float16", data=DATA[:BATCH])
    made = mixed.generator.layers[0]
    assert (made.norm.compute_dtype, made.dense.compute_dtype) == ("float32", "float16")
    # The same bits as where all was there, and converted, from the beginning.
    assert snapshot(mixed.variables) == snapshot(reference.variables)


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "torch")
@pytest.mark.parametrize(("program", "skipped"), [(Gan, [1, 0]), (Vae, [1])])
def test_a_step_that_is_not_finite_leaves_no_trace(program, skipped):
    """G2, and each optimizer decides for itself: the generator of the GAN never sees the inf among the data."""
    spoiled = DATA[:BATCH].copy()
    spoiled[2, 1] = np.inf
    model = compiled(program)
    prepare(model, "float32")
    model.train_on_batch(DATA[:BATCH])
    decided = model.discriminator.variables if program is Gan else model.variables
    before = snapshot(decided)
    model.train_on_batch(spoiled)
    assert snapshot(decided) == before
    assert [int(optimizer.skipped_steps) for optimizer in model.optimizers()] == skipped
    model.train_on_batch(DATA[BATCH : 2 * BATCH])
    assert snapshot(decided) != before
    assert are_finite(model.variables)


class RunsItsLayersAlone(keras.Model):
    """Has a `call`; its step runs the same layers, and computes with what they return beside float32."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = layers.Dense(8, "relu"), layers.Dense(1, bias_initializer="ones")
        self.largest = keras.metrics.MeanMetricWrapper(lambda y, y_pred: y_pred, name="largest")

    def call(self, x):
        return self.head(self.hidden(x))

    @property
    def metrics(self):
        return [self.largest]

    def train_step(self, data):
        x, y = map(ops.convert_to_tensor, data)
        seen = []

        def loss():
            outputs = self.head(self.hidden(x))
            seen.append(outputs)
            return ops.mean((outputs - y) ** 2)

        updated(self.optimizer, [self], loss)
        self.largest.update_state(y, ops.stop_gradient(seen[-1]))
        return {"largest": self.largest.result()}


@pytest.mark.backends("tensorflow", "torch")
@pytest.mark.filterwarnings("ignore:.*does not have a `build", UNSCALED)
@pytest.mark.parametrize("policy", first_quick(["mixed_bfloat16", "mixed_float16"]))
def test_a_step_that_runs_the_layers_of_a_call_computes_with_float32_outputs(policy):
    model = RunsItsLayersAlone()
    # Without a graph where that is quicker; the other policy has one.
    model.compile(keras.optimizers.SGD(0.0), run_eagerly=policy == "mixed_bfloat16")
    prepare(model, policy)
    x = DATA[:BATCH]
    logs = model.fit(x, x[:, :1], batch_size=BATCH, verbose=0).history
    assert (model.hidden.compute_dtype, model.head.compute_dtype) == (policy.removeprefix("mixed_"), "float32")
    np.testing.assert_allclose(logs["largest"], ops.convert_to_numpy(model(x)).mean(), rtol=1e-6)


class TakesPairs(keras.Model):
    """Its step takes two views of the data, its `call` one, which Keras' warnings say."""

    def __init__(self):
        super().__init__()
        self.head = keras.Sequential([keras.Input((6,)), layers.Dense(1)])

    def call(self, x):
        return self.head(x)

    def train_step(self, data):
        first, second = data[0]
        return {"loss": updated(self.optimizer, [self], lambda: ops.mean((self.head(first) - self.head(second)) ** 2))}


@pytest.mark.slow
@pytest.mark.backends("tensorflow")  # Keras itself warns, or raises, elsewhere
def test_data_that_are_no_arguments_of_the_call_are_no_matter_for_a_step():
    model = TakesPairs()
    model.compile(keras.optimizers.SGD(0.0))
    prepare(model, "mixed_bfloat16")
    # As an error a warning would end the attempt alone.
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        logs = model.fit((DATA[:BATCH], DATA[:BATCH] + 1), np.zeros(BATCH), batch_size=BATCH, verbose=0).history
    assert not [warning for warning in told if "structure" in str(warning.message)]
    expected = model.head.layers[0].get_weights()[0].sum() ** 2
    np.testing.assert_allclose(logs["loss"], expected, rtol=0.05, atol=0.01)  # of a head in float32; 8 bits at the most


@pytest.mark.slow
@pytest.mark.backends("tensorflow", "torch")
def test_an_epoch_in_which_one_of_two_optimizers_counts_no_step_has_learned():
    model = compiled(Gan)
    prepare(model, "float32")
    spoiled = np.where(np.arange(len(DATA))[:, None] % BATCH == 1, np.inf, DATA).astype("float32")
    batches = len(DATA) // BATCH
    message = f"All {batches} updates of optimizer '{model.d_optimizer.name}' in epoch 1 were skipped, what it trains"
    with pytest.warns(UserWarning, match=message):
        model.fit(spoiled, batch_size=BATCH, shuffle=False, verbose=0)
    assert [int(optimizer.iterations) for optimizer in model.optimizers()] == [0, batches]


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
@pytest.mark.skipif(not hasattr(keras.optimizers, "ScheduleFreeAdamW"), reason="Keras 3.15 has it")
def test_what_an_optimizer_assigns_in_its_build_is_no_part_of_the_step():
    """It starts from the weights; in a step that is traced, it would do so at every step."""

    def run(built_first):
        model = compiled(Vae)
        model.compile(keras.optimizers.ScheduleFreeAdamW(0.01))
        prepare(model, "float32")
        if built_first:
            model.optimizer.build(model.trainable_variables)
        fit(model)
        return snapshot(model.weights)

    assert run(built_first=False) == run(built_first=True)


# ------------------------------------------------------------------------------------------------------ JAX


class JaxVae(Vae):
    """A stateless step, as Keras' trainer on JAX wants it."""

    def train_step(self, state, data):
        import jax

        data = data[0] if isinstance(data, tuple) else data
        trainable, non_trainable, optimizer_variables, metrics = state
        noise = jax.random.normal(jax.random.PRNGKey(5), (BATCH, 2))

        def losses_of(trainable):
            values = {id(variable): value for variable, value in zip(self.trainable_variables, trainable, strict=True)}

            def part(model):
                return lambda x: model.stateless_call([values[id(v)] for v in model.trainable_variables], [], x)[0]

            return self.losses_of(data, part(self.encoder), part(self.decoder), noise)

        grad = jax.grad(scaled_losses(losses_of, self.optimizer, optimizer_variables), has_aux=True)
        grads, (reconstruction, kl) = grad(trainable)
        trainable, optimizer_variables = self.optimizer.stateless_apply(optimizer_variables, grads, trainable)
        with keras.StatelessScope(list(zip(self.metrics_variables, metrics, strict=True))) as scope:
            logs = self.results(total=reconstruction + kl, reconstruction=reconstruction, kl=kl)
        metrics = [scope.get_current_value(variable) for variable in self.metrics_variables]
        return logs, (trainable, non_trainable, optimizer_variables, metrics)


@pytest.mark.backends("jax")
@pytest.mark.parametrize(("policy", "rtol"), [("mixed_float16", 0.005), ("mixed_bfloat16", 0.03), ("float32", 0.0)])
@pytest.mark.parametrize("door", first_quick(["callback", "prepare"]))
def test_jax_trains_a_stateless_step_of_parts(policy, rtol, door):
    reference, mixed = compiled(JaxVae), compiled(JaxVae)
    expected, history = fit(reference), fit(mixed, door, policy if policy == "float32" else without_outputs(policy))
    assert dtypes(mixed) == {policy.removeprefix("mixed_")}
    assert isinstance(mixed.optimizer, LossScaleOptimizer)
    # Found by the first batch, up to the guess: the last bits of a gradient decide between two scales.
    assert history["loss_scale"][0] in ((2.0**14, 2.0**15) if policy == "mixed_float16" else (1.0,))
    assert history["loss_scale"][1] == history["loss_scale"][0] and history["skipped_steps"] == [0, 0]
    for name in expected:
        np.testing.assert_allclose(history[name], expected[name], rtol=rtol, atol=rtol)


class ScaledBesideTheModel(keras.Sequential):
    """Scales the loss in the scope that has the values of its weights, and not those of its optimizer."""

    def train_step(self, state, data):
        import jax

        trainable, non_trainable, optimizer_variables, metrics = state
        x, y = data

        def loss_of(trainable):
            with keras.StatelessScope(list(zip(self.trainable_variables, trainable, strict=True))):
                loss = ops.mean(ops.square(self(x) - y))
                return self.optimizer.scale_loss(loss), loss

        grads, loss = jax.grad(loss_of, has_aux=True)(trainable)
        trainable, optimizer_variables = self.optimizer.stateless_apply(optimizer_variables, grads, trainable)
        return {"loss": loss}, (trainable, non_trainable, optimizer_variables, metrics)


@pytest.mark.backends("jax")
def test_jax_takes_no_fixed_scale_from_the_state_of_a_step_and_no_other_scale_from_outside_of_it():
    def history(policy):
        model = ScaledBesideTheModel([keras.Input((6,)), layers.Dense(1, kernel_initializer="zeros")])
        model.compile(keras.optimizers.SGD(0.25))
        prepare(model, policy)
        y = np.ones((len(DATA), 1), "float32")
        return model.fit(DATA, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history["loss"]

    # The last layer makes the output, in float32.
    assert history("mixed_bfloat16") == history("float32")
    with pytest.raises(ValueError, match="in a scope that does not map them"):
        history("mixed_float16")


@pytest.mark.backends("jax")
def test_jax_a_stateless_step_of_parts_leaves_no_trace_when_it_is_skipped():
    model = compiled(JaxVae)
    prepare(model, "mixed_float16", loss_scale=DynamicLossScale(64.0))
    model.train_on_batch(DATA[:BATCH])
    before = snapshot(model.trainable_variables + model.optimizer.inner_optimizer.variables)
    bad = DATA[BATCH : 2 * BATCH] * 1e5
    model.train_on_batch(bad)
    assert int(model.optimizer.skipped_steps) == 1
    assert snapshot(model.trainable_variables + model.optimizer.inner_optimizer.variables) == before


class JaxCritic(Program):
    """Takes a step with an optimizer of its own, whose state Keras' trainer does not carry through a compiled step."""

    def make_parts(self):
        self.critic = self.part(6, layers.Dense(1))

    def compile(self, critic_optimizer, **options):
        super().compile(**options)
        self.critic_optimizer = critic_optimizer
        critic_optimizer.build(self.critic.trainable_variables)

    def train_step(self, state, data):
        import jax

        data = data[0] if isinstance(data, tuple) else data
        trainable, non_trainable, optimizer_variables, metrics = state
        optimizer = self.critic_optimizer

        def loss_of(trainable):
            loss = ops.mean(self.critic.stateless_call(trainable, [], data)[0] ** 2)
            return optimizer.scale_loss(loss), loss

        grads, loss = jax.grad(loss_of, has_aux=True)(trainable)
        trainable, new = optimizer.stateless_apply([v.value for v in optimizer.variables], grads, trainable)
        for variable, value in zip(optimizer.variables, new, strict=True):
            variable.assign(value)
        return {"critic_loss": loss}, (trainable, non_trainable, optimizer_variables, metrics)


@pytest.mark.backends("jax")
def test_jax_an_optimizer_whose_state_a_compiled_step_cannot_carry_is_named():
    keras.utils.set_random_seed(11)
    model = JaxCritic()
    model.compile(keras.optimizers.SGD(0.1, momentum=0.5), run_eagerly=True)
    prepare(model, "mixed_bfloat16")
    history = fit(model)
    assert history["critic_loss"][1] < history["critic_loss"][0]
    assert int(model.critic_optimizer.iterations) == 6
    before = snapshot(model.variables + model.critic_optimizer.variables)
    model.compile(model.critic_optimizer)
    with pytest.raises(ValueError, match=r"whose step updated \['loss_scale_optimizer.*run_eagerly=True"):
        model.train_on_batch(DATA[:BATCH])
    assert snapshot(model.variables + model.critic_optimizer.variables) == before


class Regression(Program):
    """Gives its tracker the loss of each batch, and returns that loss under the name of the tracker."""

    def make_parts(self):
        self.net = self.part(6, layers.Dense(1))
        self.means = {"loss": keras.metrics.Mean(name="loss")}

    def train_step(self, data):
        x, y = (ops.convert_to_tensor(part) for part in data[:2])
        loss = updated(self.optimizer, [self.net], lambda: ops.mean((self.net(x) - y) ** 2))
        self.results(loss=loss)
        return {"loss": loss}


class JaxRegression(Program):
    """Its loss has the name of the tracker that `compile` makes; whether this step updates that is `counts`."""

    metrics = keras.Model.metrics
    counts = False

    def make_parts(self):
        self.net = self.part(6, layers.Dense(1))

    def train_step(self, state, data):
        import jax

        x, y = data[:2]
        trainable, non_trainable, optimizer_variables, metrics = state

        def losses_of(trainable):
            return [ops.mean((self.net.stateless_call(trainable, [], x)[0] - y) ** 2)]

        grads, (loss,) = jax.grad(scaled_losses(losses_of, self.optimizer, optimizer_variables), has_aux=True)(
            trainable
        )
        trainable, optimizer_variables = self.optimizer.stateless_apply(optimizer_variables, grads, trainable)
        if self.counts:
            metrics = self.metrics[0].stateless_update_state(metrics, loss)
        return {"loss": loss}, (trainable, non_trainable, optimizer_variables, metrics)


@pytest.mark.filterwarnings(UNSCALED)
@pytest.mark.parametrize("door", first_quick([None, "callback", "prepare"]))
@pytest.mark.parametrize("counts", [True, pytest.param(False, marks=pytest.mark.backends("jax"))])
def test_a_loss_that_the_step_gives_its_tracker_and_returns_is_shown_as_the_mean_of_the_epoch(counts, door):
    """It was that of the last batch: Keras asks the metrics only if the logs have their names and no others.

    Of a tracker that nobody updates stock `fit` on JAX shows 0.0. With logs of ours, it is the step's own loss.
    """
    keras.utils.set_random_seed(11)
    model = JaxRegression() if BACKEND == "jax" else Regression()
    model.counts = counts
    model.compile(keras.optimizers.SGD(1e-6))
    x, y = DATA[: 2 * BATCH], np.repeat(np.array([[2.0], [5.0]], "float32"), BATCH, axis=0)
    of_rows = (keras.ops.convert_to_numpy(model.net(x)) - y) ** 2
    assert of_rows[BATCH:].mean() > 1.2 * of_rows.mean()
    if door == "prepare":
        prepare(model, "float32")
    callbacks = [MixedPrecision("float32")] if door == "callback" else []
    history = model.fit(x, y, batch_size=BATCH, verbose=0, shuffle=False, callbacks=callbacks).history
    expected = of_rows if counts else of_rows[BATCH:] if door else 0.0
    assert history["loss"] == pytest.approx([np.mean(expected)], rel=1e-4)


@pytest.mark.backends("tensorflow", "torch")
def test_of_a_loss_that_is_given_to_no_scale_loss_nothing_is_said():
    """It was said to be finite."""
    keras.utils.set_random_seed(11)
    model = Regression()
    model.compile(keras.optimizers.SGD(1e-6), run_eagerly=True)
    prepare(model, "mixed_bfloat16")
    with pytest.warns(
        UserWarning, match=r"All 2 steps.*: gradients were not finite\. Whether the loss was is not known"
    ):
        model.fit(DATA[: 2 * BATCH], np.full((2 * BATCH, 1), np.inf, "float32"), batch_size=BATCH, verbose=0)


@pytest.mark.slow
@pytest.mark.backends("tensorflow")
@pytest.mark.filterwarnings("ignore:1 of 4 steps skipped")
def test_a_tf_function_as_step_of_a_model_that_is_not_built_hears_of_skipped_updates():
    """It was traced, and kept, as the model was built: without the note by which a skipped step is put back."""
    import tensorflow as tf

    class Regression(keras.Model):
        def __init__(self):
            super().__init__()
            self.norm, self.head = layers.BatchNormalization(momentum=0.5), layers.Dense(1)
            self.error = keras.metrics.MeanAbsoluteError(name="error")

        def call(self, x, training=False):
            return self.head(self.norm(x, training=training))

        @tf.function
        def train_step(self, data):
            x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
            with tf.GradientTape() as tape:
                y_pred = self(x, training=True)
                loss = self.optimizer.scale_loss(self.compute_loss(x, y, y_pred))
            self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
            self.error.update_state(y, y_pred)
            return {"error": self.error.result()}

    def trained(x):
        keras.utils.set_random_seed(5)
        model = Regression()
        model.compile("sgd", "mse", jit_compile=False)
        prepare(model, "mixed_float16", loss_scale=4.0)
        model.fit(x, x[:, :1], batch_size=BATCH, shuffle=False, verbose=0)
        return model.optimizer, [*model.variables, *model.error.variables]

    bad = np.insert(DATA, BATCH, np.full((BATCH, 6), np.inf), axis=0)
    (optimizer, found), (_, expected) = trained(bad), trained(DATA)
    assert int(optimizer.skipped_steps.value) == 1
    for value, other in zip(snapshot(found), snapshot(expected), strict=True):
        np.testing.assert_array_equal(value, other)
