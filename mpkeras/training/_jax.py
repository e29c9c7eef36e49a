"""JAX's guarded train step: stateless, without a branch."""

import copy
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.experimental import sparse

from mpkeras._keras import is_purged, put
from mpkeras.distribution._jax import with_dtypes
from mpkeras.policies.dtypes import as_array
from mpkeras.scaling._jax import computed_once, sums
from mpkeras.scaling.facts import opened_step
from mpkeras.training import defaults, metric_states
from mpkeras.training.defaults import (  # noqa: F401
    are_of_this_program,
    build_before_trace,
    check_scope,
    ensure_built,
    first_batch,
    global_random_states,
    has_rows,
    in_replica_context,
    is_distributed,
    native_states,
    of_its_own,
    replicas,
    runs_on_host,
    set_global_random_states,
    track_random_states,
    variable_scope,
)
from mpkeras.training.rollback import Outcome


def empty_step(model, optimizers, state, data):
    """The train step of a batch without rows: nothing is computed, and a skipped step is counted."""
    trainable, non_trainable, optimizer_values, metrics = _each_read_once(model, state)
    with _scope(model.metrics_variables, metrics):
        logs = model.get_metrics_result()
    return logs, (trainable, non_trainable, _skipped(model.optimizer, optimizer_values), metrics)


def _skipped(optimizer, values) -> list:
    """Returns the values of an optimizer's variables after a step that is skipped, and is no fault of the scale."""
    with _scope(optimizer.variables, values):
        facts = dataclasses.replace(optimizer.facts, batch_has_rows=jnp.zeros((), bool))
        _, own_values = optimizer.decide(facts, jnp.zeros((), bool))
    new = {id(variable): jnp.asarray(value, variable.dtype) for variable, value in own_values}
    return list((_by_id(optimizer.variables, values) | new).values())


def _scope(variables, values):
    """Context manager: `variables` have these values."""
    return keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True)))


def _by_id(variables, values) -> dict:
    return {id(variable): value for variable, value in zip(variables, values, strict=True)}


def _in_order(variables, values_by_id) -> list:
    # A model whose author adds a metric to those that Keras lists has it twice, and its variables with it.
    return [values_by_id[id(variable)] for variable in variables]


def _each_read_once(model, state) -> tuple:
    """Returns the state of Keras' trainer with one value for a variable that the model lists more than once.

    Keras lists a random generator once for each layer that holds it, and donates its array as often. JAX leaves
    arguments that nothing reads out of a program, and with them the donations that it would refuse.
    """
    trainable, non_trainable, *others = state
    variables = model.non_trainable_variables
    return trainable, _in_order(variables, _by_id(variables, non_trainable)), *others


def step_without_trace(inventory, optimizers, train_step, state, data):
    """Runs `train_step(state, data)`; where its update was skipped, takes all other state from before.

    A non-trainable float variable that became non-finite although the step was applied (BatchNormalization
    fed 1e25) keeps its old value, too. Keras' JAX trainer carries the state of `model.optimizer` alone.
    """
    model, optimizer = inventory.model, inventory.model.optimizer
    state = _each_read_once(model, state)
    if optimizer not in optimizers:
        return _without_leaks(model, optimizers, train_step, state, data)
    run = functools.partial(_without_leaks, model, optimizers, train_step)
    logs, state, _ = _run_without_trace(optimizer, model.metrics, run, model.get_metrics_result, state, data)
    return logs, state


def _run_without_trace(optimizer, metrics, run, results, state, data):
    """Runs a step, `run(state, data)`; where its update was skipped, takes all other state from before.

    Returns:
        The logs, the state, and whether the step was skipped, a bool scalar of shape `()`.
    """
    trainable, old_non_trainable, optimizer_variables, old_metrics = state
    begun = _metrics_at_begin(metrics, old_metrics)
    optimizer.facts.wants_outcome = True
    result = run((trainable, old_non_trainable, optimizer_variables, begun), data)
    logs, (trainable, non_trainable, optimizer_variables, new_metrics) = result
    outcome, optimizer_variables = _closed(optimizer, optimizer_variables)
    any_skipped, step_is_skipped, _ = outcome
    non_trainable = _restored(non_trainable, old_non_trainable, outcome)
    logs, new_metrics = _metrics_without_trace(
        metrics, (old_metrics, begun, new_metrics), any_skipped, step_is_skipped, logs, results
    )
    return logs, (trainable, non_trainable, optimizer_variables, new_metrics), step_is_skipped


def _metrics_at_begin(metrics, values) -> list:
    """Returns the values that a step finds in `metrics`, which had `values` after the step before."""
    variables = _variables_of(metrics)
    begun = _by_id(variables, values)
    for metric in metric_states.flat(metrics):
        values_of_metric = [begun[id(variable)] for variable in metric.variables]
        begun |= _by_id(metric.variables, metric_states.at_begin(metric, values_of_metric))
    return _in_order(variables, begun)


def _metrics_without_trace(metrics, states, any_skipped, step_is_skipped, logs, results):
    """Returns the logs and the values of `metrics` after a step.

    Args:
        metrics: The metrics of the step.
        states: Their values before the step, as the step found them, and as it left them.
        any_skipped, step_is_skipped: bool scalars of shape `()`.
        logs: What the step returned.
        results: Function that returns what the metrics say, by name.
    """
    variables = _variables_of(metrics)

    def results_of(values):
        with _scope(variables, values):
            return metric_states.results_now(results)

    in_step = results_of(states[-1])
    states_by_variable = [_by_id(variables, values) for values in states]
    new, flat = dict(states_by_variable[-1]), []
    for metric in metric_states.flat(metrics):
        values_before, begun, left = (
            [state[id(variable)] for variable in metric.variables] for state in states_by_variable
        )
        values = metric_states.after_skip(metric, values_before, begun, left, any_skipped, step_is_skipped)
        flat.append((metric, values))
        new |= _by_id(metric.variables, values)
    # As in `rollback`, before they are asked whether a step has counted.
    new_values = _in_order(variables, new)
    new_results = results_of(new_values)
    is_traced = isinstance(any_skipped, jax.core.Tracer)
    nothing_counted = any_skipped
    if is_traced or any_skipped:
        nothing_counted &= metric_states.nothing_counted(flat, is_traced)
    shown = metric_states.shown(metrics, new_results, nothing_counted)
    return metric_states.replaced(logs, in_step, shown), new_values


def _variables_of(metrics) -> list:
    return [variable for metric in metrics for variable in metric.variables]


def _without_leaks(model, optimizers, train_step, state, data):
    """Runs `train_step`; raises `ValueError` where it has assigned values of the program that is traced.

    Keras' trainer carries the state of `model.optimizer` alone through a compiled step. Of another one, what is
    assigned there are not numbers, and the step that was traced goes on with the first ones for ever.
    """
    others = [optimizer for optimizer in optimizers if optimizer is not model.optimizer]
    old_values = [(variable, variable.value) for optimizer in others for variable in optimizer.variables]
    result = train_step(state, data)
    leaking = [o.name for o in others if any(isinstance(v.value, jax.core.Tracer) for v in o.variables)]
    if leaking:
        for variable, value in old_values:
            put(variable, value)
        raise ValueError(
            "Expected a compiled train step on JAX to update `model.optimizer` alone: Keras carries the state of "
            f"no other through it. Received: model '{model.name}', whose step updated {leaking}. Compile the model "
            "with `run_eagerly=True`, or update them with `stateless_apply` in a loop of your own."
        )
    return result


def _closed(optimizer, values):
    """Returns the `Outcome` of the step, and `values` without it."""
    by_id = _by_id(optimizer.variables, values)
    any_skipped, any_accepted = (by_id[id(flag)] > 0 for flag in optimizer.step_outcome)
    by_id |= {id(flag): jnp.zeros((), flag.dtype) for flag in optimizer.step_outcome}
    outcome = Outcome(any_skipped, any_skipped & ~any_accepted, ~(any_skipped | any_accepted))
    return outcome, list(by_id.values())


def _restored(values, old_values, outcome):
    """Returns the values of statistics after a step: the old ones where a step in variables puts them back."""
    # Where a value is the old one it was not assigned in this step (frozen weights): there is nothing to choose.
    assigned = [i for i, (value, old) in enumerate(zip(values, old_values, strict=True)) if value is not old]
    # The compiler for TPUs would compute statistics where they are chosen, at the end of the step, and keep the
    # activations that they are of until then: a tenth of ResNet-50's temporaries.
    new = jax.lax.optimization_barrier([values[i] for i in assigned])
    became = _became_non_finite(new, [old_values[i] for i in assigned])
    any_became = computed_once(sum(jnp.asarray(became_so, jnp.float32) for became_so in became)) > 0
    all_take_old = outcome.none_tried & any_became
    restored = list(old_values)
    for i, value, became_so in zip(assigned, new, became, strict=True):
        takes_old = outcome.all_skipped | became_so
        if jnp.issubdtype(value.dtype, jnp.floating):
            takes_old |= all_take_old
        restored[i] = jnp.where(takes_old, old_values[i], value)
    return restored


def _became_non_finite(values, old_values) -> list:
    """Returns for each of `values` whether it is not finite, and was: bools of shape `()`; `False` of whole numbers."""
    became_nonfinite = [False] * len(values)
    floats = [index for index, value in enumerate(values) if jnp.issubdtype(value.dtype, jnp.floating)]
    of_new, of_old = (_are_finite([of[index] for index in floats]) for of in (values, old_values))
    for index, is_finite, was_finite in zip(floats, of_new, of_old, strict=True):
        became_nonfinite[index] = was_finite & ~is_finite
    return became_nonfinite


def _are_finite(values) -> list:
    """Returns whether each of `values` is finite: bools of shape `()`."""
    flags = [None] * len(values)
    for indices, of_some in sums(values):
        for index, is_finite in zip(indices, jnp.isfinite(of_some), strict=True):
            flags[index] = is_finite
    return flags


def can_be_read(variable) -> bool:
    """Whether `variable` holds a value that can be read now.

    An error in `fit` leaves variables without one. A loop of the user's own may have donated it to its program, or
    assigned a value of the program that it traces.
    """
    value = None if is_purged(variable) else variable.value
    return value is not None and not isinstance(value, jax.core.Tracer) and not value.is_deleted()


def scale_logs(optimizers, result) -> tuple:
    """Returns the loss scale of the first of `optimizers`, and the steps that it skipped: Keras carries no other."""
    with _scope(optimizers[0].variables, result[1][2]):
        return optimizers[0].loss_scale, optimizers[0].skipped_steps.value


class CompiledStep:
    """A custom loop's step: one pure function of the state, in `jax.jit`. `parts` is a `StepParts`."""

    def __init__(self, parts):
        self._parts = parts

    def __call__(self, x, y, sample_weight):
        state, data = self._inputs(x, y, sample_weight)
        state, result = self._compiled(state)(state, *data)
        for variables, values in zip(self._variables(), state, strict=True):
            for variable, value in zip(variables, values, strict=True):
                # Each has been through `assign` in a scope of the step, which converts and checks.
                put(variable, value)
        return result

    def compiler_ir(self, x, y, sample_weight, optimized):
        state, data = self._inputs(x, y, sample_weight)
        lowered = self._jitted(state).lower(state, *data)
        return lowered.compile().as_text() if optimized else lowered.as_text(dialect="hlo")

    def traced_for(self, device, x, y):
        """Returns the step as `jax.stages.Traced`, to be compiled for devices that need not be there.

        Only shapes and dtypes are looked at, so nothing needs to have a value.

        Args:
            device: The one device. `None` for those of the `keras.distribution` in force.
            x, y: Tensors, or anything with shape and dtype, in the structure of a batch.
        """
        distribution = keras.distribution.distribution()
        one = None if device is None else jax.sharding.SingleDeviceSharding(device)

        def of_variable(variable):
            layout = one or distribution.get_variable_layout(variable)
            layout = getattr(layout, "backend_layout", layout)
            return jax.ShapeDtypeStruct(tuple(variable.shape), variable.dtype, sharding=layout)

        def of_data(tensor):
            if tensor is None:
                return None
            layout = one or distribution.get_data_layout(tensor.shape).backend_layout
            return jax.ShapeDtypeStruct(tuple(tensor.shape), tensor.dtype, sharding=layout)

        state = [[of_variable(variable) for variable in variables] for variables in self._variables()]
        data = keras.tree.map_structure(of_data, (x, y))
        return self._jitted(state).trace(state, *data, None)

    def temporary_bytes(self, x, y, sample_weight):
        if not self._parts.jit_compile:
            return None
        state, data = self._inputs(x, y, sample_weight)
        analysis = self._compiled(state).lower(state, *data).compile().memory_analysis()
        return None if analysis is None else int(analysis.temp_size_in_bytes)

    def op_by_op(self, state, data):
        """The step on the values of its variables and a batch, for whoever looks at its operations."""
        return self._pure_step(state, *data)

    def _inputs(self, x, y, sample_weight):
        state = [[variable.value for variable in variables] for variables in self._variables()]
        return _each_once(state), keras.tree.map_structure(_as_array, (x, y, sample_weight))

    def _variables(self):
        """Returns the variables of the state, in the order of its parts."""
        parts = self._parts
        trainable = parts.model.trainable_variables
        non_trainable = [*parts.model.non_trainable_variables, *parts.loss_states]
        return [trainable, non_trainable, parts.optimizer.variables, parts.objective.metric_variables]

    def _compiled(self, state):
        """Returns the program of the step for the weights that are trained now."""
        if not self._parts.jit_compile:
            return self._pure_step
        return self._parts.program("step", lambda: self._jitted(state))

    def _jitted(self, state):
        parts, shardings = self._parts, None
        if keras.distribution.distribution() is not None:
            # Where a variable lies stays what its layout says, whatever the compiler would choose.
            shardings = (jax.tree_util.tree_map(lambda value: value.sharding, state), None)
        # Donated in the order in which they come out: every buffer is used again.

        # A function of its own: JAX finds what it traced for a function by the function.
        def pure_step(state, *data):
            run = with_dtypes(lambda state, data: self._pure_step(state, *data), parts.travel, parts.model)
            return run(state, data)

        return jax.jit(pure_step, donate_argnums=0, out_shardings=shardings)

    def _pure_step(self, state, x, y, sample_weight):
        parts = self._parts
        run = self._no_update if parts.checks and not has_rows(x) else self._update
        with opened_step([parts.optimizer] if parts.checks else []):
            if parts.guards:
                logs, new_state, skipped = _run_without_trace(
                    parts.optimizer, parts.metrics, run, parts.metric_results, state, (x, y, sample_weight)
                )
            else:
                logs, new_state = run(state, (x, y, sample_weight))
                with _scope(parts.optimizer.variables, new_state[2]):
                    skipped = parts.last_step_skipped()
        return list(new_state), {**logs, parts.BEFORE: self._moving_values(state), "skipped": skipped}

    def _update(self, state, data):
        """A train step as Keras' own: returns the logs, and the state after it."""
        parts, (x, y, sample_weight) = self._parts, data
        model, optimizer = parts.model, parts.optimizer
        trainable, non_trainable, optimizer_values, metric_values = state
        of_model, of_losses = len(model.non_trainable_variables), parts.loss_states
        non_trainable, loss_values = non_trainable[:of_model], non_trainable[of_model:]

        def scaled_loss_of(trainable):
            y_pred, updated, losses = model.stateless_call(
                trainable, non_trainable, x, return_losses=True, **parts.call_options
            )
            with _scope(of_losses, loss_values) as scope:
                loss = parts.objective.total_loss(y, y_pred, sample_weight, losses)
            updated = [*updated, *map(scope.get_current_value, of_losses)]
            with _scope(optimizer.variables, optimizer_values):
                scaled_loss = optimizer.scale_loss(loss)
            return scaled_loss, (loss, y_pred, updated)

        (_, (loss, y_pred, updated)), grads = jax.value_and_grad(scaled_loss_of, has_aux=True)(trainable)
        trainable, optimizer_values = self._applied(grads, trainable, non_trainable, optimizer_values)
        metric_variables = parts.objective.metric_variables
        with _scope(metric_variables, metric_values) as scope:
            parts.objective.update_metrics(y, y_pred, sample_weight)
            results = parts.metric_results()
        metric_values = [scope.get_current_value(variable) for variable in metric_variables]
        return self._logs(loss, optimizer_values, results), (trainable, updated, optimizer_values, metric_values)

    def _no_update(self, state, data):
        """The step for a batch without rows, as `_update`."""
        *rest, optimizer_values, metric_values = state
        optimizer_values = _skipped(self._parts.optimizer, optimizer_values)
        with _scope(self._parts.objective.metric_variables, metric_values):
            results = self._parts.metric_results()
        return self._logs(jnp.full((), jnp.nan), optimizer_values, results), (*rest, optimizer_values, metric_values)

    def _logs(self, loss, optimizer_values, results) -> dict:
        with _scope(self._parts.optimizer.variables, optimizer_values):
            return {"loss": loss, "loss_scale": self._parts.loss_scale(), **results}

    def _moving_values(self, state) -> dict:
        _, _, of_optimizer, of_metrics = map(_by_id, self._variables(), state)
        by_id = of_optimizer | of_metrics
        return self._parts.packed([by_id[id(variable)] for variable in self._parts.moving])

    def _applied(self, grads, trainable, non_trainable, optimizer_values):
        """Returns the values of the trained weights and of the optimizer's variables after its update."""
        model, optimizer = self._parts.model, self._parts.optimizer
        if self._parts.trains_all():
            return optimizer.stateless_apply(optimizer_values, grads, trainable)
        # `stateless_apply` takes all weights that the optimizer was built on. The frozen ones are read only.
        variables = model.trainable_variables
        all_variables = [*variables, *model.non_trainable_variables, *optimizer.variables]
        with _scope(all_variables, [*trainable, *non_trainable, *optimizer_values]) as scope:
            optimizer.apply(grads, variables)
        trainable = [scope.get_current_value(variable) for variable in variables]
        return trainable, [scope.get_current_value(variable) for variable in optimizer.variables]


class HeldState(defaults.HeldState):
    """What `fit` holds between two steps: the values that it hands on, or where it hands on none, the variables."""

    def __init__(self, model, arguments):
        super().__init__(model, arguments)
        self._state = [list(values) for values in arguments[0]] if arguments else []
        groups = []
        if self._state:
            groups = [model.trainable_variables, model.non_trainable_variables]
            groups += [model.optimizer.variables, model.metrics_variables]
        self._places = {id(v): (i, j) for i, group in enumerate(groups) for j, v in enumerate(group)}

    def arguments(self):
        return [tuple(self._state)] if self._state else []

    def after(self, result):
        if not self._state:
            return result, self
        logs, state = result
        # With the places of the variables: to ask a model for them takes longer than to read some numbers.
        after = copy.copy(self)
        after._state = [list(values) for values in state]
        return logs, after

    def returned(self, logs):
        return (logs, tuple(self._state)) if self._state else logs

    def read(self, variable):
        # A copy: the next step is given the value to overwrite.
        return [np.array(self._value(variable))]

    def write(self, variable, values):
        present = self._value(variable)
        value = jnp.asarray(values[0], present.dtype)
        if present.committed:
            # Where it was, or the step is compiled once more.
            value = jax.device_put(value, present.sharding)
        if id(variable) in self._places:
            i, j = self._places[id(variable)]
            self._state[i][j] = value
        else:
            put(variable, value)

    def _value(self, variable):
        if id(variable) not in self._places:
            return variable.value
        i, j = self._places[id(variable)]
        return self._state[i][j]


def held_batches(data, model) -> tuple:
    """As in `_tensorflow.py`; `fit` hands on an iterator of Python."""
    return list(itertools.islice(data, model.steps_per_execution)), lambda batches: lambda: iter(batches)


def check_is_outermost(data):
    """Raises `ValueError` if a batch is that of a function which JAX is tracing: the step writes what it trains."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(data)):
        raise ValueError(
            "Expected the arrays of a batch: a train step writes into the variables of its model, and compiles itself. "
            "Received: the tracers of a function under `jax.jit`, `jax.vmap`, `jax.grad` or a loop of `jax.lax`. Call "
            "the step outside of it."
        )


def local_tensors(structure):
    """Returns the tensors of a batch."""
    return keras.tree.map_structure(_as_array, structure)


def _each_once(state):
    """Returns `state` with a copy where two variables hold one array, which cannot be donated twice."""
    seen = set()

    def once(value):
        if id(value) in seen:
            return jnp.copy(value)
        seen.add(id(value))
        return value

    return [[once(value) for value in values] for values in state]


def _as_array(value):
    if value is None or isinstance(value, (jax.Array, sparse.JAXSparse)):
        return value
    value = as_array(value)
    distribution = keras.distribution.distribution()
    if distribution is None:
        return jnp.asarray(value)
    layout = distribution.get_data_layout(value.shape)
    # Each process brings the rows of its own devices.
    return jax.make_array_from_process_local_data(layout.backend_layout, value)
