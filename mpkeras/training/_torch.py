"""torch's guarded train step."""

import keras
import torch

from mpkeras import _keras_private
from mpkeras.training.batches import as_array
from mpkeras.training.forward_writes import unlisted_states, watched_weights
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
    """Returns torch's own generators, from which Keras' Dropout without a seed draws here; by device."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {device: state.numpy().copy() for device, state in states.items()}


def set_global_random_states(states: dict):
    for device, state in states.items():
        setter = torch.set_rng_state if device == "cpu" else torch.cuda.set_rng_state
        setter(torch.from_numpy(state))


def step_without_trace(model, optimizers, train_step, data):
    """Runs `train_step(data)`; where every update of it was skipped, puts all other state back."""
    metrics = [variable.value for variable in model.metrics_variables]
    logs, step_is_skipped = _run_without_trace(model, metrics, optimizers, lambda: train_step(data))
    if step_is_skipped:
        metric_logs = model.get_metrics_result()
        if isinstance(logs, dict) and set(logs) == set(metric_logs):
            return metric_logs
    return logs


def _run_without_trace(model, metrics, optimizers, run):
    """Returns `run()` and whether its step was skipped; then no other variable shows that it ran.

    A non-trainable float variable that became non-finite although the step was applied (BatchNormalization
    fed 1e25) keeps its old value, too.
    """
    frozen = _keras_private.frozen_weights(model)
    statistics = [v.value for v in model.non_trainable_variables if id(v) not in frozen]
    statistics += [v.value for v in unlisted_states(model)]
    frozen_values = [v.value for v in model.non_trainable_variables if id(v) in frozen]
    # Copies: torch assigns in place.
    with torch.no_grad():
        old_statistics = [value.clone() for value in statistics]
        old_frozen = [value.clone() for value in frozen_values]
        old_metrics = [value.clone() for value in metrics]
    # Keras' Dropout without a seed draws from torch's own generator.
    old_random = global_random_states()
    before = [_counters(optimizer) for optimizer in optimizers]
    with watched_weights(model, _old_weight) as weights:
        result = run()
    after = [_counters(optimizer) for optimizer in optimizers]
    any_skipped = any(new[0] > old[0] for new, old in zip(after, before, strict=True))
    any_accepted = any(new[1] > old[1] for new, old in zip(after, before, strict=True))
    step_is_skipped = any_skipped and not any_accepted
    with torch.no_grad():
        _restore(statistics, old_statistics, step_is_skipped, True)
        _restore(frozen_values, old_frozen, step_is_skipped, False)
        _restore(metrics, old_metrics, step_is_skipped, any_skipped)
        _restore([v.value for v, _ in weights], [old for _, old in weights], step_is_skipped, False)
    if step_is_skipped:
        set_global_random_states(old_random)
    return result, step_is_skipped


def _old_weight(variable):
    return _keras_private.unscoped_value(variable).detach().clone()


def _counters(optimizer):
    return int(optimizer.skipped_steps.value), int(optimizer.accepted_steps.value)


def _restore(values, old_values, step_is_skipped, non_finite_too):
    if step_is_skipped:
        for value, old in zip(values, old_values, strict=True):
            value.copy_(old)
        return
    floats = [pair for pair in zip(values, old_values, strict=True) if pair[0].is_floating_point()]
    # One sum over all of them decides whether a closer look is needed.
    if not non_finite_too or not floats or _is_finite([value for value, _ in floats]):
        return
    for value, old in floats:
        if _is_finite([old]) and not _is_finite([value]):
            value.copy_(old)


def _is_finite(values) -> bool:
    return bool(torch.isfinite(torch.stack([value.sum(dtype=torch.float32) for value in values]).sum()))


def with_logs(optimizers, logs, names):
    if not isinstance(logs, dict):
        return logs
    values = (float(optimizers[0].loss_scale), sum(int(o.skipped_steps.value) for o in optimizers))
    return {**logs, **dict(zip(names, values, strict=True))}


class CompiledStep:
    """A custom loop's step: forward pass and loss in `torch.compile`, the rest op by op. `parts` is a `StepParts`."""

    def __init__(self, parts):
        self._parts = parts
        self._forward = torch.compile(self._loss) if parts.jit_compile else self._loss

    def __call__(self, x, y, sample_weight):
        parts = self._parts
        x, y, sample_weight = keras.tree.map_structure(_as_tensor, (x, y, sample_weight))
        if parts.guards:
            metrics = [variable.value for metric in parts.metrics for variable in metric.variables]
            result, skipped = _run_without_trace(
                parts.model, metrics, [parts.optimizer], lambda: self._update(x, y, sample_weight)
            )
            skipped = torch.tensor(skipped)
        else:
            result, skipped = self._update(x, y, sample_weight), parts.last_step_skipped()
        return {**result, **parts.metric_results(), "skipped": skipped}

    def compiler_ir(self, x, y, sample_weight, optimized):
        raise ValueError(
            "Expected a backend with a whole-program compiler. Received: `compiler_ir` on torch, which compiles "
            "parts of a step. Use the TensorFlow or the JAX backend to read a compiled step."
        )

    def temporary_bytes(self, x, y, sample_weight):
        return None

    def _loss(self, x, y, sample_weight):
        parts = self._parts
        y_pred = parts.model(x, **parts.call_options)
        return parts.total_loss(y, y_pred, sample_weight, parts.model.losses), y_pred

    def _update(self, x, y, sample_weight):
        parts = self._parts
        variables = parts.model.trainable_variables
        for variable in variables:
            variable.value.grad = None
        loss, y_pred = self._forward(x, y, sample_weight)
        parts.optimizer.scale_loss(loss).backward()
        with torch.no_grad():
            parts.optimizer.apply([variable.value.grad for variable in variables], variables)
            parts.update_metrics(y, keras.tree.map_structure(torch.Tensor.detach, y_pred), sample_weight)
        return {"loss": loss.detach(), "loss_scale": parts.loss_scale()}


@torch.no_grad()
def local_tensors(structure):
    """Returns the tensors of a batch."""
    return keras.tree.map_structure(_as_tensor, structure)


def _as_tensor(value):
    if value is None:
        return None
    # To Keras' device.
    return keras.ops.convert_to_tensor(value if torch.is_tensor(value) else as_array(value))
