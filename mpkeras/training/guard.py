"""The guard around a model's `train_step`: a skipped step leaves no trace in any variable."""

import dataclasses
import functools
import warnings
from collections.abc import Callable

import keras

from mpkeras import _keras
from mpkeras.scaling.facts import opened_step
from mpkeras.scaling.gradient_statistics import NAMES as GRADIENT_LOG_NAMES
from mpkeras.scaling.optimizer import LossScaleOptimizer
from mpkeras.training.backend import training_backend
from mpkeras.training.found import Found, optimizers_sight, paths_sight

LOG_NAMES = ("loss_scale", "skipped_steps")


def compiled_parts(model) -> list:
    """Returns the models inside `model` that hold optimizers of their own: `gan.discriminator.compile(...)`."""
    layers = _keras.flatten_layers(model)
    return [layer for layer in layers if isinstance(layer, keras.Model) and find_optimizers(layer)]


def all_optimizers(model) -> list:
    """Returns the Keras optimizers of `model` and of the compiled models inside it, each once."""
    found = [optimizer for part in (model, *compiled_parts(model)) for optimizer in find_optimizers(part).values()]
    return list({id(optimizer): optimizer for optimizer in found}.values())


def find_optimizers(model) -> dict:
    """Returns the Keras optimizers that `model` holds itself, each once, by where it holds them.

    They are attributes, or in lists, tuples and dictionaries that are. `optimizer` comes first; models with
    several (a GAN's two) keep them under names of their own: `"d_optimizer"`, `"optimizers['d']"`.
    """
    found: dict = {}
    for name, value in [("optimizer", getattr(model, "optimizer", None)), *_own_attributes(model)]:
        if isinstance(value, keras.optimizers.Optimizer):
            found.setdefault(id(value), (name, value))
        for key, item in _items(value):
            # Names are made for optimizers only: torch asks at every step, and a model holds many lists.
            if isinstance(item, keras.optimizers.Optimizer):
                found.setdefault(id(item), (f"{name}[{key!r}]", item))
    return dict(found.values())


def replace_optimizers(model, replacements: dict):
    """Puts `replacements[id(optimizer)]` wherever `model` holds `optimizer`."""
    for name, value in _own_attributes(model):
        if id(value) in replacements:
            setattr(model, name, replacements[id(value)])
            continue
        new_items = {key: replacements[id(item)] for key, item in _items(value) if id(item) in replacements}
        if new_items and isinstance(value, tuple):
            items = [new_items.get(i, item) for i, item in enumerate(value)]
            setattr(model, name, value._make(items) if hasattr(value, "_make") else tuple(items))
        else:
            for key, item in new_items.items():
                value[key] = item


def _own_attributes(model) -> list:
    """Returns `(name, value)` of the attributes of `model`, but for TensorFlow's records of them."""
    return [(name, value) for name, value in vars(model).items() if not name.startswith("_self_")]


def _items(value) -> list:
    """Returns `(key or index, item)` of a list, tuple or dictionary; of anything else none."""
    if isinstance(value, dict):
        return list(value.items())
    return list(enumerate(value)) if isinstance(value, (list, tuple)) else []


@dataclasses.dataclass
class Guard:
    """What the guard around a model's train step does, and what was there before it."""

    own_train_step: object
    rollback: bool
    # Gives layers that come into being when the model is built their policy, too.
    convert_new_layers: Callable[[], None]
    add_logs: bool = False
    add_gradient_logs: bool = False
    # Examples in the largest batch that the step was traced for or given; 0 where no shape says.
    batch_size: int = 0


def install(model, *, rollback: bool, convert_new_layers: Callable[[], None] = lambda: None, add_logs: bool = False):
    """Puts the guard around the train step that `model` has now; a guard already there is replaced."""
    uninstall(model)
    _put_around(model, Guard(vars(model).get("train_step"), rollback, convert_new_layers, add_logs))


def _put_around(model, guard):
    train_step = model.train_step
    # Keras' own step calls the model; one of the user's may build parts that no `call` reaches.
    is_keras_own = getattr(train_step, "__func__", None) is keras.Model.train_step

    found = Found(model)

    def trial_step(*args):
        with opened_step(scaling_optimizers(model)):
            return train_step(*args)

    def convert_new_layers(model):
        guard.convert_new_layers()

    @functools.wraps(train_step)
    def guarded_train_step(*args):
        guard.batch_size = max(guard.batch_size, _examples(args[-1]))
        training_backend.ensure_built(model, None if is_keras_own else trial_step, *args)
        found.ask(convert_new_layers, paths_sight)
        optimizers = _checking(model, found.ask(all_optimizers, optimizers_sight))
        step = train_step
        has_rows = training_backend.has_rows(*args)
        if has_rows is False and optimizers and all(optimizer.built for optimizer in optimizers):
            step = functools.partial(training_backend.empty_step, model, optimizers)
        if guard.rollback and optimizers:
            step = functools.partial(training_backend.step_without_trace, found, optimizers, step)
        flag = True if isinstance(has_rows, bool) else has_rows
        with opened_step(optimizers, batch_has_rows=flag, wants_statistics=guard.add_gradient_logs) as facts:
            result = step(*args)
        if guard.add_logs and optimizers:
            # One that nothing uses (`super().compile()` gives every GAN a third) is not built, and not shown.
            in_use_first = sorted(optimizers, key=lambda optimizer: not optimizer.built)
            result = training_backend.with_logs(in_use_first, result, LOG_NAMES)
        if guard.add_gradient_logs and optimizers:
            result = _with_gradient_logs(result, facts[0].statistics)
        return result

    vars(guarded_train_step)["mpkeras_guard"] = guard
    model.train_step = guarded_train_step
    # A train function built earlier holds the step as it was.
    model.train_function = None
    _note_guard(model, guard.rollback)


def _note_guard(model, is_guarded: bool):
    """Lets the model's optimizers know whether a guard is there; they tell it to the copies that files make of it."""
    for optimizer in find_optimizers(model).values():
        if isinstance(optimizer, LossScaleOptimizer):
            optimizer._note_guard(is_guarded)


def is_guarded(model) -> bool:
    step = vars(model).get("train_step")
    # A function of the user's around the guard has its attributes, too, where it was made by `functools.wraps`.
    return hasattr(step, "mpkeras_guard") and not hasattr(step.__wrapped__, "mpkeras_guard")


def guard_of(model) -> Guard | None:
    """Returns the guard around the train step of `model`, or `None`."""
    return model.train_step.mpkeras_guard if is_guarded(model) else None


def add_logs(model, *, gradients: bool = False):
    """Lets the guarded step of `model` report `loss_scale` and `skipped_steps` among its logs.

    Args:
        model: A model; nothing happens if its step is not guarded.
        gradients: Whether to report `grad_norm` and `zero_grad_fraction` of the first optimizer, too.
    """
    if not is_guarded(model):
        return
    guard = model.train_step.mpkeras_guard
    if not guard.add_logs or (gradients and not guard.add_gradient_logs):
        guard.add_logs = True
        guard.add_gradient_logs |= gradients
        trace_again(model)


def without_logs(model, result):
    """Returns what a train function of the guarded `model` returned, without what the guard added to its logs."""
    if not is_guarded(model):
        return result
    guard = model.train_step.mpkeras_guard
    added = (LOG_NAMES if guard.add_logs else ()) + (GRADIENT_LOG_NAMES if guard.add_gradient_logs else ())
    # On JAX it returns `(logs, state)`.
    logs, *state = result if isinstance(result, tuple) else (result,)
    if isinstance(logs, dict):
        logs = {name: value for name, value in logs.items() if name not in added}
    return (logs, *state) if isinstance(result, tuple) else logs


def trace_again(model):
    """Lets the next step of a guarded model be traced anew, after what it computes has changed."""
    guard = model.train_step.mpkeras_guard
    # A function of its own: JAX finds what it compiled for a function by the function.
    uninstall(model)
    _put_around(model, guard)
    model.make_train_function(force=True)


def _with_gradient_logs(result, statistics):
    # On JAX the step returns `(logs, state)`.
    logs, *state = result if isinstance(result, tuple) else (result,)
    if isinstance(logs, dict) and statistics is not None:
        logs = {**logs, **dict(zip(GRADIENT_LOG_NAMES, statistics, strict=True))}
    return (logs, *state) if isinstance(result, tuple) else logs


def uninstall(model):
    """Puts the train step back as it was before `install`; does nothing where there is no guard."""
    _note_guard(model, False)
    if not is_guarded(model):
        return
    guarded = model.train_step
    if guarded.mpkeras_guard.own_train_step is None:
        del model.train_step
    else:
        model.train_step = guarded.mpkeras_guard.own_train_step
    model.train_function = None


def seen_batch_size(model) -> int | None:
    """Returns the examples in a full batch of the guarded step; `None` where none was seen, or replicas share it."""
    if not is_guarded(model) or training_backend.is_distributed(model):
        return None
    return model.train_step.mpkeras_guard.batch_size or None


def _examples(data) -> int:
    for value in keras.tree.flatten(data):
        shape = getattr(value, "shape", None)
        # A TensorFlow shape of unknown rank has no length.
        if shape is not None and getattr(shape, "rank", 0) is not None and len(shape) and shape[0] is not None:
            return int(shape[0])
    return 0


def scaling_optimizers(model) -> list:
    """Returns the model's optimizers that check for finite steps."""
    return _checking(model, all_optimizers(model))


def _checking(model, optimizers) -> list:
    checking = [optimizer for optimizer in optimizers if isinstance(optimizer, LossScaleOptimizer)]
    if not checking:
        warnings.warn(
            f"The train step of model '{model.name}' is guarded, but none of its optimizers is a "
            "`mpkeras.LossScaleOptimizer` any more, so no step is checked. After `compile`, call "
            "`mpkeras.prepare(model)` again.",
            stacklevel=4,
        )
    return checking
