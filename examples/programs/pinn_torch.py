"""Physics-informed network on torch: the loss holds second derivatives of the network by its input."""

import keras
import numpy as np
import torch
from keras import layers

import mpkeras


def train(policy="mixed_float16", seed=0):
    """Solves u'' = -u with u(0) = 0, u'(0) = 1. Returns the network and its largest error about the sine."""
    keras.utils.set_random_seed(seed)
    net = keras.Sequential([keras.Input((1,)), layers.Dense(24, "tanh"), layers.Dense(24, "tanh"), layers.Dense(1)])
    mpkeras.apply_policy(net, policy)
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.Adam(3e-3))
    optimizer.build(net.trainable_variables)

    def solution(t):
        return t + t**2 * net(t)  # fulfils both conditions

    for _ in range(240):
        t = torch.tensor(np.random.uniform(0, 3, (64, 1)).astype("float32"), requires_grad=True)
        u = solution(t)
        (speed,) = torch.autograd.grad(u.sum(), t, create_graph=True)  # not scaled: it is part of the equation
        (acceleration,) = torch.autograd.grad(speed.sum(), t, create_graph=True)
        net.zero_grad()
        optimizer.scale_loss(((acceleration + u) ** 2).mean()).backward()
        with torch.no_grad():
            optimizer.apply([variable.value.grad for variable in net.trainable_variables], net.trainable_variables)
    t = torch.linspace(0, 3, 50)[:, None]
    return net, float((solution(t) - torch.sin(t)).detach().abs().max())


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
