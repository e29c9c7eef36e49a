"""Physics-informed network on JAX: the loss holds second derivatives of the network by its input."""

import jax
import keras
import numpy as np
from keras import layers

import mpkeras


def train(policy="mixed_float16", seed=0):
    """Solves u'' = -u with u(0) = 0, u'(0) = 1. Returns the network and its largest error about the sine."""
    keras.utils.set_random_seed(seed)
    net = keras.Sequential([keras.Input((1,)), layers.Dense(24, "tanh"), layers.Dense(24, "tanh"), layers.Dense(1)])
    mpkeras.apply_policy(net, policy)
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.Adam(3e-3))
    optimizer.build(net.trainable_variables)

    def solution(weights, t):
        """`t` is a scalar; what is returned fulfils both conditions."""
        return t + t**2 * net.stateless_call(weights, [], t.reshape(1, 1))[0][0, 0]

    def scaled_loss(weights, state, t):
        u = jax.vmap(lambda t: solution(weights, t))(t)
        acceleration = jax.vmap(jax.grad(jax.grad(lambda t: solution(weights, t))))(t)  # not scaled
        loss = ((acceleration + u) ** 2).mean()
        with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, state, strict=True))):
            return optimizer.scale_loss(loss)

    @jax.jit
    def step(weights, state, t):
        return optimizer.stateless_apply(state, jax.grad(scaled_loss)(weights, state, t), weights)

    weights = [variable.value for variable in net.trainable_variables]
    state = [variable.value for variable in optimizer.variables]
    for _ in range(240):
        weights, state = step(weights, state, np.random.uniform(0, 3, 64).astype("float32"))
    for variable, value in zip([*net.trainable_variables, *optimizer.variables], [*weights, *state], strict=True):
        variable.assign(value)
    t = np.linspace(0, 3, 50, dtype="float32")
    return net, float(np.abs(jax.vmap(lambda t: solution(weights, t))(t) - np.sin(t)).max())


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
