"""The guard around a model's `train_step`, by which a skipped step leaves no trace, and what keeps it there."""

import contextlib
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable

import keras

from mpkeras import _replaced
from mpkeras.scaling.facts import GRADIENT_LOG_NAMES, opened_step
from mpkeras.scaling.optimizer import LossScaleOptimizer
from mpkeras.training.backend import training_backend
from mpkeras.training.inventory import (
    Found,
    all_optimizers,
    compiled_parts,
    find_optimizers,
    optimizers_sight,
    paths_sight,
)
from mpkeras.training.skip_watch import SkipWatch

LOG_NAMES = ("loss_scale", "skipped_steps")


@dataclasses.dataclass
class Guard:
    """What the guard around a model's train step does."""

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
    _put_around(model, Guard(rollback, convert_new_layers, add_logs))


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
        with opened_step(optimizers, batch_has_rows=has_rows, wants_statistics=guard.add_gradient_logs) as facts:
            result = step(*args)
        if guard.add_logs and optimizers:
            # One that nothing uses (`super().compile()` gives every GAN a third) is not built, and not shown.
            in_use_first = sorted(optimizers, key=lambda optimizer: not optimizer.built)
            result = training_backend.with_logs(in_use_first, result, LOG_NAMES)
        if guard.add_gradient_logs and optimizers:
            result = _with_gradient_logs(result, facts[0].statistics)
        return result

    vars(guarded_train_step)["mpkeras_guard"] = guard
    _replaced.replace(model, "train_step", guarded_train_step, kind="guard")
    # A train function built earlier holds the step as it was.
    model.train_function = None
    _note_guard(model, guard.rollback)


def _note_guard(model, is_guarded: bool):
    """Lets the model's optimizers know whether a guard is there; they tell it to the copies that files make of it."""
    for optimizer in find_optimizers(model).values():
        if isinstance(optimizer, LossScaleOptimizer):
            optimizer._note_guard(is_guarded)


def is_guarded(model) -> bool:
    return _replaced.is_replaced(model, "train_step", "guard")


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
    _replaced.restore(model, "train_step", kind="guard")
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


# On a prepared model, with which it goes: the functions in it hold the model.
_PREPARED = "_mpkeras_prepared"


class _Prepared:
    """How a model was prepared, and what it does by itself since."""

    def __init__(self, prepare_again: Callable[[], None], guard_again: Callable[[], None], is_explicit: bool):
        self.prepare_again = prepare_again
        self.guard_again = guard_again
        self.is_explicit = is_explicit
        self.watch = SkipWatch()
        # How many calls of `fit` are under way, one in the callbacks of another among them.
        self.fits = 0
        # In what dtype the optimizer's state was when the train function was made.
        self.slot_dtype: str | None = None


def _prepared(model) -> _Prepared | None:
    return vars(model).get(_PREPARED)


def keep_prepared(model, *, prepare_again, guard_again, is_explicit: bool = True):
    """Lets `model` stay prepared when it is compiled again, and log and warn in `fit`.

    Args:
        model: A prepared model.
        prepare_again: Function without arguments that prepares it as it was prepared.
        guard_again: Function without arguments that puts the guard around its train step.
        is_explicit: Whether the user prepared this very model, and not all models that are compiled.
    """
    vars(model)[_PREPARED] = _Prepared(prepare_again, guard_again, is_explicit)
    for name, make in _MAKERS.items():
        if not _replaced.is_replaced(model, name, "guard"):
            _replaced.replace(model, name, make(model, getattr(model, name)), kind="guard")


def forget(model):
    """Takes back `keep_prepared`; does nothing to a model that is not prepared."""
    vars(model).pop(_PREPARED, None)
    for name in _MAKERS:
        _replaced.restore(model, name, kind="guard")


def is_prepared(model) -> bool:
    return _prepared(model) is not None


def is_prepared_by_its_user(model) -> bool:
    prepared = _prepared(model)
    return prepared is not None and prepared.is_explicit


def guard_again(model):
    """Puts the guard back around the train step of a prepared model, and of the compiled models inside it."""
    for part in (model, *compiled_parts(model)):
        prepared = _prepared(part)
        if prepared is not None:
            prepared.guard_again()


def _compile_and_prepare(model, compile):
    @functools.wraps(compile)
    def compile_and_prepare(*args, **kwargs):
        before = _prepared(model)
        result = compile(*args, **kwargs)
        # Not where what was called has prepared the model anew: `autoprepare`, or a `compile` of the user's.
        if before is not None and _prepared(model) is before and find_optimizers(model):
            before.prepare_again()
        return result

    return compile_and_prepare


def _fit_and_watch(model, fit):
    @functools.wraps(fit)
    def fit_and_watch(*args, **kwargs):
        prepared = _prepared(model)
        if prepared is None:
            return fit(*args, **kwargs)
        prepared.fits += 1
        try:
            with _watching(prepared.watch, fit, args, kwargs) as (args, kwargs):
                return fit(*args, **kwargs)
        finally:
            prepared.fits -= 1

    return fit_and_watch


@contextlib.contextmanager
def _watching(watch, fit, args, kwargs):
    """Yields the arguments with `watch` among the callbacks, as its last: it only reads and warns."""
    parameters = inspect.signature(fit).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds and "callbacks" not in parameters:
        # A `fit` of the user's that hands on what it is given.
        parameters = inspect.signature(keras.Model.fit.__get__(object())).parameters
    position = list(parameters).index("callbacks") if "callbacks" in parameters else None
    if position is not None and position < len(args):
        callbacks = args[position]
    elif position is not None:
        position, callbacks = None, kwargs.get("callbacks")
    else:
        # A `fit` of the user's that takes no callbacks.
        yield args, kwargs
        return
    is_container = isinstance(callbacks, keras.callbacks.CallbackList)
    flat = callbacks.callbacks if is_container else keras.tree.flatten(callbacks)
    flat = [callback for callback in flat if callback is not None]
    if any(isinstance(callback, SkipWatch) for callback in flat):
        yield args, kwargs
    elif is_container:
        watch.set_model(callbacks.model)
        callbacks.callbacks.append(watch)
        try:
            yield args, kwargs
        finally:
            callbacks.callbacks.remove(watch)
    elif position is not None:
        yield (*args[:position], [*flat, watch], *args[position + 1 :]), kwargs
    else:
        yield args, {**kwargs, "callbacks": [*flat, watch]}


def _make_train_function(model, make_train_function):
    @functools.wraps(make_train_function)
    def make_and_hide_logs(*args, **kwargs):
        prepared = _prepared(model)
        slot_dtype = getattr(getattr(model, "optimizer", None), "slot_dtype", None)
        if prepared is not None and prepared.slot_dtype != slot_dtype:
            # A train function made before holds the optimizer's state as it was stored then.
            model.train_function, prepared.slot_dtype = None, slot_dtype
        result = make_train_function(*args, **kwargs)
        function = model.train_function
        if function is not None and not hasattr(function, "mpkeras_hides_logs"):
            model.train_function = _hiding_logs(model, function)
        return result

    return make_and_hide_logs


def _hiding_logs(model, function):
    @functools.wraps(function)
    def train_function(*args):
        result = function(*args)
        prepared = _prepared(model)
        if prepared is None or prepared.fits:
            return result
        return without_logs(model, result)

    vars(train_function)["mpkeras_hides_logs"] = True
    return train_function


# What a prepared model does in another way, beside its `train_step`.
_MAKERS = {"compile": _compile_and_prepare, "fit": _fit_and_watch, "make_train_function": _make_train_function}
