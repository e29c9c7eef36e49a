"""Looks at the first steps of a `fit`: whether an optimizer that nobody guards moves the weights."""

import sys
import warnings

import keras
import numpy as np
from keras import ops

from mpkeras._replaced import replaced_on_all, value_below
from mpkeras.policies.heads import own_methods
from mpkeras.policies.loss_scaling import number
from mpkeras.scaling.optimizer import LossScaleOptimizer, optimizers_alive
from mpkeras.training import training_backend
from mpkeras.training.first_batch import is_looked_at

# Elements of each weight that are looked at: an optimizer that moves a weight moves most of it.
_SAMPLE = 256


class UnguardedWatch:
    """Warns where an optimizer moves weights in a step in which no `LossScaleOptimizer` was called.

    An optimizer that a callback or a closure holds, or that is made in the first step, is out of reach of `prepare`:
    nothing scales its loss, and nothing skips its steps. As soon as any `LossScaleOptimizer` has been called, all is
    well. Until then the first steps are looked at, and further ones as seldom as their number doubles: training may
    begin late. Nothing sees the writes of callbacks to weights, which happen between steps; the writes of a layer
    to its weights are no update.
    """

    def __init__(self, model):
        self.model = model
        self._steps = 0
        self._is_over = False
        # The weights that somebody else than an optimizer has assigned to, by `id`: seen where a step is traced.
        self._assigned: set = set()

    def watch(self):
        """Looks at the next call of the train function, if there is something to find out."""
        if self._is_over:
            return
        model, function = self.model, self.model.train_function
        # Several steps of one execution may run in a graph that calls the function.
        if function is None or _is_shared(model) or model.steps_per_execution > 1:
            return
        self._steps += 1
        if self._steps > 4 and not is_looked_at(self._steps):
            return
        self._is_over = _calls_a_guarded_one(model)
        if self._is_over:
            return
        is_due = [True]

        def looking(*args):
            # A function that another callback has put in front since calls this one for good.
            if model.train_function is looking:
                model.train_function = function
            return self._look(function, args) if is_due and is_due.pop() else function(*args)

        # This function hides logs where the function behind it does.
        vars(looking).update({name: value for name, value in vars(function).items() if name == "mpkeras_hides_logs"})
        model.train_function = looking

    def _look(self, function, args):
        model = self.model
        counts, samples = _counts(model, args[0]), _samples(model, args[0])
        with replaced_on_all(model.trainable_variables, "assign", self._noting):
            result = function(*args)
        state = result[-1] if isinstance(result, tuple) else None
        self._is_over = any(now != counts.get(o, [0, 0]) for o, now in _counts(model, state).items())
        if not self._is_over:
            now = _samples(model, state)
            # Weights that the step itself has made were not moved by it, as far as anybody knows.
            known = [key for key in now if key in samples and key not in self._assigned]
            moved = [key for key in known if now[key] != samples[key]]
            if moved:
                self._is_over = True
                _warn(model)
        return result

    def _noting(self, variable, assign_below):
        def assign(value):
            if not isinstance(sys._getframe(1).f_locals.get("self"), keras.optimizers.Optimizer):
                self._assigned.add(id(variable))
            return type(variable).assign(variable, value) if assign_below is None else assign_below(value)

        return assign


def _calls_a_guarded_one(model) -> bool:
    """Whether the step of `fit` is Keras' own, which calls the model's optimizer, and that checks for finite steps."""
    is_keras_own = getattr(value_below(model, "train_step"), "__func__", None) is keras.Model.train_step
    makes_own_function = own_methods(model, "make_train_function")
    return is_keras_own and not makes_own_function and isinstance(getattr(model, "optimizer", None), LossScaleOptimizer)


def _is_shared(model) -> bool:
    """Whether variables are on several devices, where they cannot be read in the middle of a step by everybody."""
    return training_backend.is_distributed(model) or keras.distribution.distribution() is not None


def _counts(model, state) -> dict:
    """Returns how many calls each `LossScaleOptimizer` has skipped and accepted, those of other models included."""
    values = _values_in(model, state)
    counters_by_optimizer = {x: (x.skipped_steps, x.accepted_steps) for x in optimizers_alive()}
    return {
        optimizer: [number(_value(counter, values)) for counter in counters]
        for optimizer, counters in counters_by_optimizer.items()
        # A model that is trained elsewhere may be in the middle of a step, and have no values.
        if all(id(counter) in values or training_backend.can_be_read(counter) for counter in counters)
    }


def _samples(model, state) -> dict:
    values = _values_in(model, state)
    return {id(v): _bytes(ops.reshape(_value(v, values), (-1,))[:_SAMPLE]) for v in model.trainable_variables}


def _value(variable, values: dict):
    # Within a step on JAX the variables of the state have none of their own.
    return values[id(variable)] if id(variable) in values else variable.value


def _bytes(values) -> bytes:
    return np.asarray(ops.convert_to_numpy(ops.cast(ops.copy(values), "float32"))).tobytes()


def _values_in(model, state) -> dict:
    """Returns the values in the state that `fit` hands on with JAX, by `id` of the variable; elsewhere none."""
    if keras.backend.backend() != "jax" or not isinstance(state, (tuple, list)):
        return {}
    pairs = [(model.trainable_variables, state[0]), (model.optimizer.variables, state[2])]
    return {id(v): value for variables, values in pairs for v, value in zip(variables, values, strict=True)}


def _warn(model):
    warnings.warn(
        f"The train step of model '{model.name}' moves weights, but no `mpkeras.LossScaleOptimizer` was called in it. "
        "The optimizer that moves them scales no loss and skips no step that is not finite, and `skipped_steps` does "
        "not count its steps: a function, a callback or an object out of reach holds it, or it was made in the step. "
        "Give it to the model as an attribute before `fit`, or wrap it in `mpkeras.LossScaleOptimizer` yourself.",
        stacklevel=2,
    )
