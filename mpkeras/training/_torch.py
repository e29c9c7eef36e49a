"""torch's guarded train step."""

import dataclasses

import keras
import numpy as np
import torch

from mpkeras import _keras
from mpkeras.policies.dtypes import as_array
from mpkeras.scaling.facts import opened_step
from mpkeras.training import metric_states
from mpkeras.training.inventory import Found, Sight, non_trainable, states_sight, unlisted_states, variables_sight
from mpkeras.training.single_program import (  # noqa: F401
    check_jit_compile,
    check_scope,
    ensure_built,
    in_replica_context,
    is_distributed,
    replicas,
    track_random_states,
    variable_scope,
)
from mpkeras.training.written_weights import watched_weights


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


def has_rows(data) -> bool:
    """Returns whether a batch has rows; of several ranks, each asks for itself only whether it can compute."""
    leaves = [leaf for leaf in keras.tree.flatten(data) if leaf is not None]
    first = leaves[0] if leaves else None
    return first is None or not hasattr(first, "shape") or len(first.shape) == 0 or first.shape[0] != 0


def empty_step(model, optimizers, data):
    """The train step of a batch without rows: nothing is computed, and a skipped step is counted."""
    del data
    for optimizer in optimizers:
        _skip(optimizer)
    return model.get_metrics_result()


@torch.no_grad()
def _skip(optimizer):
    no = torch.zeros_like(optimizer.skipped_steps.value, dtype=torch.bool)
    facts = dataclasses.replace(optimizer.facts, batch_has_rows=no)
    for variable, value in optimizer.decide(facts, no)[1]:
        variable.assign(value)


def step_without_trace(found, optimizers, train_step, data):
    """Runs `train_step(data)`; where every update of it was skipped, puts all other state back."""
    model = found.model
    logs, _ = _run_without_trace(
        found, lambda: model.metrics, optimizers, lambda: train_step(data), model.get_metrics_result
    )
    return logs


def _run_without_trace(found, metrics, optimizers, run, results):
    """Runs a step; where its updates were skipped, no other variable shows afterwards that it ran.

    A non-trainable float variable that became non-finite although the step was applied (BatchNormalization
    fed 1e25) keeps its old value, too. Where `run` raises before an update counted, all is put back.

    Args:
        found: The `Found` of the model that is trained.
        metrics: Function that returns the metrics of the step.
        optimizers: Those that update in it.
        run: Function that runs the step and returns its logs.
        results: Function that returns what `metrics` say now, by name.

    Returns:
        The logs, and whether the step was skipped.
    """
    # Trainable or frozen, a weight is copied when a layer writes it; a copy of all would double a large model.
    own_weights, others = found.ask(_variables, variables_sight)
    statistics = [v.value for v in non_trainable(found.model, others)]
    statistics += [v.value for v in found.ask(unlisted_states, states_sight)]
    natives = found.ask(native_states, _modules_sight)
    native_values = [state.value for state in natives]
    statistics += native_values
    # Copies: torch assigns in place.
    with torch.no_grad():
        old_statistics = [value.clone() for value in statistics]
        flat_metrics = metric_states.flat(metrics())
        metrics_before = [_values_of(metric) for metric in flat_metrics]
        metrics_begun = [metric_states.at_begin(*pair) for pair in zip(flat_metrics, metrics_before, strict=True)]
        for metric, values in zip(flat_metrics, metrics_begun, strict=True):
            if metric_states.tracks_losses(metric):
                _assign_values(metric, values)
    # Keras' Dropout without a seed draws from torch's own generator.
    old_random = global_random_states()
    outcomes = [optimizer.step_outcome for optimizer in optimizers]
    around = [_opened(optimizer) for optimizer in optimizers]

    @torch.no_grad()
    def restore(step_is_skipped):
        if step_is_skipped:
            for state, value in zip(natives, native_values, strict=True):
                state.hold(value)
        _restore(statistics, old_statistics, step_is_skipped, True)
        _restore([v.value for v, _ in weights], [old for _, old in weights], step_is_skipped, False)
        if step_is_skipped:
            set_global_random_states(old_random)

    with watched_weights(own_weights, optimizers, _old_weight) as weights:
        try:
            logs = run()
        except BaseException:
            counted = any(bool(accepted.value) for _, accepted in outcomes)
            _close(outcomes, around)
            restore(not counted)
            for metric, values in zip(flat_metrics, metrics_before, strict=True):
                if not counted:
                    _assign_values(metric, values)
            raise
    any_skipped = any(bool(skipped.value) for skipped, _ in outcomes)
    any_accepted = any(bool(accepted.value) for _, accepted in outcomes)
    _close(outcomes, around)
    step_is_skipped = any_skipped and not any_accepted
    restore(step_is_skipped)
    if any_skipped:
        with torch.no_grad():
            states = zip(flat_metrics, metrics_before, metrics_begun, strict=True)
            logs = _logs_after_skip(metrics(), list(states), step_is_skipped, logs, results)
    return logs, step_is_skipped


def _logs_after_skip(metrics, states, step_is_skipped: bool, logs, results):
    """Gives metrics the values they have after a step in which an update was skipped; returns what the logs say.

    Args:
        metrics: The metrics of the step.
        states: For each metric in them, itself, its values before the step and those that the step found.
        step_is_skipped: Whether all updates were skipped.
        logs: What the step returned.
        results: Function that returns what the metrics say, by name.
    """
    in_step = metric_states.results_now(results)
    # A metric may return the variable that it holds, which is about to change.
    logs = keras.tree.map_structure(lambda value: value.clone() if torch.is_tensor(value) else value, logs)
    flags = torch.tensor(True), torch.tensor(step_is_skipped)
    new_states = []
    for metric, before, begun in states:
        device = before[0].device if before else "cpu"
        values = metric_states.after_skip(
            metric, before, begun, _values_of(metric), *(flag.to(device) for flag in flags)
        )
        _assign_values(metric, values)
        new_states.append((metric, values))
    nothing_counted = metric_states.nothing_counted(new_states)
    shown = metric_states.shown(metrics, metric_states.results_now(results), nothing_counted)
    return metric_states.replaced(logs, in_step, shown)


def _values_of(metric) -> list:
    return [variable.value.clone() for variable in metric.variables]


@torch.no_grad()
def _assign_values(metric, values):
    for variable, value in zip(metric.variables, values, strict=True):
        variable.value.copy_(value)


def _weights(model) -> list:
    """Returns what layers and wrapped torch modules made to be trained, frozen now or not."""
    wrapped = [v for layer in _wrappers(model) for v in layer.variables]
    return list({id(variable): variable for variable in _keras.weights(model) + wrapped}.values())


def _variables(model) -> tuple:
    """Returns the variables of `model`: its weights, and all others."""
    weights = _weights(model)
    known = {id(variable) for variable in weights}
    return weights, [variable for variable in model.variables if id(variable) not in known]


def _wrappers(model) -> list:
    layers = _keras.flatten_layers(model, include_self=True)
    return [layer for layer in layers if isinstance(layer, keras.layers.TorchModuleWrapper)]


@dataclasses.dataclass
class NativeState:
    """A buffer of a torch module (the running mean of a `torch.nn.BatchNorm1d`), with what Keras' variables have."""

    module: torch.nn.Module
    name: str

    @property
    def value(self):
        return getattr(self.module, self.name)

    @property
    def shape(self) -> tuple:
        return tuple(self.value.shape)

    @property
    def dtype(self) -> str:
        return keras.backend.standardize_dtype(self.value.dtype)

    def assign(self, value):
        self.value.copy_(torch.from_numpy(np.array(value)))

    def hold(self, tensor):
        """Makes `tensor` the buffer again, where the module has put another in its place."""
        if self.value is not tensor:
            setattr(self.module, self.name, tensor)


def native_states(model) -> list:
    """Returns the buffers of the torch modules in `model`: wrapped ones, and Keras' layers themselves."""
    # Each module on its own: `buffers()` of a model would name those of a shared module once more.
    return [NativeState(module, name) for module in _modules(model) for name, _ in module.named_buffers(recurse=False)]


def _modules(model) -> list:
    """Returns the torch modules in `model`, Keras' layers among them, each once."""
    layers = _keras.flatten_layers(model, include_self=True)
    modules = layers + [module for layer in _wrappers(model) for module in layer.module.modules()]
    return list({id(module): module for module in modules}.values())


def _modules_sight(model) -> Sight:
    """What the torch modules in `model` are, and the names of the buffers of each."""
    modules = _modules(model)
    sight = Sight(modules)
    for module in modules:
        # torch's own dictionary: to ask each of many modules without any costs ten times more.
        if module._buffers:
            sight.add([module, *(name for name, _ in module.named_buffers(recurse=False))])
    return sight


def _old_weight(variable):
    return _keras.unscoped_value(variable).detach().clone()


def _opened(optimizer):
    """Lets `apply` note the outcome of the step. Returns what a guarded step around it has noted, or `None`."""
    optimizer.facts.wants_outcome = True
    if not optimizer.facts.is_nested:
        return None
    around = [bool(flag.value) for flag in optimizer.step_outcome]
    _clear(optimizer.step_outcome)
    return around


def _close(outcomes, around):
    """Clears the outcome of the step. What it did, it did for a guarded step around it, too."""
    for outcome, flags in zip(outcomes, around, strict=True):
        if flags is None:
            _clear(outcome)
        else:
            for flag, was_set in zip(outcome, flags, strict=True):
                flag.value.logical_or_(torch.tensor(was_set, device=flag.value.device))


def _clear(outcome):
    for flag in outcome:
        flag.value.zero_()


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
        self._found = Found(parts.model)
        self._forward = torch.compile(self._loss) if parts.jit_compile else self._loss

    def __call__(self, x, y, sample_weight):
        return self._step(self._forward, x, y, sample_weight)

    def op_by_op(self, data):
        """As in `_jax.py`; the values are in the variables."""
        return self._step(self._loss, *data)

    def _step(self, forward, x, y, sample_weight):
        parts = self._parts
        x, y, sample_weight = keras.tree.map_structure(_as_tensor, (x, y, sample_weight))
        before = {parts.BEFORE: parts.packed([variable.value for variable in parts.moving])}

        def run():
            if has_rows(x) or not parts.checks:
                return {**self._update(forward, x, y, sample_weight), **parts.metric_results()}
            return {**self._no_update(), **parts.metric_results()}

        with opened_step([parts.optimizer] if parts.checks else []):
            if parts.guards:
                result, skipped = _run_without_trace(
                    self._found, lambda: parts.metrics, [parts.optimizer], run, parts.metric_results
                )
                return {**result, **before, "skipped": torch.tensor(skipped)}
            return {**run(), **before, "skipped": parts.last_step_skipped()}

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

    def _update(self, forward, x, y, sample_weight):
        parts = self._parts
        variables = parts.model.trainable_variables
        for variable in variables:
            variable.value.grad = None
        loss, y_pred = forward(x, y, sample_weight)
        parts.optimizer.scale_loss(loss).backward()
        with torch.no_grad():
            parts.optimizer.apply([variable.value.grad for variable in variables], variables)
            parts.update_metrics(y, keras.tree.map_structure(torch.Tensor.detach, y_pred), sample_weight)
        return {"loss": loss.detach(), "loss_scale": parts.loss_scale()}

    def _no_update(self):
        """What `_update` is for a batch without rows."""
        _skip(self._parts.optimizer)
        return {"loss": torch.tensor(float("nan")), "loss_scale": self._parts.loss_scale()}


@torch.no_grad()
def local_tensors(structure):
    """Returns the tensors of a batch."""
    return keras.tree.map_structure(_as_tensor, structure)


def _as_tensor(value):
    if value is None:
        return None
    # To Keras' device.
    return keras.ops.convert_to_tensor(value if torch.is_tensor(value) else as_array(value))
