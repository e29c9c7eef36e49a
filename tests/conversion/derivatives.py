"""Derivatives on each backend, which may be nested."""

import keras
from keras import ops


def derivatives(function, x, weights=()):
    """Returns the gradients of the scalar `function(x)`: by the tensor `x`, and by each of the variables `weights`.

    On TensorFlow and torch the gradient by a variable that plays no part is `None`.
    """
    x = ops.convert_to_tensor(x)
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        return tape.gradient(y, [x, *(v.value for v in weights)])
    if keras.backend.backend() == "jax":
        import jax

        def with_values(x, values):
            if not weights:
                return function(x)
            with keras.StatelessScope(state_mapping=list(zip(weights, values, strict=True))):
                return function(x)

        by_x, by_weights = jax.grad(with_values, argnums=(0, 1))(x, [v.value for v in weights])
        return [by_x, *by_weights]
    import torch

    x = x if x.requires_grad else x.detach().requires_grad_()
    inputs = [x, *(v.value for v in weights)]
    return torch.autograd.grad(function(x), inputs, create_graph=True, allow_unused=True)
