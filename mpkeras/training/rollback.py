"""The guard around a model's `train_step`: a skipped step leaves no trace in any variable."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable

import keras

from mpkeras.gradient_statistics import NAMES as GRADIENT_LOG_NAMES
from mpkeras.optimizers import LossScaleOptimizer
from mpkeras.step_notes import step_notes
from mpkeras.training.backend import training_backend

LOG_NAMES = ("loss_scale", "skipped_steps")


def find_optimizers(model) -> dict:
    """Returns the Keras optimizers that `model` holds, each once, by where it holds them.

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


def install(model, *, rollback: bool, convert_new_layers: Callable[[], None] = lambda: None):
    """Puts the guard around the train step that `model` has now; a guard already there is replaced."""
    uninstall(model)
    _put_around(model, Guard(vars(model).get("train_step"), rollback, convert_new_layers))


def _put_around(model, guard):
    train_step = model.train_step

    @functools.wraps(train_step)
    def guarded_train_step(*args):
        guard.batch_size = max(guard.batch_size, _examples(args[-1]))
        training_backend.ensure_built(model, *args)
        guard.convert_new_layers()
        optimizers = scaling_optimizers(model)
        if guard.rollback and optimizers:
            step = functools.partial(training_backend.step_without_trace, model, optimizers, train_step)
        else:
            step = train_step
        with _guarded_step(optimizers, guard.add_gradient_logs):
            result = step(*args)
        if guard.add_logs and optimizers:
            result = training_backend.with_logs(optimizers, result, LOG_NAMES)
        if guard.add_gradient_logs and optimizers:
            result = _with_gradient_logs(result, step_notes(optimizers[0]))
        return result

    vars(guarded_train_step)["mpkeras_guard"] = guard
    model.train_step = guarded_train_step
    # A train function built earlier holds the step as it was.
    model.train_function = None


def is_guarded(model) -> bool:
    return hasattr(vars(model).get("train_step"), "mpkeras_guard")


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


def trace_again(model):
    """Lets the next step of a guarded model be traced anew, after what it computes has changed."""
    guard = model.train_step.mpkeras_guard
    # A function of its own: JAX finds what it compiled for a function by the function.
    uninstall(model)
    _put_around(model, guard)
    model.make_train_function(force=True)


def _with_gradient_logs(result, notes):
    # On JAX the step returns `(logs, state)`.
    logs, *state = result if isinstance(result, tuple) else (result,)
    if isinstance(logs, dict) and notes.statistics is not None:
        logs = {**logs, **dict(zip(GRADIENT_LOG_NAMES, notes.statistics, strict=True))}
    notes.statistics = None
    return (logs, *state) if isinstance(result, tuple) else logs


def uninstall(model):
    """Puts the train step back as it was before `install`; does nothing where there is no guard."""
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
    checking = [o for o in find_optimizers(model).values() if isinstance(o, LossScaleOptimizer)]
    if not checking:
        warnings.warn(
            f"The train step of model '{model.name}' is guarded, but none of its optimizers is a "
            "`mpkeras.LossScaleOptimizer` any more, so no step is checked. After `compile`, call "
            "`mpkeras.prepare(model)` again.",
            stacklevel=3,
        )
    return checking


@contextlib.contextmanager
def _guarded_step(optimizers, wants_statistics: bool = False):
    """Tells the optimizers where a step begins and ends."""
    for optimizer in optimizers:
        notes = step_notes(optimizer)
        notes.in_guarded_step = True
        notes.loss_was_scaled = False
        notes.grads_are_unscaled = False
        notes.loss_flags = []
        notes.loss_scale = None
        notes.wants_statistics = wants_statistics
    try:
        yield
    finally:
        for optimizer in optimizers:
            step_notes(optimizer).in_guarded_step = False
            step_notes(optimizer).wants_statistics = False
