"""torch's guarded train step."""

import dataclasses

import keras
import numpy as np
import torch

from mpkeras import _keras
from mpkeras.policies.dtypes import as_array
from mpkeras.scaling.facts import opened_step
from mpkeras.training.defaults import (  # noqa: F401
    HeldState,
    check_scope,
    ensure_built,
    has_rows,
    in_replica_context,
    is_distributed,
    replicas,
    runs_on_host,
    track_random_states,
    variable_scope,
)
from mpkeras.training.inventory import Found, layers_and_variables, non_trainable, unlisted_states, weights_and_others
from mpkeras.training.rollback import StepInVariables, empty_step, skip  # noqa: F401


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


def first_batch(model, data):
    """As in `defaults.py`; Keras hands over a list of one batch here."""
    return data[0], data


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

    Returns:
        The logs, and whether the step was skipped.
    """
    # Trainable or frozen, a weight is copied when a layer writes it; a copy of all would double a large model.
    weights, others = found.ask(weights_and_others, layers_and_variables)
    natives = native_states(found.model)
    native_values = [state.value for state in natives]
    statistics = [v.value for v in [*non_trainable(found.model, others), *unlisted_states(found.model)]]
    # Copies: torch assigns in place.
    with torch.no_grad():
        kept = [(value, value.clone()) for value in statistics + native_values]
        step = _Step(optimizers, metrics, results)
    # Keras' Dropout without a seed draws from torch's own generator.
    old_random = global_random_states()

    @torch.no_grad()
    def restore(step_is_skipped):
        if not step_is_skipped:
            _keep_finite(kept)
            return
        for state, value in zip(natives, native_values, strict=True):
            state.hold(value)
        for value, old in kept + step.written:
            value.copy_(old)
        set_global_random_states(old_random)

    with step.watched(weights):
        try:
            logs = run()
        except BaseException:
            step.put_back(restore)
            raise
    any_skipped, any_accepted = map(any, zip(*step.end(), strict=True))
    step_is_skipped = any_skipped and not any_accepted
    restore(step_is_skipped)
    if any_skipped:
        # A metric may return the variable that it holds, which is about to change.
        logs = keras.tree.map_structure(lambda value: value.clone() if torch.is_tensor(value) else value, logs)
        with torch.no_grad():
            _, logs = step.metrics_after_skip(any_skipped, step_is_skipped, logs)
    return logs, step_is_skipped


class _Step(StepInVariables):
    def held(self, variable):
        return variable.value

    def copy(self, held):
        return held.detach().clone()

    def read(self, flag):
        return bool(flag)

    @torch.no_grad()
    def assign(self, held, value):
        held.copy_(value) if torch.is_tensor(value) else held.fill_(value)


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
    layers = _keras.flatten_layers(model, include_self=True)
    wrapped = [layer.module for layer in layers if isinstance(layer, keras.layers.TorchModuleWrapper)]
    modules = layers + [module for outer in wrapped for module in outer.modules()]
    # Each module on its own: `buffers()` of a model would name those of a shared module once more. And torch's own
    # dictionary first: to ask each of many modules without any costs ten times more.
    once = {id(module): module for module in modules if module._buffers}.values()
    return [NativeState(module, name) for module in once for name, _ in module.named_buffers(recurse=False)]


def _keep_finite(pairs):
    """Gives values that became non-finite their old ones."""
    floats = [pair for pair in pairs if pair[0].is_floating_point()]
    # The sum over all of them decides whether a closer look is needed.
    if not floats or _is_finite([value for value, _ in floats]):
        return
    for value, old in floats:
        if _is_finite([old]) and not _is_finite([value]):
            value.copy_(old)


def _is_finite(values) -> bool:
    return bool(torch.isfinite(torch.stack([value.sum(dtype=torch.float32) for value in values]).sum()))


def scale_logs(optimizers, result) -> tuple:
    """Returns the loss scale of the first of `optimizers`, and the steps that all of them skipped."""
    return float(optimizers[0].loss_scale), sum(int(o.skipped_steps.value) for o in optimizers)


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
        return parts.objective.total_loss(y, y_pred, sample_weight, parts.model.losses), y_pred

    def _update(self, forward, x, y, sample_weight):
        parts = self._parts
        variables = parts.model.trainable_variables
        for variable in variables:
            variable.value.grad = None
        loss, y_pred = forward(x, y, sample_weight)
        parts.optimizer.scale_loss(loss).backward()
        with torch.no_grad():
            parts.optimizer.apply([variable.value.grad for variable in variables], variables)
            parts.objective.update_metrics(y, keras.tree.map_structure(torch.Tensor.detach, y_pred), sample_weight)
        return {"loss": loss.detach(), "loss_scale": parts.loss_scale()}

    def _no_update(self):
        """The step for a batch without rows, as `_update`."""
        skip(self._parts.optimizer)
        return {"loss": torch.tensor(float("nan")), "loss_scale": self._parts.loss_scale()}


def held_batches(data, steps: int) -> tuple:
    """As in `_tensorflow.py`; `fit` hands on one batch in a list."""
    return [data], lambda batches: lambda: batches[0]


@torch.no_grad()
def local_tensors(structure):
    """Returns the tensors of a batch."""
    return keras.tree.map_structure(_as_tensor, structure)


def _as_tensor(value):
    if value is None:
        return None
    # To Keras' device.
    return keras.ops.convert_to_tensor(value if torch.is_tensor(value) else as_array(value))
