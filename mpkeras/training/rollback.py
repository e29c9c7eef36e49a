"""Puts back what a skipped step did where state is in variables: on TensorFlow and torch. On JAX it is in values."""

import contextlib
import dataclasses
import functools
import operator
import warnings
import weakref
from typing import NamedTuple

import keras
import numpy as np
from keras import ops

from mpkeras import _keras
from mpkeras._replaced import replaced_on_all
from mpkeras.policies.dtypes import SMALL_DTYPE
from mpkeras.training import metric_states
from mpkeras.training.inventory import (
    layers,
    layers_and_variables,
    metrics_of_layers,
    non_trainable,
    shared_states,
    states_of_helpers,
    trainable,
    unlisted_states,
    weights_and_others,
)

# Models whose step has been said to round what it assigns.
_told: weakref.WeakSet = weakref.WeakSet()


class Outcome(NamedTuple):
    """What became of the updates of a step: each a `bool` or a bool scalar of shape `()`."""

    any_skipped: object
    all_skipped: object
    none_tried: object


class StepInVariables:
    """A step that may be skipped: the state that it finds, its outcome, and what of the state is put back.

    After a step whose updates were all skipped no variable shows that it ran. And a non-trainable float variable that
    became non-finite although the step was applied (BatchNormalization fed 1e25) keeps its old value; where the step
    makes no update, all of them do: of gradients that are summed for a later one, a batch is in all sums or in none.

    The methods that raise `NotImplementedError`, and `is_traced`, are a backend's own.

    Args:
        inventory: An `Inventory` of the model.
        optimizers: Those that update in the step.
        metrics: Function that returns the metrics of the step. Keras makes some of them in the first step.
        results: Function that returns what they say now, by name.
    """

    def __init__(self, inventory, optimizers, metrics, results):
        self._optimizers, self._metrics, self._results = optimizers, metrics, results
        self._inventory = inventory
        self._model = model = inventory.model
        # Weights are copied when a layer writes them; copies of all would double a large model.
        weights, others = inventory.ask(weights_and_others, layers_and_variables)
        self._watched = [*weights, *trainable(model, others), *shared_states()]
        self._natives = self.native_states(model)
        unlisted = [*unlisted_states(model), *inventory.ask(states_of_helpers, layers, inventory.beside)]
        unlisted += inventory.ask(metrics_of_layers, layers)
        # Of a step of ours they may be among the metrics.
        of_step = {id(variable) for metric in metrics() for variable in metric.variables}
        unlisted = [variable for variable in unlisted if id(variable) not in of_step]
        statistics = [*non_trainable(model, others), *unlisted, *self._natives]
        # The statistics, and what has been written in the step: `(place, value before)`. Frozen weights, as statistics,
        # never become non-finite.
        self._statistics = [self._with_copy(self.place(variable)) for variable in statistics]
        self._written_frozen: list = []
        self._written: list = []
        # Small variables that the step gives what it has computed.
        self._rounded: list = []
        # The values of each metric before the step, and those that the step finds.
        self._metric_values = {}
        self._natives_of_metrics: list = []
        for metric in metric_states.flat(metrics()):
            self._natives_of_metrics += [self._with_copy(self.place(state)) for state in self.natives_of(metric)]
            values_before = self._values(metric)
            begun = metric_states.at_begin(metric, values_before)
            if metric_states.tracks_losses(metric):
                self._give(metric, begun)
            self._metric_values[id(metric)] = values_before, begun
        self._flags = [[self.place(flag) for flag in optimizer.step_outcome] for optimizer in optimizers]
        self._around = [self._opened(*pair) for pair in zip(optimizers, self._flags, strict=True)]

    def place(self, variable):
        """Returns the place in which the value of `variable` lies here."""
        raise NotImplementedError

    def copy(self, place):
        """Returns a copy of the value in a place."""
        raise NotImplementedError

    def read(self, flag):
        """Returns a flag of the outcome as a bool, as Python or a graph can decide by it."""
        raise NotImplementedError

    def assign(self, place, value):
        """Gives a place another value."""
        raise NotImplementedError

    def choose(self, place, old, takes_old):
        """Gives a place the value `old` where `takes_old`, a bool of the kind that `read` returns."""
        raise NotImplementedError

    def is_float(self, place) -> bool:
        """Whether the dtype of a place is one of floats."""
        raise NotImplementedError

    def is_finite(self, places: list):
        """Returns whether all numbers in these places, which are of floats, are finite: a bool as `read` returns it."""
        raise NotImplementedError

    def any_of(self, flags: list):
        """Returns whether any of some bools is true, each of the kind that `read` returns."""
        return functools.reduce(operator.or_, flags, False)

    def outcome(self, flags: list) -> Outcome:
        """Returns what became of the updates of the step; `flags` as `_end` returns them."""
        raise NotImplementedError

    def where_needed(self, any_skipped, restored, logs) -> tuple:
        """Returns what `restored()` does where there is something to restore, or else `False` and `logs`.

        Args:
            any_skipped: Whether an update was skipped. If not, only statistics that became non-finite are put back.
            restored: Function that puts back, and returns a bool and new logs.
            logs: What the step returned.
        """
        raise NotImplementedError

    def native_states(self, model) -> list:
        """Returns the states that the model holds beside Keras' variables."""
        raise NotImplementedError

    def natives_of(self, metric) -> list:
        """Returns the states that a metric holds beside Keras' variables."""
        return []

    def is_traced(self) -> bool:
        """Whether a program is made of the step, for later ones, too."""
        return False

    def trace_once_more(self):
        """Lets the program that is traced now be traced again before it runs."""

    def run(self, step) -> tuple:
        """Runs `step()`, and puts back what it did where its updates were skipped.

        Where it raises before an update counted, eager code puts all back; a graph that is traced has not run, and one
        that fails as it runs leaves what it had assigned by then.

        Returns:
            The logs, and two bool scalars: whether the step was skipped, and whether since the metrics were reset no
            step has counted.
        """
        with self._noting_writes():
            try:
                logs = step()
            except BaseException:
                if not self.is_traced():
                    self._put_back()
                raise
        if self._rounded and self._model not in _told:
            _told.add(self._model)
            _warn_of_rounding(self._model, self._rounded)
        # Asked of a trace alone: to list the metrics is to walk through the layers.
        if self.is_traced() and any(id(m) not in self._metric_values for m in metric_states.flat(self._metrics())):
            self.trace_once_more()
        outcome = self.outcome(self._end())
        any_skipped, step_is_skipped, _ = outcome

        def restored():
            # A metric may return the variable that it holds, which is about to change.
            copied = keras.tree.map_structure(lambda value: ops.copy(value) if ops.is_tensor(value) else value, logs)
            self._restore(step_is_skipped, outcome.none_tried)
            return self._metrics_after_skip(any_skipped, step_is_skipped, copied)

        nothing_counted, logs = self.where_needed(any_skipped, restored, logs)
        return logs, step_is_skipped, nothing_counted

    def statistics_are_finite(self):
        """Returns whether all that must stay finite is so after the step."""
        floats = [place for place, _ in [*self._statistics, *self._written_frozen] if self.is_float(place)]
        return self.is_finite(floats) if floats else True

    def _with_copy(self, place) -> tuple:
        return place, self.copy(place)

    def _opened(self, optimizer, flags):
        """Lets `apply` note the outcome. Returns what a guarded step around this one has noted, or `None`."""
        optimizer.facts.wants_outcome = True
        if not optimizer.facts.is_nested:
            return None
        around = [self.read(flag) for flag in flags]
        for flag in flags:
            self.assign(flag, False)
        return around

    def _end(self) -> list:
        """Returns whether an update was skipped, and whether one was accepted, by each optimizer; and forgets it.

        What this step did, it did for a guarded step around it, too.
        """
        outcomes = [[self.read(flag) for flag in flags] for flags in self._flags]
        for flags, around, outcome in zip(self._flags, self._around, outcomes, strict=True):
            for i, flag in enumerate(flags):
                self.assign(flag, False if around is None else outcome[i] | around[i])
        return outcomes

    def _put_back(self):
        """Puts all back after an error, unless an update counted."""
        counted = any(bool(accepted) for _, accepted in self._end())
        self._restore(not counted)
        for metric in () if counted else metric_states.flat(self._metrics()):
            if id(metric) in self._metric_values:
                self._give(metric, self._metric_values[id(metric)][0])
        for place, before in () if counted else self._natives_of_metrics:
            self.assign(place, before)

    def _restore(self, step_is_skipped, is_without_update=False):
        """Puts back all but the metrics where `step_is_skipped`, and what became non-finite where not.

        Where the step `is_without_update`, all floats are put back together.
        """
        statistics = [*self._statistics, *self._written_frozen]
        takes_old = [step_is_skipped] * len(statistics)
        # Not asked where the answer is known: on a GPU to look at a number is to wait for it.
        if step_is_skipped is not True:
            floats = [i for i, (place, _) in enumerate(statistics) if self.is_float(place)]
            became = [self._became_non_finite(*statistics[i]) for i in floats]
            all_take_old = is_without_update & self.any_of(became)
            for i, became_so in zip(floats, became, strict=True):
                takes_old[i] = step_is_skipped | all_take_old | became_so
        for (place, old), takes in zip(statistics, takes_old, strict=True):
            self.choose(place, old, takes)
        for place, old in self._written:
            self.choose(place, old, step_is_skipped)

    def _became_non_finite(self, place, old):
        return self.is_finite([old]) & ops.logical_not(self.is_finite([place]))

    @contextlib.contextmanager
    def _noting_writes(self):
        """Within this context remembers what each weight was before a layer assigned to it.

        SpectralNormalization writes its normalized kernel in every forward pass of training, a target network follows
        another one. To keep the old values of all weights instead would cost a copy of the model. And Keras' global
        generator, which a pipeline of data may draw from meanwhile, is written by those steps alone that draw from it.
        """
        seen = set()

        # One cover over the other where a step trains a part of the model by a guarded step of its own.
        def watching(variable, assign_below):
            def assign(value):
                # The optimizer's own writes (after a constraint) are skipped or not, never put back.
                is_updating = any(optimizer.facts.is_updating for optimizer in self._optimizers)
                if id(variable) not in seen and not is_updating:
                    seen.add(id(variable))
                    # Within a layer variables may be read in another dtype.
                    with _keras.autocast_scope(None):
                        written = self._written if variable.trainable else self._written_frozen
                        written.append(self._with_copy(self.place(variable)))
                    # A whole copy of another variable arrives as it is.
                    is_computed = not isinstance(value, (keras.Variable, np.ndarray))
                    if is_computed and _keras.stored_dtype(variable) == SMALL_DTYPE:
                        self._rounded.append(variable)
                return type(variable).assign(variable, value) if assign_below is None else assign_below(value)

            return assign

        with replaced_on_all(self._watched, "assign", watching):
            yield

    def _metrics_after_skip(self, any_skipped, step_is_skipped, logs) -> tuple:
        """Gives metrics the values they have after a step in which an update was skipped.

        Args:
            any_skipped, step_is_skipped: Whether one update of the step was skipped, and whether all were: each a
                `bool` or a bool scalar of shape `()`.
            logs: What the step returned.

        Returns:
            Whether no step has counted since the metrics were reset, and what the logs say.
        """
        in_step = metric_states.results_now(self._results)
        for place, before in self._natives_of_metrics:
            self.choose(place, before, step_is_skipped)
        states, results = [], self._results
        for metric in metric_states.flat(self._metrics()):
            if id(metric) not in self._metric_values:
                # Made in this step: Keras makes those given to `compile` when it first needs them. The program that
                # is traced then is for later steps, too, which find in them what no program has yet.
                if self.is_traced():
                    continue
                self._metric_values[id(metric)] = (metric_states.reset_values(metric, self._values(metric)),) * 2
                # Only trackers have more to say of a first step than it said.
                results = functools.partial(metric_states.results_of_trackers, self._metrics(), in_step)
            states_of_metric = *self._metric_values[id(metric)], self._values(metric)
            values = metric_states.after_skip(metric, *states_of_metric, any_skipped, step_is_skipped)
            self._give(metric, values)
            states.append((metric, values))
        # Before they are asked whether a step has counted: what an emptied list of Python says may be an error.
        results_after = metric_states.results_now(results)
        natives = [self._with_copy(place) for place, _ in self._natives_of_metrics]
        nothing_counted = ops.logical_and(any_skipped, metric_states.nothing_counted(states, self.is_traced()))
        for place, value in natives:
            self.assign(place, value)
        shown = metric_states.shown(self._metrics(), results_after, nothing_counted)
        return nothing_counted, metric_states.replaced(logs, in_step, shown)

    def _values(self, metric) -> list:
        return [self.copy(self.place(variable)) for variable in metric.variables]

    def _give(self, metric, values):
        for variable, value in zip(metric.variables, values, strict=True):
            self.assign(self.place(variable), value)


def _warn_of_rounding(model, variables):
    more = f" and {len(variables) - 1} more" if len(variables) > 1 else ""
    warnings.warn(
        f"The train step of model '{model.name}' assigns to '{variables[0].path}'{more}, stored in {SMALL_DTYPE}, what "
        "it computes itself: rounded to the nearest, where a change of less than 1/512 is lost, and an average of "
        "weights or a target network that follows slowly stands still. Keep such layers in float32 by a rule, "
        "`keep_float32=(..., 'path:...')`, and compute what they are given in float32; or use 'mixed_bfloat16'.",
        stacklevel=3,
    )


def empty_step(model, optimizers, data):
    """The train step of a batch without rows: nothing is computed, and a skipped step is counted."""
    for optimizer in optimizers:
        skip(optimizer)
    return model.get_metrics_result()


def skip(optimizer):
    """Counts a step that `optimizer` skips, and that is no fault of the loss scale."""
    no = ops.convert_to_tensor(False)
    facts = dataclasses.replace(optimizer.facts, batch_has_rows=no)
    for variable, value in optimizer.decide(facts, no)[1]:
        variable.assign(value)
