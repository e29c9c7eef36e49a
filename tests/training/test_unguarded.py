"""Optimizers that somebody else than the model holds: wrapped where they can be reached, named where they cannot."""

import warnings

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.callbacks import MixedPrecision
from mpkeras.training import inventory
from tests.cases import first_quick
from tests.training.models import loss_and_gradients, without_gradients

OWN_STEPS = pytest.mark.backends("tensorflow", "torch")  # Keras' step on JAX carries `model.optimizer` alone
RNG = np.random.default_rng(2)
X = RNG.normal(size=(24, 5)).astype("float32")
Y = X[:, :1].copy()


class Holder:
    """An agent, a trainer: an object of the user's own."""

    def __init__(self, held):
        self.held = held


HELD = {
    "by a helper": (lambda model, o: setattr(model, "agent", Holder(o)), lambda model: model.agent.held),
    "in a list of a helper": (lambda model, o: setattr(model, "agent", Holder([o])), lambda model: model.agent.held[0]),
    "by a helper of a helper in a dictionary": (
        lambda model, o: setattr(model, "agents", {"one": Holder(Holder((o,)))}),
        lambda model: model.agents["one"].held.held[0],
    ),
    "by a layer": (lambda model, o: setattr(model.first, "own", o), lambda model: model.first.own),
    "in a dictionary of a layer": (
        lambda model, o: setattr(model.last, "own", {3: o}),
        lambda model: model.last.own[3],
    ),
    "in a dictionary in a dictionary": (
        lambda model, o: setattr(model, "own", {"all": {"both": o}}),
        lambda model: model.own["all"]["both"],
    ),
    "in a tuple in a list of a helper": (
        lambda model, o: setattr(model, "agent", Holder([(0, (o, "sgd"))])),
        lambda model: model.agent.held[0][1][0],
    ),
}


class Own(keras.Model):
    """Trains by `update(model, data)`, beside the optimizer that it is compiled with."""

    def __init__(self, update):
        super().__init__()
        self.update = update
        self.first, self.last = keras.layers.Dense(3, "tanh"), keras.layers.Dense(1)

    def call(self, x):
        return self.last(self.first(x))

    def train_step(self, data):
        return {"own_loss": self.update(self, data)}


def updated_by(optimizer_of):
    def update(model, data):
        x, y = data
        optimizer, weights = optimizer_of(model), model.trainable_variables

        def loss_of():
            return keras.ops.mean(keras.ops.square(keras.ops.cast(model(x), "float32") - y))

        loss, grads = loss_and_gradients(loss_of, weights, optimizer.scale_loss)
        with without_gradients():
            optimizer.apply(grads, weights)
        return loss

    return update


def made(update, *optimizers):
    keras.utils.set_random_seed(5)
    model = Own(update)
    model(X[:2])
    for optimizer in optimizers:
        optimizer.build(model.trainable_variables)
    model.compile("sgd", "mse")
    return model


def fit(model, door, x=X, **options):
    callbacks = [MixedPrecision("mixed_float16", loss_scale=256.0)] if door == "callback" else []
    if door == "prepare":
        mpkeras.prepare(model, "mixed_float16", loss_scale=256.0)
    return model.fit(x, Y, batch_size=8, shuffle=False, verbose=0, callbacks=callbacks, **options).history


@OWN_STEPS
@pytest.mark.slow
@pytest.mark.parametrize("door", ["prepare", "callback"])
@pytest.mark.parametrize("held", HELD)
@pytest.mark.filterwarnings("ignore:1 of 3 steps skipped")
def test_an_optimizer_is_wrapped_wherever_it_is_held(held, door):
    hold, held_by = HELD[held]
    plain = keras.optimizers.SGD(0.1, momentum=0.5)
    model = made(updated_by(held_by), plain)
    hold(model, plain)
    x = X.copy()
    x[9, 2] = np.inf
    history = fit(model, door, x)
    wrapper = held_by(model)
    assert isinstance(wrapper, mpkeras.LossScaleOptimizer) and wrapper.inner_optimizer is plain
    assert int(wrapper.skipped_steps) == 1 == history["skipped_steps"][0] and int(wrapper.iterations) == 2
    assert all(np.isfinite(weight).all() for weight in model.get_weights())


@pytest.mark.slow
@OWN_STEPS
@pytest.mark.parametrize("door", ["prepare", "callback"])
@pytest.mark.parametrize("held", ["by a closure", "made in the first step"])
@pytest.mark.parametrize("optimizer", [keras.optimizers.SGD, keras.optimizers.Lion])
def test_an_optimizer_out_of_reach_is_named_once(optimizer, held, door):
    plain = optimizer(0.01)

    def late(model):
        if not hasattr(model, "late"):
            model.late = plain
        return model.late

    model = made(updated_by((lambda model: plain) if held == "by a closure" else late), plain)
    with pytest.warns(UserWarning, match="moves weights, but no `mpkeras.LossScaleOptimizer` was called") as told:
        fit(model, door, epochs=2)
    assert sum("moves weights" in str(warning.message) for warning in told) == 1


def nothing(model, data):
    return keras.ops.mean(keras.ops.cast(model(data[0]), "float32"))


def assigns_weights(model, data):
    model.last.bias.assign(model.last.bias + 0.5)
    return nothing(model, data)


class SetsWeights(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        self.model.set_weights([weight + 0.5 for weight in self.model.get_weights()])

    def on_train_batch_end(self, batch, logs=None):
        self.on_train_batch_begin(batch)


@pytest.mark.slow
@OWN_STEPS
@pytest.mark.parametrize("door", ["prepare", "callback"])
@pytest.mark.parametrize("is_there", ["its user's wrapper", "an update every third step", "assignments", "a callback"])
def test_nothing_is_said_where_nothing_is_wrong(is_there, door):
    wrapper = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.1), loss_scale=64.0)
    update = {"assignments": assigns_weights, "a callback": nothing}.get(is_there, updated_by(lambda model: wrapper))
    calls = []

    def every_third(model, data):
        calls.append(data)
        return update(model, data) if len(calls) % 3 == 0 else nothing(model, data)

    model = made(every_third if is_there == "an update every third step" else update, wrapper)
    if is_there == "an update every third step":
        model.run_eagerly = True
    if door == "prepare":
        mpkeras.prepare(model, "mixed_bfloat16")
    callbacks = [MixedPrecision("mixed_bfloat16")] if door == "callback" else []
    for _ in range(2):
        model.fit(X, Y, batch_size=8, verbose=0, callbacks=[*callbacks, *[SetsWeights()] * (is_there == "a callback")])


@OWN_STEPS
@pytest.mark.parametrize("moves", first_quick([False, True]))
def test_weights_that_the_first_step_makes_are_not_moved_by_it(moves):
    plain = keras.optimizers.SGD(0.1)
    model = Own(updated_by(lambda model: plain) if moves else nothing)
    # With a graph where they are moved.
    model.compile("sgd", "mse", run_eagerly=not moves, jit_compile=False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        # The model is not built: its step makes the weights.
        fit(model, "prepare")
    assert any("moves weights" in str(warning.message) for warning in told) == moves


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
def test_a_plain_fit_and_a_frozen_one_are_quiet(policy):
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((5,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)])
    for trainable in (True, False):
        model.layers[-1].trainable = trainable
        model.compile(keras.optimizers.SGD(0.1, use_ema=True), "mse")
        mpkeras.prepare(model, policy)
        for _ in range(2):
            function = model.fit(X, Y, batch_size=8, verbose=0) and model.train_function
        assert function.__name__ != "looking"


@pytest.mark.backends("jax")  # elsewhere a variable has its value at any time
@pytest.mark.parametrize("policy", ["mixed_float16", "float32"])
@pytest.mark.parametrize("loop", ["donates", "leaks"])
def test_a_loop_of_the_users_own_that_has_the_values_of_its_optimizer_stops_no_fit(loop, policy):
    import jax

    other = mpkeras.LossScaleOptimizer(keras.optimizers.SGD(0.1, momentum=0.5), loss_scale=None)
    weight = keras.Variable(np.ones((3,), "float32"))
    other.build([weight])
    values = [variable.value for variable in other.variables]
    if loop == "donates":
        step = jax.jit(lambda state: other.stateless_apply(state, [weight.value], [weight.value]), donate_argnums=0)
        weights, state = step(values)
    else:
        jax.jit(lambda grad: other.apply([grad], [weight]))(values[-1])
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    mpkeras.prepare(model, policy)
    assert len(model.fit(X, Y, batch_size=8, epochs=2, verbose=0).history["loss"]) == 2
    assert int(model.optimizer.iterations) == 6
    if loop == "donates":
        [applied] = [value for v, value in zip(other.variables, state, strict=True) if v is other.iterations]
        assert int(applied) == 1 and np.array_equal(weights[0], np.full(3, 0.9, "float32"))


def test_what_is_no_helper_is_left_alone():
    other = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    other.compile("sgd", "mse")
    model = made(nothing)
    model.helper, model.kind, model.data = Holder(Holder(None)), Holder, {"x": X}
    model.helper.held.held = Holder(Holder(keras.optimizers.SGD(0.1)))
    model.helper.model, model.helper.me, other.note = Holder(keras.optimizers.SGD), model.helper, 3
    assert inventory.optimizers_held_elsewhere(model) == []
    plain = model.helper.other = keras.optimizers.SGD(0.1)
    assert inventory.optimizers_held_elsewhere(model) == [plain]
