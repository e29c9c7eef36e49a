"""JAX's guarded train step: stateless, without a branch."""

import contextlib

import jax.numpy as jnp
import keras

from mpkeras import _keras_private


def check_jit_compile(model, jit_compile):
    """JAX compiles under every distribution: nothing to refuse."""
    del model, jit_compile


def ensure_built(model, state, data):
    """Keras builds the model before the train step here."""
    del model, state, data


def variable_scope(model):
    """Variables belong to no scope here."""
    del model
    return contextlib.nullcontext()


def track_random_states(model):
    """`state_dict` carries the random generators here."""
    del model


def global_random_states() -> dict:
    """Keras draws from variables here."""
    return {}


def set_global_random_states(states: dict):
    del states


def step_without_trace(model, optimizers, train_step, state, data):
    """Runs `train_step(state, data)`; where its update was skipped, takes all other state from before.

    A non-trainable float variable that became non-finite although the step was applied (BatchNormalization
    fed 1e25) keeps its old value, too. Keras' JAX trainer carries the state of `model.optimizer` alone.
    """
    if model.optimizer not in optimizers:
        return train_step(state, data)
    optimizer = model.optimizer
    positions = {id(variable): i for i, variable in enumerate(optimizer.variables)}
    skipped = positions[id(optimizer.skipped_steps)]
    applied = positions[id(_keras_private.step_count(optimizer.inner_optimizer))]
    _, old_non_trainable, old_optimizer, old_metrics = state
    logs, (trainable, non_trainable, optimizer_variables, metrics) = train_step(state, data)

    any_skipped = optimizer_variables[skipped] > old_optimizer[skipped]
    step_is_skipped = any_skipped & (optimizer_variables[applied] == old_optimizer[applied])
    # `stateless_apply` never sees the loss. Where the loss itself is not finite no scale cures it: the
    # optimizer's scale goes back to where it was.
    forward_is_at_fault = any_skipped & _loss_is_non_finite(logs)
    optimizer_variables = list(optimizer_variables)
    for variable in optimizer.scale_state.values():
        i = positions[id(variable)]
        optimizer_variables[i] = jnp.where(forward_is_at_fault, old_optimizer[i], optimizer_variables[i])
    non_trainable = _restored(non_trainable, old_non_trainable, step_is_skipped, True)
    metrics = _restored(metrics, old_metrics, step_is_skipped, any_skipped)
    logs = _logs_without_trace(model, logs, metrics, step_is_skipped)
    return logs, (trainable, non_trainable, optimizer_variables, metrics)


def _loss_is_non_finite(logs):
    """Whether a loss among the step's logs, `"loss"` or a name that ends in it, is not finite."""
    is_bad = jnp.zeros((), bool)
    if isinstance(logs, dict):
        for name, value in logs.items():
            if name.endswith("loss"):
                is_bad |= ~jnp.isfinite(jnp.sum(jnp.asarray(value, jnp.float32)))
    return is_bad


def _restored(values, old_values, step_is_skipped, non_finite_too):
    restored = []
    for value, old in zip(values, old_values, strict=True):
        if value is old:
            # Not assigned in this step (frozen weights): nothing to choose.
            restored.append(value)
            continue
        takes_old = step_is_skipped
        if jnp.issubdtype(value.dtype, jnp.floating):
            takes_old |= _is_finite(old) & ~_is_finite(value) & non_finite_too
        restored.append(jnp.where(takes_old, old, value))
    return restored


def _is_finite(values):
    return jnp.isfinite(jnp.sum(values, dtype=jnp.float32))


def _logs_without_trace(model, logs, metrics, step_is_skipped):
    mapping = list(zip(model.metrics_variables, metrics, strict=True))
    with keras.StatelessScope(state_mapping=mapping):
        metric_logs = model.get_metrics_result()
    if not isinstance(logs, dict) or set(logs) != set(metric_logs):
        return logs
    return keras.tree.map_structure(
        lambda clean, value: jnp.where(step_is_skipped, clean, value), metric_logs, dict(logs)
    )


def with_logs(optimizers, result, names):
    logs, state = result
    if not isinstance(logs, dict):
        return result
    optimizer = optimizers[0]
    mapping = list(zip(optimizer.variables, state[2], strict=True))
    with keras.StatelessScope(state_mapping=mapping):
        values = (optimizer.loss_scale, optimizer.skipped_steps.value)
    return {**logs, **dict(zip(names, values, strict=True))}, state
