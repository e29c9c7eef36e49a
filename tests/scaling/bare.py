"""Optimizers without mpkeras around them, for comparison."""

import keras


def apply_bare(optimizer, grads, variables):
    """`optimizer.apply`; on JAX, where Keras' accumulation takes none, `stateless_apply`."""
    if keras.backend.backend() != "jax":
        optimizer.apply([keras.ops.convert_to_tensor(g) for g in grads], variables)
        return
    if not optimizer.built:
        optimizer.build(variables)
    new = optimizer.stateless_apply([v.value for v in optimizer.variables], grads, [v.value for v in variables])
    for v, value in zip([*variables, *optimizer.variables], new[0] + new[1], strict=True):
        v.assign(value)
