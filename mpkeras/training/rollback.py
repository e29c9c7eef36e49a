"""Puts back what a skipped step did where state is in variables: on TensorFlow and torch. On JAX it is in values."""

import contextlib
import dataclasses

from keras import ops

from mpkeras import _keras
from mpkeras._replaced import replaced_on_all
from mpkeras.training import metric_states


class StepInVariables:
    """A step that may be skipped: its outcome, its metrics, and the weights that layers write in it.

    `held`, `copy`, `read`, `assign` and `is_traced` are a backend's own.

    Args:
        optimizers: Those that update in the step.
        metrics: Function that returns the metrics of the step. Keras makes some of them in the first step.
        results: Function that returns what they say now, by name.
    """

    def __init__(self, optimizers, metrics, results):
        self._optimizers, self._metrics, self._results = optimizers, metrics, results
        # The values of each metric before the step, and those that the step finds.
        self._values_found = {}
        for metric in metric_states.flat(metrics()):
            before = self._values(metric)
            begun = metric_states.at_begin(metric, before)
            if metric_states.tracks_losses(metric):
                self._give(metric, begun)
            self._values_found[id(metric)] = before, begun
        self._flags = [[self.held(flag) for flag in optimizer.step_outcome] for optimizer in optimizers]
        self._around = [self._opened(*pair) for pair in zip(optimizers, self._flags, strict=True)]
        # The weights that layers assigned to in `watched`, as `held` returns them, with what they were before.
        self.written: list = []

    def held(self, variable):
        """Returns what holds the value of `variable` here."""
        raise NotImplementedError

    def copy(self, held):
        """Returns a copy of what `held` returned."""
        raise NotImplementedError

    def read(self, flag):
        """Returns a flag of the outcome as a bool, as Python or a graph can decide by it."""
        raise NotImplementedError

    def assign(self, held, value):
        """Gives what `held` returned another value."""
        raise NotImplementedError

    def is_traced(self) -> bool:
        """Whether a program is made of the step, for later ones, too."""
        return False

    def _opened(self, optimizer, flags):
        """Lets `apply` note the outcome. Returns what a guarded step around this one has noted, or `None`."""
        optimizer.facts.wants_outcome = True
        if not optimizer.facts.is_nested:
            return None
        around = [self.read(flag) for flag in flags]
        for flag in flags:
            self.assign(flag, False)
        return around

    def end(self) -> list:
        """Returns whether an update was skipped, and whether one was accepted, by each optimizer; and forgets it.

        What this step did, it did for a guarded step around it, too.
        """
        outcomes = [[self.read(flag) for flag in flags] for flags in self._flags]
        for flags, around, outcome in zip(self._flags, self._around, outcomes, strict=True):
            for i, flag in enumerate(flags):
                self.assign(flag, False if around is None else outcome[i] | around[i])
        return outcomes

    def put_back(self, restore):
        """Puts all back after an error, unless an update counted; `restore(is_skipped)` does so with the state."""
        counted = any(bool(accepted) for _, accepted in self.end())
        restore(not counted)
        for metric in () if counted else metric_states.flat(self._metrics()):
            if id(metric) in self._values_found:
                self._give(metric, self._values_found[id(metric)][0])

    @contextlib.contextmanager
    def watched(self, variables):
        """Within this context remembers what each of `variables` was before a layer assigned to it.

        SpectralNormalization writes its normalized kernel in every forward pass of training, a target network follows
        another one. To keep the old values of all weights instead would cost a copy of the model.
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
                        held = self.held(variable)
                    self.written.append((held, self.copy(held)))
                return type(variable).assign(variable, value) if assign_below is None else assign_below(value)

            return assign

        with replaced_on_all(variables, "assign", watching):
            yield

    def metrics_after_skip(self, any_skipped, step_is_skipped, logs) -> tuple:
        """Gives metrics the values they have after a step in which an update was skipped.

        Args:
            any_skipped, step_is_skipped: Whether one update of the step was skipped, and whether all were: each a
                `bool` or a bool scalar of shape `()`.
            logs: What the step returned.

        Returns:
            Whether no step has counted since the metrics were reset, and what the logs say.
        """
        in_step = metric_states.results_now(self._results)
        states = []
        for metric in metric_states.flat(self._metrics()):
            if id(metric) not in self._values_found:
                # Made in this step: Keras makes those given to `compile` when it first needs them. The program that
                # is traced then is for later steps, too, which find in them what no program has yet.
                if self.is_traced():
                    continue
                self._values_found[id(metric)] = (metric_states.reset_values(metric),) * 2
            found = self._values_found[id(metric)]
            values = metric_states.after_skip(metric, *found, self._values(metric), any_skipped, step_is_skipped)
            self._give(metric, values)
            states.append((metric, values))
        nothing_counted = ops.logical_and(any_skipped, metric_states.nothing_counted(states))
        shown = metric_states.shown(self._metrics(), metric_states.results_now(self._results), nothing_counted)
        return nothing_counted, metric_states.replaced(logs, in_step, shown)

    def _values(self, metric) -> list:
        return [self.copy(self.held(variable)) for variable in metric.variables]

    def _give(self, metric, values):
        for variable, value in zip(metric.variables, values, strict=True):
            self.assign(self.held(variable), value)


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
