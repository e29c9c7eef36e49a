"""JAX's guarded train step: stateless, without a branch."""

import jax
import jax.numpy as jnp
import keras

from mpkeras._keras_private import put
from mpkeras.step_notes import step_notes
from mpkeras.training.batches import as_array
from mpkeras.training.no_strategy import (  # noqa: F401
    check_jit_compile,
    check_scope,
    ensure_built,
    in_replica_context,
    is_distributed,
    replicas,
    track_random_states,
    variable_scope,
)


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
    _, old_non_trainable, old_optimizer, old_metrics = state
    logs, (trainable, non_trainable, optimizer_variables, metrics) = train_step(state, data)
    any_skipped, step_is_skipped = _skips(optimizer, old_optimizer, optimizer_variables)

    # `stateless_apply` never sees the loss. Where the loss itself is not finite no scale cures it: the
    # optimizer's own variables become what they would be had it known.
    forward_is_at_fault = any_skipped & _loss_is_non_finite(logs)
    with keras.StatelessScope(state_mapping=list(zip(optimizer.variables, old_optimizer, strict=True))):
        _, own_values = optimizer.decide(jnp.zeros((), bool), jnp.zeros((), bool))
    optimizer_variables = list(optimizer_variables)
    positions = {id(variable): i for i, variable in enumerate(optimizer.variables)}
    for variable, value in own_values:
        i = positions[id(variable)]
        value = jnp.asarray(value, optimizer_variables[i].dtype)
        optimizer_variables[i] = jnp.where(forward_is_at_fault, value, optimizer_variables[i])
    non_trainable = _restored(non_trainable, old_non_trainable, step_is_skipped, True)
    metrics = _restored(metrics, old_metrics, step_is_skipped, any_skipped)
    logs = _logs_without_trace(model, logs, metrics, step_is_skipped)
    return logs, (trainable, non_trainable, optimizer_variables, metrics)


def _skips(optimizer, old_values, new_values):
    """Returns whether a call of `apply` was skipped, and whether all were: bool scalars of shape `()`."""
    positions = {id(variable): i for i, variable in enumerate(optimizer.variables)}
    skipped, accepted = positions[id(optimizer.skipped_steps)], positions[id(optimizer.accepted_steps)]
    any_skipped = new_values[skipped] > old_values[skipped]
    return any_skipped, any_skipped & (new_values[accepted] == old_values[accepted])


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


class CompiledStep:
    """A custom loop's step: one pure function of the state, in `jax.jit`. `parts` is a `StepParts`."""

    def __init__(self, parts):
        self._parts = parts
        self._function = None

    def __call__(self, x, y, sample_weight):
        state, data = self._inputs(x, y, sample_weight)
        if self._function is None:
            self._function = self._compiled(state)
        state, result = self._function(state, *data)
        for variables, values in zip(self._variables(), state, strict=True):
            for variable, value in zip(variables, values, strict=True):
                # Each has been through `assign` in a scope of the step, which converts and checks.
                put(variable, value)
        return result

    def compiler_ir(self, x, y, sample_weight, optimized):
        state, data = self._inputs(x, y, sample_weight)
        lowered = jax.jit(self._pure_step, donate_argnums=0).lower(state, *data)
        return lowered.compile().as_text() if optimized else lowered.as_text(dialect="hlo")

    def temporary_bytes(self, x, y, sample_weight):
        if not self._parts.jit_compile:
            return None
        state, data = self._inputs(x, y, sample_weight)
        self._function = self._function or self._compiled(state)
        analysis = self._function.lower(state, *data).compile().memory_analysis()
        return None if analysis is None else int(analysis.temp_size_in_bytes)

    def _inputs(self, x, y, sample_weight):
        state = [[variable.value for variable in variables] for variables in self._variables()]
        return _each_once(state), keras.tree.map_structure(_as_array, (x, y, sample_weight))

    def _variables(self):
        """Returns the variables of the state, in the order of its parts."""
        parts = self._parts
        metrics = [variable for metric in parts.metrics for variable in metric.variables]
        model = parts.model
        return [model.trainable_variables, model.non_trainable_variables, parts.optimizer.variables, metrics]

    def _compiled(self, state):
        if not self._parts.jit_compile:
            return self._pure_step
        shardings = None
        if keras.distribution.distribution() is not None:
            # Where a variable lies stays what its layout says, whatever the compiler would choose.
            shardings = (jax.tree_util.tree_map(lambda value: value.sharding, state), None)
        # Donated in the order in which they come out: every buffer is used again.
        return jax.jit(self._pure_step, donate_argnums=0, out_shardings=shardings)

    def _pure_step(self, state, x, y, sample_weight):
        parts = self._parts
        model, optimizer = parts.model, parts.optimizer
        trainable, non_trainable, optimizer_values, metric_values = state
        scope_of_optimizer = list(zip(optimizer.variables, optimizer_values, strict=True))

        def scaled_loss_of(trainable):
            y_pred, updated, losses = model.stateless_call(
                trainable, non_trainable, x, return_losses=True, **parts.call_options
            )
            loss = parts.total_loss(y, y_pred, sample_weight, losses)
            with keras.StatelessScope(state_mapping=scope_of_optimizer):
                scaled_loss = optimizer.scale_loss(loss)
            return scaled_loss, (loss, y_pred, updated)

        (_, (loss, y_pred, updated)), grads = jax.value_and_grad(scaled_loss_of, has_aux=True)(trainable)
        if parts.checks:
            # What `stateless_apply` cannot see by itself.
            step_notes(optimizer).loss_flags = [jnp.isfinite(loss)]
        trainable, new_optimizer = optimizer.stateless_apply(optimizer_values, grads, trainable)

        metric_variables = self._variables()[3]
        with keras.StatelessScope(list(zip(metric_variables, metric_values, strict=True))) as scope:
            parts.update_metrics(y, y_pred, sample_weight)
        new_metrics = [scope.get_current_value(variable) for variable in metric_variables]
        skipped = jnp.zeros((), bool)
        if parts.checks:
            any_skipped, skipped = _skips(optimizer, optimizer_values, new_optimizer)
        if parts.guards:
            updated = _restored(updated, non_trainable, skipped, True)
            new_metrics = _restored(new_metrics, metric_values, skipped, any_skipped)
        mapping = list(zip(optimizer.variables, new_optimizer, strict=True))
        mapping += list(zip(metric_variables, new_metrics, strict=True))
        with keras.StatelessScope(state_mapping=mapping):
            result = {"loss": loss, "loss_scale": parts.loss_scale(), **parts.metric_results(), "skipped": skipped}
        return [trainable, updated, new_optimizer, new_metrics], result


def local_tensors(structure):
    """Returns the tensors of a batch."""
    return keras.tree.map_structure(_as_array, structure)


def _each_once(state):
    """Returns `state` with a copy where two variables hold one array, which cannot be donated twice."""
    seen = set()

    def once(value):
        if id(value) in seen:
            return jnp.copy(value)
        seen.add(id(value))
        return value

    return [[once(value) for value in values] for values in state]


def _as_array(value):
    if value is None or isinstance(value, jax.Array):
        return value
    value = as_array(value)
    distribution = keras.distribution.distribution()
    if distribution is None:
        return jnp.asarray(value)
    layout = distribution.get_data_layout(value.shape)
    # Each process brings the rows of its own devices.
    return jax.make_array_from_process_local_data(layout.backend_layout, value)
