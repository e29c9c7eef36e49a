"""A loop of your own on JAX: `stateless_call` and `stateless_apply`, in one `jax.jit`."""

import jax
import keras
import numpy as np
from keras import layers

import mpkeras


def train(policy="mixed_float16", seed=0):
    """Returns the model and its loss."""
    keras.utils.set_random_seed(seed)
    x = np.random.normal(size=(512, 8)).astype("float32")
    y = ((x[:, 0] * x[:, 1] > 0) + (x[:, 2] > 0)).astype("int32")
    model = keras.Sequential([keras.Input((8,)), layers.Dense(32, "relu"), layers.Dense(3, "softmax")])
    mpkeras.apply_policy(model, policy)
    optimizer = mpkeras.LossScaleOptimizer(keras.optimizers.Adam(1e-2))
    optimizer.build(model.trainable_variables)
    loss_fn = keras.losses.SparseCategoricalCrossentropy()

    def scaled_loss(weights, others, state, x, y):
        y_pred, others = model.stateless_call(weights, others, x, training=True)
        loss = loss_fn(y, y_pred)
        with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, state, strict=True))):
            return optimizer.scale_loss(loss), (loss, others)

    @jax.jit
    def step(weights, others, state, x, y):
        grads, (loss, others) = jax.grad(scaled_loss, has_aux=True)(weights, others, state, x, y)
        weights, state = optimizer.stateless_apply(state, grads, weights)
        return weights, others, state, loss

    parts = [model.trainable_variables, model.non_trainable_variables, optimizer.variables]
    values = [[variable.value for variable in part] for part in parts]
    for _ in range(10):
        order = np.random.permutation(512)
        for start in range(0, 512, 32):
            rows = order[start : start + 32]
            *values, _ = step(*values, x[rows], y[rows])
    for part, new in zip(parts, values, strict=True):
        for variable, value in zip(part, new, strict=True):
            variable.assign(value)
    return model, float(loss_fn(y, model(x)))


if __name__ == "__main__":
    for name in ("float32", "mixed_float16", "mixed_bfloat16"):
        print(name, train(name)[1])
