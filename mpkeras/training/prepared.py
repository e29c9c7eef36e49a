"""How a model was prepared, and what keeps it so: its `compile`, `fit`, `evaluate` and `predict`."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable

import keras

from mpkeras import _replaced
from mpkeras.conversion.apply import apply_policy
from mpkeras.conversion.last import last_conversion
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES
from mpkeras.training import for_one_fit
from mpkeras.training.first_batch import is_looked_at, looking_at_arrays
from mpkeras.training.fit_arguments import argument_in, flat, with_callback
from mpkeras.training.inventory import compiled_parts, find_optimizers, models_of_metrics
from mpkeras.training.made_under import policy_made_under
from mpkeras.training.validations import Look
from mpkeras.training.watch import SkipWatch

# On a prepared model, with which it goes: the functions in it hold the model.
_PREPARED = "_mpkeras_prepared"


@dataclasses.dataclass
class Prepared:
    """How a model was prepared, and what it does by itself since."""

    # Functions without arguments: one prepares the model as it was prepared, one puts the guard around its train step.
    prepare_again: Callable[[], None]
    guard_again: Callable[[], None]
    # Whether its user prepared this very model, and not all models that are compiled.
    is_explicit: bool
    watch: SkipWatch = dataclasses.field(default_factory=SkipWatch)
    # How many calls of `fit` are under way, one in the callbacks of another among them.
    fits: int = 0
    # How many calls of `predict` have begun.
    predicts: int = 0
    # In what dtype the optimizer's state was when the train function was made.
    slot_dtype: str | None = None


def prepared_of(model) -> Prepared | None:
    """Returns how `model` was prepared, or `None`."""
    return vars(model).get(_PREPARED)


def keep_prepared(model, prepared: Prepared):
    """Lets a prepared model stay so when it is compiled again, and log and warn in `fit`."""
    vars(model)[_PREPARED] = prepared
    for name, make in _MAKERS.items():
        if not _replaced.is_replaced(model, name, "guard"):
            _replaced.replace(model, name, make(model, getattr(model, name)), kind="guard")


def forget(model):
    """Takes back `keep_prepared`; does nothing to a model that is not prepared."""
    vars(model).pop(_PREPARED, None)
    for name in _MAKERS:
        _replaced.restore(model, name, kind="guard")


def guard_again(model):
    """Puts the guard back around the train step of a prepared model, and of the compiled models inside it."""
    for part in (model, *compiled_parts(model)):
        prepared = prepared_of(part)
        if prepared is not None:
            prepared.guard_again()


def _compile_and_prepare(model, compile):
    @functools.wraps(compile)
    def compile_and_prepare(*args, **kwargs):
        prepared = prepared_of(model)
        result = compile(*args, **kwargs)
        # Not where what was called has prepared the model anew: `autoprepare`, or a `compile` of the user's.
        if prepared is not None and prepared_of(model) is prepared and find_optimizers(model):
            prepared.prepare_again()
        return result

    return compile_and_prepare


def _fit_and_watch(model, fit):
    @functools.wraps(fit)
    def fit_and_watch(*args, **kwargs):
        prepared = prepared_of(model)
        if prepared is None:
            return fit(*args, **kwargs)
        _convert_models_of_metrics(model)
        prepared.fits += 1
        begun = for_one_fit.begun(model)
        x, batch_size = (argument_in(argument, fit, "fit", args, kwargs) for argument in ("x", "batch_size"))
        try:
            with (
                looking_at_arrays(model, x, batch_size),
                with_callback(prepared.watch, SkipWatch, fit, "fit", args, kwargs) as (args, kwargs),
            ):
                return fit(*args, **kwargs)
        finally:
            prepared.fits -= 1
            if not prepared.fits:
                prepared.watch.validations.let_monitors_be()
            for_one_fit.end_all(model, but=begun)

    return fit_and_watch


def _convert_models_of_metrics(model):
    """Lets the models that metrics and losses hold return float32, as `model` does: nobody compiles them."""
    for held in models_of_metrics(model):
        policy = None if held.compiled or last_conversion(held) is not None else policy_made_under(held)
        if policy is not None and policy.compute_dtype in SIXTEEN_BIT_DTYPES:
            apply_policy(held, policy)


def _evaluate_and_look(model, evaluate):
    return _looking(model, evaluate, lambda: getattr(prepared_of(model), "watch", None))


def _looking(model, evaluate, watch_of: Callable):
    """Returns `evaluate` that tells the `SkipWatch` in its callbacks, or that of `watch_of()`, what the values are."""

    @functools.wraps(evaluate)
    def evaluate_and_look(*args, **kwargs):
        look = Look()
        x, batch_size, callbacks = (
            argument_in(argument, evaluate, "evaluate", args, kwargs) for argument in ("x", "batch_size", "callbacks")
        )
        # In a validation `fit` hands on its container. Each epoch has one, of the same data.
        is_validation = isinstance(callbacks, keras.callbacks.CallbackList)
        if not is_validation:
            _convert_models_of_metrics(model)
        with (
            looking_at_arrays(model, None if is_validation else x, batch_size),
            with_callback(look, Look, evaluate, "evaluate", args, kwargs) as (args, kwargs),
        ):
            result = evaluate(*args, **kwargs)
        present = flat(callbacks)
        watch = next((callback for callback in present if isinstance(callback, SkipWatch)), None) or watch_of()
        if watch is not None and is_validation:
            watch.validations.note_validation(look, present)
        elif watch is not None:
            watch.validations.note_evaluation(look)
        return result

    return evaluate_and_look


def _predict_and_look(model, predict):
    @functools.wraps(predict)
    def predict_and_look(*args, **kwargs):
        prepared = prepared_of(model)
        if prepared is None:
            return predict(*args, **kwargs)
        prepared.predicts += 1
        x, batch_size = (argument_in(argument, predict, "predict", args, kwargs) for argument in ("x", "batch_size"))
        # An agent predicts before each of its moves.
        looks = is_looked_at(prepared.predicts)
        with looking_at_arrays(model, x, batch_size) if looks else contextlib.nullcontext():
            outputs = predict(*args, **kwargs)
        prepared.watch.validations.note_prediction(model, outputs, x)
        return outputs

    return predict_and_look


def look_at_evaluations(model, watch: SkipWatch):
    """Lets `evaluate` of `model` tell `watch` what its values are, unless it is prepared and does so anyway."""
    if not _replaced.is_replaced(model, "evaluate", "guard"):
        _replaced.replace(model, "evaluate", _looking(model, model.evaluate, lambda: watch), kind="guard")


def let_evaluations_be(model):
    """Takes back `look_at_evaluations`; on a prepared model it stays."""
    if prepared_of(model) is None:
        _replaced.restore(model, "evaluate", kind="guard")


# The methods that a prepared model has in another form, beside its train step.
_MAKERS = {
    "compile": _compile_and_prepare,
    "fit": _fit_and_watch,
    "evaluate": _evaluate_and_look,
    "predict": _predict_and_look,
}
