"""The guard around a model's `train_step`, by which a skipped step leaves no trace, and what keeps it there."""

import contextlib
import dataclasses
import functools
import inspect
import warnings
from collections.abc import Callable
from typing import NamedTuple

import keras

from mpkeras import _replaced
from mpkeras.policies.loss_scaling import number
from mpkeras.scaling.facts import GRADIENT_LOG_NAMES, opened_step
from mpkeras.scaling.optimizer import LossScaleOptimizer
from mpkeras.training import training_backend
from mpkeras.training.inventory import Found, all_optimizers, compiled_parts, find_optimizers, layers_and_paths

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


def install(model, guard: Guard):
    """Puts a guard around the train step that `model` has now; one that is already there is replaced."""
    uninstall(model)
    train_step = model.train_step
    # Keras' own step calls the model; one of the user's may build parts that no `call` reaches.
    is_keras_own = getattr(train_step, "__func__", None) is keras.Model.train_step
    found = Found(model)

    def trial_step(*args):
        with opened_step(scaling_optimizers(model)):
            return train_step(*args)

    def convert_new_layers(model):
        guard.convert_new_layers()

    # A function of its own each time: JAX finds what it compiled for a function by the function.
    @functools.wraps(train_step)
    def guarded_train_step(*args):
        guard.batch_size = max(guard.batch_size, _examples(args[-1]))
        training_backend.ensure_built(model, None if is_keras_own else trial_step, args[-1])
        found.ask(convert_new_layers, layers_and_paths)
        optimizers = scaling_optimizers(model)
        step = train_step
        has_rows = training_backend.has_rows(args[-1])
        if has_rows is False and optimizers and all(optimizer.built for optimizer in optimizers):
            step = functools.partial(training_backend.empty_step, model, optimizers)
        if guard.rollback and optimizers:
            step = functools.partial(training_backend.step_without_trace, found, optimizers, step)
        with opened_step(optimizers, batch_has_rows=has_rows, wants_statistics=guard.add_gradient_logs) as facts:
            result = step(*args)
        added: dict = {}
        if guard.add_logs and optimizers:
            # One that nothing uses (`super().compile()` gives every GAN a third) is not built, and not shown.
            in_use_first = sorted(optimizers, key=lambda optimizer: not optimizer.built)
            added |= zip(LOG_NAMES, training_backend.scale_logs(in_use_first, result), strict=True)
        if guard.add_gradient_logs and optimizers and facts[0].statistics is not None:
            added |= zip(GRADIENT_LOG_NAMES, facts[0].statistics, strict=True)
        return _with_logs(result, lambda logs: {**logs, **added})

    vars(guarded_train_step)["mpkeras_guard"] = guard
    _replaced.replace(model, "train_step", guarded_train_step, kind="guard")
    # A train function built earlier holds the step as it was.
    model.train_function = None
    _note_guard(model, guard.rollback)


def _with_logs(result, edited: Callable):
    """Returns what a step returned, on JAX `(logs, state)`, its logs edited where they are a dictionary."""
    logs, *state = result if isinstance(result, tuple) else (result,)
    if isinstance(logs, dict):
        logs = edited(logs)
    return (logs, *state) if isinstance(result, tuple) else logs


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
    guard = guard_of(model)
    if guard is not None and (not guard.add_logs or (gradients and not guard.add_gradient_logs)):
        guard.add_logs = True
        guard.add_gradient_logs |= gradients
        trace_again(model)


def without_logs(model, result):
    """Returns what a train function of the guarded `model` returned, without what the guard added to its logs."""
    guard = guard_of(model)
    if guard is None:
        return result
    added = (LOG_NAMES if guard.add_logs else ()) + (GRADIENT_LOG_NAMES if guard.add_gradient_logs else ())
    return _with_logs(result, lambda logs: {name: value for name, value in logs.items() if name not in added})


def trace_again(model):
    """Lets the next step of a guarded model be traced anew, after what it computes has changed."""
    install(model, model.train_step.mpkeras_guard)
    model.make_train_function(force=True)


def uninstall(model):
    """Puts the train step back as it was before `install`; does nothing where there is no guard."""
    _note_guard(model, False)
    if not is_guarded(model):
        return
    _replaced.restore(model, "train_step", kind="guard")
    model.train_function = None


def seen_batch_size(model) -> int | None:
    """Returns the examples in a full batch of the guarded step; `None` where none was seen, or replicas share it."""
    guard = guard_of(model)
    return None if guard is None or training_backend.is_distributed(model) else guard.batch_size or None


def _examples(data) -> int:
    for value in keras.tree.flatten(data):
        shape = getattr(value, "shape", None)
        # A TensorFlow shape of unknown rank has no length.
        if shape is not None and getattr(shape, "rank", 0) is not None and len(shape) and shape[0] is not None:
            return int(shape[0])
    return 0


def scaling_optimizers(model) -> list:
    """Returns the model's optimizers that check for finite steps; warns where there is none."""
    checking = _checking(model)
    if not checking:
        warnings.warn(
            f"The train step of model '{model.name}' is guarded, but none of its optimizers is a "
            "`mpkeras.LossScaleOptimizer` any more, so no step is checked. After `compile`, call "
            "`mpkeras.prepare(model)` again.",
            stacklevel=3,
        )
    return checking


def _checking(model) -> list:
    return [optimizer for optimizer in all_optimizers(model) if isinstance(optimizer, LossScaleOptimizer)]


class SkipWatch(keras.callbacks.Callback):
    """Warns, once of each kind, when an epoch learned nothing, lost steps to a loss that is not finite, or is stuck.

    `prepare` lets `fit` take one along, and `MixedPrecision` is one.
    """

    def __init__(self):
        super().__init__()
        self._warned = set()
        self._warns_at_min_scale = True

    def on_epoch_begin(self, epoch, logs=None):
        self._at_epoch_begin = [_Counts.of(optimizer) for optimizer in self._optimizers()]

    def on_epoch_end(self, epoch, logs=None):
        for optimizer, before in zip(self._optimizers(), self._at_epoch_begin, strict=True):
            counts = _Counts.of(optimizer).since(before)
            if counts.skipped and not counts.accepted:
                self._warn_once(
                    "only skips",
                    f"All {counts.skipped} steps of epoch {epoch + 1} were skipped, nothing was learned: "
                    + counts.cause(optimizer.loss_scale_rule),
                )
            elif counts.nonfinite_losses:
                self._warn_once(
                    "losses",
                    f"{counts.skipped} of {counts.skipped + counts.accepted} steps skipped in epoch {epoch + 1}: "
                    + counts.cause(optimizer.loss_scale_rule),
                )
            overflows = counts.skipped > counts.nonfinite_losses
            if self._warns_at_min_scale and overflows and self._is_stuck(optimizer):
                self._warn_once("min scale", self._stuck_message(optimizer))

    def _optimizers(self):
        return _checking(self.model)

    @staticmethod
    def _is_stuck(optimizer) -> bool:
        """Whether steps are skipped in a row although the scale is as low as it may go."""
        min_scale = getattr(optimizer.loss_scale_rule, "min_scale", None)
        if min_scale is None or number(optimizer.consecutive_skips) < 2:
            return False
        return number(optimizer.loss_scale) <= min_scale

    @staticmethod
    def _stuck_message(optimizer) -> str:
        steps = int(number(optimizer.consecutive_skips))
        return (
            f"{steps} steps in a row were skipped with the loss scale at its lowest, "
            f"{optimizer.loss_scale_rule.min_scale}: gradients still overflow, and training does not move. Train "
            "in 'mixed_bfloat16', keep the overflowing layers in float32 with `keep_float32`, or lower "
            "`min_scale` in `mpkeras.DynamicLossScale`."
        )

    def _warn_once(self, key: str, message: str):
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(message, stacklevel=3)


class _Counts(NamedTuple):
    """Steps of one optimizer: skipped ones, those of them whose loss was not finite, and accepted ones."""

    skipped: int
    nonfinite_losses: int
    accepted: int

    @classmethod
    def of(cls, optimizer):
        counters = (optimizer.skipped_steps, optimizer.nonfinite_losses, optimizer.accepted_steps)
        return cls(*(int(number(counter)) for counter in counters))

    def since(self, before):
        return _Counts(*(now - then for now, then in zip(self, before, strict=True)))

    def cause(self, rule) -> str:
        if not self.nonfinite_losses:
            if rule.dynamic:
                remedy = "The loss scale has come down after each; if it goes on, train"
            elif rule.initial_scale > 1:
                remedy = f"The loss scale is fixed at {rule.initial_scale:.15g}: lower it, or train"
            else:
                remedy = "Train"
            return (
                f"the loss was finite, but gradients overflowed. {remedy} in 'mixed_bfloat16' or keep the overflowing "
                "layers in float32 with `keep_float32`."
            )
        if self.nonfinite_losses == self.skipped:
            which = "each time"
        else:
            which = "once" if self.nonfinite_losses == 1 else f"{self.nonfinite_losses} times"
        return (
            f"{which} the loss itself was not finite: the forward pass is at fault and no loss scale cures it. "
            "Look for inf or NaN in the data, keep more layers in float32, or lower the learning rate."
        )


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
        before = prepared_of(model)
        result = compile(*args, **kwargs)
        # Not where what was called has prepared the model anew: `autoprepare`, or a `compile` of the user's.
        if before is not None and prepared_of(model) is before and find_optimizers(model):
            before.prepare_again()
        return result

    return compile_and_prepare


def _fit_and_watch(model, fit):
    @functools.wraps(fit)
    def fit_and_watch(*args, **kwargs):
        prepared = prepared_of(model)
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
    """Yields the arguments of `fit` with `watch` among the callbacks, as the last: it only reads and warns."""
    parameters = inspect.signature(fit).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if "callbacks" not in parameters and takes_any:
        # A `fit` of the user's that hands on what it is given.
        parameters = inspect.signature(keras.Model.fit.__get__(object())).parameters
    if "callbacks" not in parameters:
        yield args, kwargs
        return
    position = list(parameters).index("callbacks")
    is_by_place = position < len(args) and parameters["callbacks"].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    callbacks = args[position] if is_by_place else kwargs.get("callbacks")
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
    elif is_by_place:
        yield (*args[:position], [*flat, watch], *args[position + 1 :]), kwargs
    else:
        yield args, {**kwargs, "callbacks": [*flat, watch]}


def _make_train_function(model, make_train_function):
    @functools.wraps(make_train_function)
    def make_and_hide_logs(*args, **kwargs):
        prepared = prepared_of(model)
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
        prepared = prepared_of(model)
        return result if prepared is None or prepared.fits else without_logs(model, result)

    vars(train_function)["mpkeras_hides_logs"] = True
    return train_function


# What a prepared model does in another way, beside its `train_step`.
_MAKERS = {"compile": _compile_and_prepare, "fit": _fit_and_watch, "make_train_function": _make_train_function}
