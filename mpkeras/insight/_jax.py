"""Gradients of a loss by the tensors inside a model, on JAX."""

import jax
import jax.numpy as jnp
import keras


def run_with_gradients(run, variables):
    """As in `_tensorflow.py`; traced twice, as JAX differentiates by arguments: here by zeros that are added."""
    shapes = []

    def note_shape(tensor):
        shapes.append((tensor.shape, tensor.dtype))
        return tensor

    def run_in_scope(values, *taps):
        mapping = list(zip(variables, values, strict=True))
        with keras.StatelessScope(state_mapping=mapping, collect_losses=True):
            return run(*taps)

    values = [variable.value for variable in variables]
    has_loss = jax.eval_shape(lambda values: run_in_scope(values, note_shape, note_shape), values)[0] is not None

    def loss_of(zeros, values):
        remaining = iter(zeros)

        def tap(tensor):
            return tensor + next(remaining)

        loss, results = run_in_scope(values, tap, tap)
        return (loss if has_loss else jnp.zeros(())), results

    zeros = [jnp.zeros(shape, dtype) for shape, dtype in shapes]
    # Op by op, as what is compiled for one operation serves the next batch, too: `jit` would begin anew each time.
    _, backward, results = jax.vjp(loss_of, zeros, values, has_aux=True)
    if not has_loss:
        return results, [None] * len(zeros), [None] * len(variables)
    return results, *backward(jnp.ones(()))
