"""What a capsule holds of a skipped step: its batch, all state before it, and what it takes to make the model anew.

After a skipped step all state is what it was before, but for what the step notes of itself: the loss scale's own
state, counters, and the trackers that show the losses of skipped steps. These few single numbers are read before a
step; all else is read after it, and only of a step that was skipped.
"""

import keras
import numpy as np
from keras import ops

from mpkeras import _keras
from mpkeras.conversion.apply import converted_by
from mpkeras.conversion.float8 import CURRENT, float8_change, multiplies_in_float8
from mpkeras.conversion.plan import layers_of
from mpkeras.devices import environment
from mpkeras.training import capsule_file, metric_states
from mpkeras.training.state import named_variables, state_dict

# Among what a step returns within mpkeras: the values of `moving_variables` before it.
BEFORE = "before the step"
_NOT_DENSE = ("RaggedTensor", "SparseTensor", "BCOO", "IndexedSlices", "PerReplica", "DistributedValues")


def moving_variables(optimizers, metrics) -> list:
    """Returns the variables that a skipped step changes, and those that count updates; all hold single numbers.

    Args:
        optimizers: The `LossScaleOptimizer`s that update in the step.
        metrics: The metrics of the step.
    """
    found = []
    for optimizer in optimizers:
        of_others = {id(variable) for variable in (*optimizer.inner_optimizer.variables, *optimizer.step_outcome)}
        own = [variable for variable in optimizer.variables if id(variable) not in of_others]
        found += [variable for variable in own if len(variable.shape) == 0]
        found.append(_keras.step_count(optimizer.inner_optimizer))
    for metric in metric_states.flat(metrics):
        if metric_states.tracks_losses(metric):
            found += metric.variables
    return found


def capsule_of_fit(path, model, optimizers, before: dict, *, data, logs: dict, step: int, epoch: int) -> int:
    """Writes the capsule of a step of `fit` that was skipped just now, and returns its bytes.

    Args:
        path: Where it goes.
        model: The model, whose variables hold the values after the step.
        optimizers: The `LossScaleOptimizer`s that update in the step.
        before: The values of `moving_variables` before the step, by `id`.
        data: The batch, as the train step takes it.
        logs: What the step returned.
        step, epoch: Counted from 0.
    """
    settings = {"jit_compile": bool(model.jit_compile), "run_eagerly": bool(model.run_eagerly)}
    content = {"kind": "fit", "step": step, "epoch": epoch, **settings}
    content |= _serialized("compile", lambda: model.get_compile_config() or None)
    arrays: dict = {}
    for name, value in sorted(logs.items()) if isinstance(logs, dict) else []:
        if ops.is_tensor(value) or isinstance(value, (float, int)):
            arrays[f"said/logs/{name}"] = as_numpy(value)
    arrays["said/loss_scale"] = as_numpy(optimizers[0].loss_scale)
    arrays["said/skipped"] = np.array(True)
    content["batch"] = _encoded(data, arrays)
    return _write(path, model, None, optimizers, model.metrics, before, content, arrays)


def capsule_of_step(path, parts, before: dict, *, batch, result: dict, step: int) -> int:
    """Writes the capsule of a skipped step of `make_train_step`, and returns its bytes.

    Args:
        path, before, step: As in `capsule_of_fit`.
        parts: The `StepParts`.
        batch: `(x, y, sample_weight)`.
        result: What the step returned.
    """
    model, optimizer = parts.model, parts.optimizer
    content = {"kind": "step", "step": step, "epoch": None, "options": parts.options()}
    loss, metrics = parts.objective.given
    for name, thing in (("loss", loss), ("metrics", metrics)):
        content |= _serialized(name, lambda thing=thing: keras.saving.serialize_keras_object(thing))
    content |= _serialized("optimizer", lambda: _config_of(optimizer))
    arrays = {}
    for name, value in result.items():
        key = name if name in ("loss", "loss_scale", "skipped") else f"logs/{name}"
        if ops.is_tensor(value):
            arrays[f"said/{key}"] = as_numpy(value)
    content["batch"] = _encoded(batch, arrays)
    extra = [variable for metric in parts.metrics for variable in metric.variables]
    return _write(path, model, extra, [optimizer], parts.metrics, before, content, arrays)


def _write(path, model, extra, optimizers, metrics, before, content, arrays) -> int:
    of_state = (model, None, ()) if extra is None else (model, optimizers, extra)
    names = {id(variable): name for name, variable in named_variables(*of_state).items()}
    after = state_dict(*of_state)
    state = dict(after)
    for variable in moving_variables(optimizers, metrics):
        name = names[id(variable)]
        value = before.get(id(variable), _initial_value(variable, optimizers))
        state[name] = np.asarray(value, after[name].dtype)
    counts = [_keras.step_count(optimizer.inner_optimizer) for optimizer in optimizers]
    updated = any(state[names[id(count)]] != after[names[id(count)]] for count in counts)
    arrays |= {f"state/{name}": array for name, array in state.items()}
    arrays |= {f"after/{name}": array for name, array in after.items() if array.tobytes() != state[name].tobytes()}
    policy = converted_by(model)
    content |= {
        "model_name": model.name,
        "layers": layer_dtypes(model),
        # The gradients of other calls of the window, or another optimizer, have moved the weights in this very step.
        "is_exact": not updated,
        "versions": environment(),
        **_serialized("model", lambda: keras.saving.serialize_keras_object(model)),
        **_serialized("policy", lambda: None if policy is None else keras.saving.serialize_keras_object(policy)),
    }
    return capsule_file.write(path, content, arrays)


def layer_dtypes(model) -> list:
    """Returns `[path, class, compute dtype, variable dtype]` of each layer that computes, as JSON can hold it.

    Behind them stands "float8" of those that multiply in it, and "delayed" of those that scale by past steps.
    """
    return [
        [layer.path or layer.name, type(layer).__name__, layer.compute_dtype, layer.variable_dtype]
        + (["float8"] + ["delayed"] * (float8_change(layer) != CURRENT)) * multiplies_in_float8(layer)
        for layer in computing_layers(model)
    ]


def computing_layers(model) -> list:
    """Returns the layers of `model`, itself included, but for the inputs."""
    return [layer for layer in layers_of(model) if not isinstance(layer, keras.layers.InputLayer)]


def _config_of(optimizer) -> dict:
    config = keras.saving.serialize_keras_object(optimizer)
    # The wrapper writes the length of its window there, for plain Keras; `options` has it.
    inner = optimizer.inner_optimizer
    config["config"]["inner_optimizer"]["config"]["gradient_accumulation_steps"] = inner.gradient_accumulation_steps
    return config


def _serialized(name: str, serialize) -> dict:
    """Returns `{name: what serialize() returns}`, or why there is none: a capsule of half a description still helps."""
    try:
        return {name: serialize()}
    except Exception as error:  # of a user's own `get_config`
        return {name: None, f"why_no_{name}": f"{type(error).__name__}: {str(error)[:300]}"}


def _initial_value(variable, optimizers):
    """Returns the value with which a variable came into being in the very first step."""
    for optimizer in optimizers:
        for name, own in optimizer.scale_state.items():
            if own is variable:
                return {"step_counter": 0, **optimizer.loss_scale_rule.initial_state()}[name]
    return 0


def as_numpy(value):
    return np.array(ops.convert_to_numpy(value))


def _encoded(structure, arrays: dict):
    """Returns `structure` as JSON can hold it; what is in it goes into `arrays`."""
    if structure is None:
        return None
    if isinstance(structure, dict):
        return {"dict": [[str(key), _encoded(value, arrays)] for key, value in structure.items()]}
    if isinstance(structure, (list, tuple)):
        kind = "tuple" if isinstance(structure, tuple) else "list"
        return {kind: [_encoded(value, arrays) for value in structure]}
    if type(structure).__name__ in _NOT_DENSE:
        raise ValueError(
            f"Expected a batch of dense tensors. Received: a {type(structure).__name__}, which a capsule cannot hold. "
            "Make it dense before the model, or pad it."
        )
    name = f"batch/{sum(key.startswith('batch/') for key in arrays)}"
    arrays[name] = as_numpy(structure) if ops.is_tensor(structure) else np.asarray(structure)
    return {"array": name}


def decoded(encoded, arrays: dict):
    """Returns the structure that `_encoded` took apart. Raises `ValueError` where it is none."""
    if encoded is None:
        return None
    if isinstance(encoded, dict) and len(encoded) == 1:
        ((kind, value),) = encoded.items()
        if kind == "array" and isinstance(value, str) and value in arrays:
            return arrays[value]
        if kind == "dict" and isinstance(value, list) and all(isinstance(v, list) and len(v) == 2 for v in value):
            return {str(key): decoded(item, arrays) for key, item in value}
        if kind in ("list", "tuple") and isinstance(value, list):
            items = [decoded(item, arrays) for item in value]
            return tuple(items) if kind == "tuple" else items
    raise ValueError(
        f"Expected a batch of arrays in lists, tuples and dictionaries. Received: {str(encoded)[:80]}. Ask for the "
        "file again: it is not what mpkeras writes."
    )
