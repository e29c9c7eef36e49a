"""Models, doors, faults and steps that the tests of training have in common."""

import contextlib
import warnings

import keras
import numpy as np
import pytest

import mpkeras
from mpkeras.callbacks import MixedPrecision
from tests.step_modes import FIT_MODES

BACKEND = keras.backend.backend()


def number(tensor):
    return np.asarray(keras.ops.convert_to_numpy(keras.ops.convert_to_tensor(tensor)))


def spoiled(x):
    """Returns a copy of a batch with one infinite number."""
    x = x.copy()
    x[1, 2] = np.inf
    return x


def are_finite(variables) -> bool:
    return all(np.isfinite(number(variable.value)).all() for variable in variables)


def dropout_model():
    """All that a skipped step must leave alone: weights, statistics, random numbers."""
    keras.utils.set_random_seed(11)
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, activation="relu")(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dropout(0.5, seed=5)(x)
    return keras.Model(inputs, keras.layers.Dense(2)(x))


class MakesItsLayers(keras.layers.Layer):
    """As many layers do: what it is made of comes into being when it is built."""

    def __init__(self, units=12):
        super().__init__()
        self.units = units

    def build(self, shape):
        self.norm = keras.layers.BatchNormalization(momentum=0.5, name="norm")
        self.dense = keras.layers.Dense(self.units, name="dense")
        self.norm.build(shape)
        self.dense.build(shape)
        self.built = True

    def call(self, x, training=False):
        return self.dense(self.norm(x, training=training))


class AddsNoise(keras.layers.Layer):
    """Draws from the generator that random functions without a seed share, as steps of diffusion models do."""

    def call(self, x):
        return x + keras.random.uniform(keras.ops.shape(x), dtype=x.dtype)


# The ways into `fit`: `make_train_step` is the other one.
DOORS = ("prepare", "callback", "autoprepare", "the line")


def warned_of(about: str, run) -> list[str]:
    """Returns the warnings of `run()` in which `about` stands."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in caught if about in str(warning.message)]


def made_by(door, make, policy, optimizer="sgd", loss="mse", **options):
    """Returns what `make()` makes, compiled, and the callbacks of its `fit`: it trains by `policy` through a door.

    By the line the policy stays in force, as in a program.
    """
    if door == "the line":
        mpkeras.set_global_policy(policy)
    model = make()
    with mpkeras.autoprepare(policy) if door == "autoprepare" else contextlib.nullcontext():
        model.compile(optimizer, loss, **options)
    if door == "prepare":
        mpkeras.prepare(model, policy)
    return model, [MixedPrecision(policy)] if door == "callback" else []


COMPILED = [
    pytest.param(flag, id="compiled" if flag else "not compiled")
    for flag in ((True, False) if BACKEND != "torch" else (False,))
]
# Compiled first where the backend is made for it; with TensorFlow a graph is quicker to make than a program of XLA.
GRAPH_FIRST = COMPILED[::-1] if BACKEND == "tensorflow" else COMPILED
# Each way to take steps in each of its modes, for `stepper`.
WAYS = [pytest.param("fit", *mode.values, id=f"fit, {mode.id}") for mode in FIT_MODES]
WAYS += [pytest.param("step", {"jit_compile": case.values[0]}, id=f"step, {case.id}") for case in COMPILED]


def stepper(way, options, model, optimizer, policy, loss_scale=None, rollback=True, loss="mse"):
    """Returns a function that takes a step on `(x, y)` and returns its loss, and the optimizer of the steps."""
    if way == "fit":
        model.compile(optimizer, loss, **options)
        mpkeras.prepare(model, policy, loss_scale=loss_scale, rollback=rollback)
        return lambda x, y: float(np.ravel(model.train_on_batch(x, y))[0]), model.optimizer
    mpkeras.apply_policy(model, policy)
    if loss_scale is not None:
        optimizer = mpkeras.LossScaleOptimizer(optimizer, loss_scale=loss_scale)
    step = mpkeras.make_train_step(model, optimizer, loss, rollback=rollback, **options)
    return lambda x, y: float(number(step(x, y)["loss"])), step.optimizer


def loss_and_gradients(loss_of, variables, scale_loss=lambda loss: loss):
    """Returns the loss that `loss_of()` returns and its gradients, as a loop takes them on TensorFlow or torch."""
    if BACKEND == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = loss_of()
            scaled_loss = scale_loss(loss)
        return loss, tape.gradient(scaled_loss, variables)
    import torch

    loss = loss_of()
    grads = torch.autograd.grad(scale_loss(loss), [variable.value for variable in variables])
    return loss.detach(), list(grads)


def without_gradients():
    """Returns the context in which a loop applies its gradients."""
    if BACKEND != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.no_grad()


def scaled_losses(loss_of, optimizer, optimizer_variables):
    """Returns a function for `jax.grad`: the scaled sum of the losses of a stateless step, and the losses."""

    def scaled(trainable):
        losses = loss_of(trainable)
        with keras.StatelessScope(list(zip(optimizer.variables, optimizer_variables, strict=True))):
            return optimizer.scale_loss(sum(losses)), losses

    return scaled
