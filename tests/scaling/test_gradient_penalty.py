"""P31: the gradient penalty of WGAN-GP in mixed_float16: inner gradient unscaled, in float32; outer loss scaled.

References:
    Gulrajani et al., 2017, https://arxiv.org/abs/1704.00028.
"""

import keras
import numpy as np
import pytest
from keras import layers, ops

from mpkeras.scaling.optimizer import LossScaleOptimizer
from tests.step_modes import applier

COMPARED_AT = (0, 20, 100, 499)


def new_critic(policy):
    keras.utils.set_random_seed(3)
    keras.config.set_dtype_policy(policy)
    critic = keras.Sequential(
        [
            keras.Input((8,)),
            layers.Dense(32, activation="softplus"),
            layers.Dense(32, activation="softplus"),
            layers.Dense(1),
        ]
    )
    keras.config.set_dtype_policy("float32")
    return critic


def batches(steps):
    rng = np.random.default_rng(0)
    for _ in range(steps):
        real, fake = rng.normal(1.0, size=(32, 8)), rng.normal(size=(32, 8))
        share = rng.uniform(size=(32, 1))
        mixed = share * real + (1 - share) * fake
        yield [ops.convert_to_tensor(array.astype("float32")) for array in (real, fake, mixed)]


def total(scores):
    # The sum, not the mean: each sample's gradient is then of its own size, which float16 holds.
    return ops.sum(ops.cast(scores, "float32"))


def penalty_of(grads):
    norms = ops.sqrt(ops.sum(ops.square(ops.cast(grads, "float32")), axis=-1))
    return ops.mean(ops.square(norms - 1.0))


def difference(on_real, on_fake):
    return ops.mean(ops.cast(on_fake, "float32")) - ops.mean(ops.cast(on_real, "float32"))


# Each backend's function returns the penalty and the scaled gradients: of the whole loss, or of the penalty alone.


def tensorflow_gradients(critic, optimizer):
    import tensorflow as tf

    @tf.function
    def gradients(real, fake, mixed, penalty_alone):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner_tape:
                inner_tape.watch(mixed)
                score = total(critic(mixed, training=True))
            penalty = penalty_of(inner_tape.gradient(score, mixed))
            loss = 10.0 * penalty
            if not penalty_alone:
                loss += difference(critic(real, training=True), critic(fake, training=True))
            scaled_loss = optimizer.scale_loss(loss)
        return penalty, tape.gradient(scaled_loss, critic.trainable_variables)

    return gradients


def torch_gradients(critic, optimizer):
    import torch

    def gradients(real, fake, mixed, penalty_alone):
        mixed = mixed.detach().requires_grad_(True)
        score = total(critic(mixed, training=True))
        penalty = penalty_of(torch.autograd.grad(score, mixed, create_graph=True)[0])
        loss = 10.0 * penalty
        if not penalty_alone:
            loss = loss + difference(critic(real, training=True), critic(fake, training=True))
        variables = [v.value for v in critic.trainable_variables]
        grads = torch.autograd.grad(optimizer.scale_loss(loss), variables, allow_unused=True)
        return penalty.detach(), [
            torch.zeros_like(v) if g is None else g for g, v in zip(grads, variables, strict=True)
        ]

    return gradients


def jax_gradients(critic, optimizer):
    import jax

    def scores(weights, x):
        return critic.stateless_call(weights, [], x, training=True)[0]

    def scaled_loss(weights, state, real, fake, mixed, penalty_alone):
        with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, state, strict=True))):
            penalty = penalty_of(jax.grad(lambda x: total(scores(weights, x)))(mixed))
            loss = 10.0 * penalty
            if not penalty_alone:
                loss += difference(scores(weights, real), scores(weights, fake))
            return optimizer.scale_loss(loss), penalty

    compiled = jax.jit(jax.grad(scaled_loss, has_aux=True), static_argnums=5)

    def gradients(*batch):
        weights, state = [v.value for v in critic.trainable_variables], [v.value for v in optimizer.variables]
        grads, penalty = compiled(weights, state, *batch)
        return penalty, grads

    return gradients


def gradient_function(critic, optimizer):
    optimizer.build(critic.trainable_variables)
    make = {"tensorflow": tensorflow_gradients, "torch": torch_gradients, "jax": jax_gradients}
    return make[keras.backend.backend()](critic, optimizer)


def flat(grads):
    # The penalty alone does not depend on the last bias.
    return np.concatenate([ops.convert_to_numpy(g).astype("float64").ravel() for g in grads if g is not None])


@pytest.mark.slow
def test_the_scale_stays_up_and_the_penalty_is_that_of_float32():
    critic, reference = new_critic("mixed_float16"), new_critic("float32")
    optimizer = LossScaleOptimizer(keras.optimizers.Adam(1e-3), dynamic_growth_steps=50)
    gradients = gradient_function(critic, optimizer)
    # Op by op 500 steps take minutes on JAX.
    apply = applier(optimizer, critic.trainable_variables, "jit" if keras.backend.backend() == "jax" else "eager")
    fixed = gradient_function(critic, LossScaleOptimizer("sgd", loss_scale=2.0**8))
    expected = gradient_function(reference, keras.optimizers.SGD())
    scales = []
    for i, batch in enumerate(batches(500)):
        if i in COMPARED_AT:
            # The same weights and the same batch, by plain Keras in float32.
            reference.set_weights(critic.get_weights())
            (penalty, scaled_grads), (penalty32, grads32) = fixed(*batch, True), expected(*batch, True)
            assert float(penalty) == pytest.approx(float(penalty32), rel=0.01), i
            grads32 = flat(grads32)
            error = np.linalg.norm(flat(scaled_grads) / 2.0**8 - grads32) / np.linalg.norm(grads32)
        assert error < 0.01, (i, error)
        apply(gradients(*batch, False)[1])
        scales.append(float(optimizer.loss_scale))
    assert min(scales) > 2.0**8
    # It grew again, so that it was tried how high it may be.
    assert 0 < int(optimizer.skipped_steps) < 20
