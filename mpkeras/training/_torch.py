"""torch's guarded train step."""

import dataclasses
from typing import Any

import keras
import numpy as np
import torch

from mpkeras import _keras
from mpkeras.conversion._torch import modules_with_buffers
from mpkeras.policies.dtypes import as_array
from mpkeras.policies.heads import has_own_call
from mpkeras.scaling.facts import opened_step
from mpkeras.training.defaults import (  # noqa: F401
    HeldState,
    are_of_this_program,
    build_before_trace,
    can_be_read,
    check_is_outermost,
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
from mpkeras.training.inventory import Inventory, helpers, layers
from mpkeras.training.rollback import Outcome, StepInVariables, empty_step, skip  # noqa: F401


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


def step_without_trace(inventory, optimizers, train_step, data):
    """Runs `train_step(data)`; where every update of it was skipped, puts all other state back."""
    model = inventory.model
    step = _Step(inventory, optimizers, lambda: model.metrics, model.get_metrics_result)
    data = of_its_own(data)
    return step.run(lambda: train_step(data))[0]


def of_its_own(data):
    """Returns `data` with copies of its tensors: those that were given may be taken again, or be kept.

    Keras' losses multiply sample weights by a mask in place, and so may a `call` do with its inputs (`x /= 255`).
    """
    device = keras.ops.empty((0,)).device

    def copied(value):
        # Keras copies those on another device to this one by itself.
        if not torch.is_tensor(value) or value.device != device:
            return value
        clone = value.clone()
        _keras.copy_mask(value, clone)
        return clone

    return keras.tree.map_structure(copied, data)


class _Step(StepInVariables):
    def __init__(self, inventory, optimizers, metrics, results):
        kept = _kept_by_users(inventory.model, inventory.ask(helpers, layers, inventory.beside))
        self._tensors = [state for state in kept if torch.is_tensor(state.value)]
        self._numbers = [(state, state.value) for state in kept if not torch.is_tensor(state.value)]
        super().__init__(inventory, optimizers, metrics, results)
        self._native_values = [state.value for state in self._natives]
        # Keras' Dropout without a seed draws from torch's own generator.
        self._random = global_random_states()

    def place(self, variable):
        return variable.value

    def copy(self, place):
        # A true copy: torch assigns in place.
        return place.detach().clone()

    def read(self, flag):
        return bool(flag)

    @torch.no_grad()
    def assign(self, place, value):
        place.copy_(value) if torch.is_tensor(value) else place.fill_(value)

    @torch.no_grad()
    def choose(self, place, old, takes_old):
        if takes_old:
            place.copy_(old)

    def is_float(self, place):
        return place.is_floating_point()

    @torch.no_grad()
    def is_finite(self, places):
        return bool(torch.isfinite(torch.stack([place.sum(dtype=torch.float32) for place in places]).sum()))

    def outcome(self, flags):
        any_skipped, any_accepted = map(any, zip(*flags, strict=True))
        return Outcome(any_skipped, any_skipped and not any_accepted, not (any_skipped or any_accepted))

    @torch.no_grad()
    def where_needed(self, any_skipped, restored, logs):
        return restored() if any_skipped or not self.statistics_are_finite() else (False, logs)

    def native_states(self, model):
        return [*native_states(model), *self._tensors]

    def _restore(self, step_is_skipped, is_without_update=False):
        if step_is_skipped:
            for state, value in zip(self._natives, self._native_values, strict=True):
                state.hold(value)
            for state, value in self._numbers:
                # An attribute that was `None` may hold a layer by now, which is made once.
                if value is not None or _is_number(state.value) or torch.is_tensor(state.value):
                    state.hold(value)
            set_global_random_states(self._random)
        super()._restore(step_is_skipped, is_without_update)


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

    def set_apart(self):
        """Puts a copy in the place of the buffer, which is returned for `hold`.

        Written anew, it would be refused by a backward pass that reads it.
        """
        tensor = self.value
        self.module._buffers[self.name] = tensor.clone()
        return tensor

    def hold(self, tensor):
        """Makes `tensor` the buffer again, where the module has put another in its place."""
        if self.value is not tensor:
            setattr(self.module, self.name, tensor)


def native_states(model) -> list:
    """Returns the buffers of the torch modules in `model`: wrapped ones, and Keras' layers themselves."""
    # Each module on its own: `buffers()` of a model would name those of a shared module once more.
    modules = modules_with_buffers(_keras.flatten_layers(model, include_self=True))
    return [NativeState(module, name) for module in modules for name, _ in module.named_buffers(recurse=False)]


# torch's own dictionaries in a module: of weights, and of buffers, which are native states.
_OF_MODULES = ("_parameters", "_buffers", "_modules")
_LONG = 1000


@dataclasses.dataclass
class KeptValue:
    """A tensor or a number that an object keeps as an attribute, or in a list or a dictionary that is one.

    Before its first step there may be `None`.
    """

    holder: Any
    key: Any

    @property
    def value(self):
        return self.holder[self.key]

    def hold(self, value):
        """Makes `value` the one that is kept again, where another has been put in its place, or a list was emptied."""
        if isinstance(self.holder, list) and self.key >= len(self.holder):
            self.holder.append(value)
        else:
            self.holder[self.key] = value


def _kept_by_users(model, helper_objects) -> list[KeptValue]:
    """Returns the tensors and numbers that layers of the user's, models among them, and helper objects keep.

    No tensor among them belongs to a backward pass.
    """
    inside = _keras.flatten_layers(model, include_self=True)
    of_users = [layer for layer in inside if has_own_call(layer) or not _keras.is_of_keras(type(layer))]
    holders: list = [vars(holder) for holder in (*of_users, *helper_objects)]
    for attributes in tuple(holders):
        values = [value for name, value in attributes.items() if name not in _OF_MODULES]
        # A long one holds words or numbers, and would be looked through at each step.
        holders += [value for value in values if isinstance(value, (list, dict)) and len(value) <= _LONG]
    kept = []
    for holder in holders:
        for key, value in holder.items() if isinstance(holder, dict) else enumerate(holder):
            if value is None or _is_number(value) or (torch.is_tensor(value) and _can_be_written(value)):
                kept.append(KeptValue(holder, key))
    return kept


def _is_number(value) -> bool:
    # No `bool`: it says of something that it is built.
    return type(value) in (int, float)


def _can_be_written(tensor) -> bool:
    if isinstance(tensor, torch.nn.Parameter) or tensor.requires_grad or tensor.is_meta or tensor.is_inference():
        return False
    if tensor.layout != torch.strided:
        return False
    # An expanded tensor has one number in several places.
    return all(step or size < 2 for step, size in zip(tensor.stride(), tensor.shape, strict=True))


def scale_logs(optimizers, result) -> tuple:
    """Returns the loss scale of the first of `optimizers`, and the steps that all of them skipped."""
    return float(optimizers[0].loss_scale), sum(int(o.skipped_steps.value) for o in optimizers)


class CompiledStep:
    """A custom loop's step: forward pass and loss in `torch.compile`, the rest op by op. `parts` is a `StepParts`."""

    def __init__(self, parts):
        self._parts = parts
        self._inventory = Inventory(parts.model, parts.objective.given_losses)
        self._forward = torch.compile(self._loss) if parts.jit_compile else self._loss

    def __call__(self, x, y, sample_weight):
        return self._step(self._forward, x, y, sample_weight)

    def op_by_op(self, data):
        """As in `_jax.py`; the values are in the variables."""
        return self._step(self._loss, *data)

    def _step(self, forward, x, y, sample_weight):
        parts = self._parts
        x, y, sample_weight = keras.tree.map_structure(_as_tensor, of_its_own((x, y, sample_weight)))
        moving_before = {parts.BEFORE: parts.packed([variable.value for variable in parts.moving])}

        def run():
            if has_rows(x) or not parts.checks:
                return {**self._update(forward, x, y, sample_weight), **parts.metric_results()}
            return {**self._no_update(), **parts.metric_results()}

        with opened_step([parts.optimizer] if parts.checks else []):
            if parts.guards:
                guarded = _Step(self._inventory, [parts.optimizer], lambda: parts.metrics, parts.metric_results)
                result, skipped, _ = guarded.run(run)
                return {**result, **moving_before, "skipped": torch.tensor(skipped)}
            return {**run(), **moving_before, "skipped": parts.last_step_skipped()}

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


def held_batches(data, model) -> tuple:
    """As in `_tensorflow.py`; `fit` hands on one batch in a list."""
    return [data], lambda batches: lambda: batches[0]


@torch.no_grad()
def local_tensors(structure):
    """Returns the tensors of a batch, which nobody else holds."""
    return keras.tree.map_structure(_as_tensor, of_its_own(structure))


def _as_tensor(value):
    if value is None:
        return None
    # To Keras' device.
    return keras.ops.convert_to_tensor(value if torch.is_tensor(value) else as_array(value))
