"""What a prepared model does of its own accord: it stays prepared through `compile`, and `fit` logs and warns."""

import contextlib
import functools
import inspect
from collections.abc import Callable

import keras

from mpkeras._replaced import is_replaced, replace, restore
from mpkeras.training import guard
from mpkeras.training.skip_watch import SkipWatch

# What `prepare` covers on a model, beside `train_step` (`rollback`), and why:
COVERED = {
    "compile": "a model that is compiled again is prepared again, with the same arguments",
    "fit": "it takes a `SkipWatch` along, as Keras has no callbacks that a model brings with it",
    "make_train_function": "`train_on_batch` returns what it did before: the guard's logs are for `fit`",
}


class _Prepared:
    """How a model was prepared, and what it does by itself since."""

    def __init__(self, prepare_again: Callable[[], None], guard_again: Callable[[], None], is_explicit: bool):
        self.prepare_again = prepare_again
        self.guard_again = guard_again
        self.is_explicit = is_explicit
        self.watch = SkipWatch()
        # How many calls of `fit` are under way, one in the callbacks of another among them.
        self.fits = 0


# On the model, with which it goes: the functions in it hold the model.
_RECORD = "_mpkeras_prepared"


def _record(model) -> _Prepared | None:
    return vars(model).get(_RECORD)


def keep_prepared(model, *, prepare_again, guard_again, is_explicit: bool = True):
    """Lets `model` stay prepared when it is compiled again, and log and warn in `fit`.

    Args:
        model: A prepared model.
        prepare_again: Function without arguments that prepares it as it was prepared.
        guard_again: Function without arguments that puts the guard around its train step.
        is_explicit: Whether the user prepared this very model, and not all models that are compiled.
    """
    vars(model)[_RECORD] = _Prepared(prepare_again, guard_again, is_explicit)
    makers = {"compile": _compile_and_prepare, "fit": _fit_and_watch, "make_train_function": _make_train_function}
    for name, make in makers.items():
        if not is_replaced(model, name, "prepared"):
            replace(model, name, make(model, getattr(model, name)), kind="prepared")


def forget(model):
    """Takes back `keep_prepared`; does nothing to a model that is not prepared."""
    vars(model).pop(_RECORD, None)
    for name in COVERED:
        restore(model, name, kind="prepared")


def is_prepared(model) -> bool:
    return _record(model) is not None


def is_prepared_by_its_user(model) -> bool:
    prepared = _record(model)
    return prepared is not None and prepared.is_explicit


def guard_again(model):
    """Puts the guard back around the train step of a prepared model, and of the compiled models inside it."""
    for part in (model, *guard.compiled_parts(model)):
        prepared = _record(part)
        if prepared is not None:
            prepared.guard_again()


def _compile_and_prepare(model, compile):
    @functools.wraps(compile)
    def compile_and_prepare(*args, **kwargs):
        before = _record(model)
        result = compile(*args, **kwargs)
        # Not where what was called has prepared the model anew: `autoprepare`, or a `compile` of the user's.
        if before is not None and _record(model) is before and guard.find_optimizers(model):
            before.prepare_again()
        return result

    return compile_and_prepare


def _fit_and_watch(model, fit):
    @functools.wraps(fit)
    def fit_and_watch(*args, **kwargs):
        prepared = _record(model)
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
        prepared = _record(model)
        if prepared is None or prepared.fits:
            return result
        return guard.without_logs(model, result)

    vars(train_function)["mpkeras_hides_logs"] = True
    return train_function
