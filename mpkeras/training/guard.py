"""The guard around a model's `train_step`, by which a skipped step leaves no trace."""

import dataclasses
import functools
import warnings
from collections.abc import Callable

import keras

from mpkeras import _keras, _replaced
from mpkeras.distribution import distribution_backend
from mpkeras.distribution.travel import Travel
from mpkeras.scaling.facts import GRADIENT_LOG_NAMES, opened_step
from mpkeras.scaling.optimizer import LossScaleOptimizer
from mpkeras.training import metric_states, retake, training_backend
from mpkeras.training.first_batch import is_looked_at, looking_at_batch
from mpkeras.training.inventory import (
    Inventory,
    checking_optimizers,
    find_optimizers,
    layers,
    layers_and_paths,
    optimizers_held_elsewhere,
)
from mpkeras.training.prepared import prepared_of

LOG_NAMES = ("loss_scale", "skipped_steps")


@dataclasses.dataclass
class Guard:
    """The settings of the guard around a model's train step."""

    rollback: bool
    # Gives layers that come into being when the model is built their policy, too.
    convert_new_layers: Callable[[], None]
    travel: Travel
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
    inventory = Inventory(model)

    def trial_step(*args):
        # As the step: a `tf.function` in it stays as it is traced here.
        with opened_step(scaling_optimizers(model), wants_outcome=guard.rollback):
            return train_step(*args)

    def convert_new_layers(model):
        guard.convert_new_layers()

    # A function of its own each time: JAX finds what it compiled for a function by the function.
    @functools.wraps(train_step)
    def guarded_train_step(*args):
        guard.batch_size = max(guard.batch_size, _examples(args[-1]))
        training_backend.ensure_built(model, None if is_keras_own else trial_step, args[-1])
        inventory.ask(convert_new_layers, layers_and_paths)
        optimizers = scaling_optimizers(model, inventory.ask(optimizers_held_elsewhere, layers))
        step = train_step
        has_rows = training_backend.has_rows(args[-1])
        if has_rows is False and optimizers and all(optimizer.built for optimizer in optimizers):
            step = functools.partial(training_backend.empty_step, model, optimizers)
        if guard.rollback and optimizers:
            step = functools.partial(training_backend.step_without_trace, inventory, optimizers, step)

        def run_and_log(*args):
            with opened_step(optimizers, batch_has_rows=has_rows, wants_statistics=guard.add_gradient_logs) as facts:
                result = step(*args)
            added: dict = {}
            if guard.add_logs and optimizers:
                # One that nothing uses (`super().compile()` gives every GAN a third) is not built, and not shown.
                in_use_first = sorted(optimizers, key=lambda optimizer: not optimizer.built)
                added |= zip(LOG_NAMES, training_backend.scale_logs(in_use_first, result), strict=True)
            if guard.add_gradient_logs and optimizers and has_rows is not False:
                statistics = facts[0].statistics
                if statistics is None or not training_backend.are_of_this_program(statistics):
                    _warn_of_gradients_elsewhere(model)
                else:
                    added |= zip(GRADIENT_LOG_NAMES, statistics, strict=True)
            return _with_logs(result, lambda logs: {**logs, **added})

        return distribution_backend.with_dtypes(run_and_log, guard.travel, model)(*args)

    vars(guarded_train_step)["mpkeras_guard"] = guard
    _replaced.replace(model, "train_step", guarded_train_step, kind="guard")
    make = _make_train_function(model, model.make_train_function, guard, is_keras_own)
    _replaced.replace(model, "make_train_function", make, kind="guard")
    results = _results_of_epoch(model, getattr(model, _keras.EPOCH_RESULTS_METHOD))
    _replaced.replace(model, _keras.EPOCH_RESULTS_METHOD, results, kind="guard")
    # A train function built earlier holds the step as it was.
    model.train_function = None
    _note_guard(model, guard.rollback)


def _warn_of_gradients_elsewhere(model):
    warnings.warn(
        f"The logs of model '{model.name}' are without {' and '.join(f'`{name}`' for name in GRADIENT_LOG_NAMES)}: its "
        "`train_step` updates the weights where nobody else sees the gradients, as in a `tf.function` inside. Keras "
        "makes one program of the whole step: leave the decorator out.",
        stacklevel=2,
    )


def _with_logs(result, edited: Callable):
    """Returns what a step returned, on JAX `(logs, state)`, its logs edited where they are a dictionary."""
    logs, *state = result if isinstance(result, tuple) else (result,)
    if isinstance(logs, dict):
        logs = edited(logs)
    return (logs, *state) if isinstance(result, tuple) else logs


def _results_of_epoch(model, results_or_logs: Callable):
    """Returns Keras' `results_or_logs` for steps whose logs hold more than the user's step has put there.

    At the end of an epoch Keras asks the metrics if the logs have their names, and else shows the last step: one batch
    for a step that returns its values themselves, and an average over replicas, which is no count and no precision.
    """

    def results_or_logs_of_step(logs):
        of_step = without_logs(model, logs)
        if not isinstance(logs, dict) or len(of_step) == len(logs):
            return results_or_logs(logs)
        results = results_or_logs(of_step)
        if results is of_step:
            return logs
        return {**logs, **metric_states.of_epoch(model.metrics, results, of_step)}

    return results_or_logs_of_step


def _note_guard(model, is_guarded: bool):
    """Lets the model's optimizers know whether a guard is there; they tell it to the copies that files make of it."""
    for optimizer in find_optimizers(model).values():
        if isinstance(optimizer, LossScaleOptimizer):
            optimizer.record.note_guard(is_guarded)


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
    _replaced.restore(model, "make_train_function", kind="guard")
    _replaced.restore(model, _keras.EPOCH_RESULTS_METHOD, kind="guard")
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


def scaling_optimizers(model, held_elsewhere=None) -> list:
    """Returns the model's optimizers that check for finite steps; warns where there is none."""
    checking = checking_optimizers(model, held_elsewhere)
    if not checking:
        warnings.warn(
            f"The train step of model '{model.name}' is guarded, but none of its optimizers is a "
            "`mpkeras.LossScaleOptimizer` any more, so no step is checked. After `compile`, call "
            "`mpkeras.prepare(model)` again.",
            stacklevel=3,
        )
    return checking


def _make_train_function(model, make_train_function, guard, is_keras_own: bool):
    @functools.wraps(make_train_function)
    def make_and_take_again(*args, **kwargs):
        # While the variables have their values, which `fit` takes from them on JAX.
        distribution_backend.check_program(guard.travel, bool(model.jit_compile) and not model.run_eagerly)
        prepared = prepared_of(model)
        slot_dtype = getattr(getattr(model, "optimizer", None), "slot_dtype", None)
        if prepared is not None and prepared.slot_dtype != slot_dtype:
            # A train function made before holds the optimizer's state as it was stored then.
            model.train_function, prepared.slot_dtype = None, slot_dtype
        result = make_train_function(*args, **kwargs)
        function = model.train_function
        if function is not None and not hasattr(function, "mpkeras_hides_logs"):
            if guard.rollback:
                # A skipped step that leaves traces cannot be taken again.
                first_steps = retake.FirstSteps(
                    model, lambda: checking_optimizers(model), lambda: model.metrics, is_own=not is_keras_own
                )
                function = retake.retaking(function, first_steps)
            model.train_function = _hiding_logs(model, _building_first(model, function) if is_keras_own else function)
        return result

    return make_and_take_again


def _building_first(model, function):
    is_first = True

    @functools.wraps(function)
    def train_function(*args):
        nonlocal is_first
        if is_first:
            is_first = False
            training_backend.build_before_trace(model, args[-1])
        return function(*args)

    return train_function


def _hiding_logs(model, function):
    batches = 0

    @functools.wraps(function)
    def train_function(*args):
        nonlocal batches
        prepared = prepared_of(model)
        if prepared is None or prepared.fits:
            # In `fit` the watch looks at batches.
            return function(*args)
        batches += 1
        looking = looking_at_batch(model, function, batches, batches > 1) if is_looked_at(batches) else function
        return without_logs(model, looking(*args))

    vars(train_function)["mpkeras_hides_logs"] = True
    return train_function
