"""Metrics around a step that may be skipped: the values they keep, and what the logs say of them.

A skipped step leaves no trace in a metric. But while no step has counted, every metric would say 0.0, and a loss of
0.0 looks perfect. So a metric without a counted step is NaN in the logs, and a tracker of losses, a
`keras.metrics.Mean`, says the mean of the finite losses that the skipped steps computed, each with the weight that the
step gave it. The tracker keeps them itself, where Keras carries its state and begins it anew: as a `total` and a
`count` of the opposite sign, which leave their quotient what it is. Each step finds such a tracker as if it was reset,
so from the first counted step on nothing is left of them.
"""

import keras
import numpy as np
from keras import ops

from mpkeras import _keras
from mpkeras.policies.loss_scaling import scalars


def flat(metrics) -> list:
    """Returns the metrics that hold the variables of `metrics`: those given to `compile` one by one."""
    return [part for metric in metrics for part in _keras.parts_of_metric(metric)]


def tracks_losses(metric) -> bool:
    """Whether a train step gives `metric` the values themselves; subclasses of `Mean` compare `y` with `y_pred`."""
    return type(metric) is keras.metrics.Mean


def at_begin(metric, values) -> list:
    """Returns the values that a step finds in `metric`, which had `values` after the step before."""
    if not tracks_losses(metric):
        return values
    has_counted = scalars.greater_equal(values[1], 0)
    return [scalars.where(has_counted, value, scalars.zeros_like(value)) for value in values]


def after_skip(metric, values_before, begun, after, any_skipped, step_is_skipped) -> list:
    """Returns the values of `metric` after a step; as the step left them, unless an update of it was skipped.

    Args:
        metric: A metric of `flat`.
        before, begun, after: Its values before the step, those of `at_begin`, and those that the step left.
        any_skipped, step_is_skipped: bool scalars of shape `()`, whether one update of the step was skipped, and
            whether all were. Where some were not, a metric takes its old values only if it became non-finite.
    """
    became_non_finite = ops.logical_and(_are_finite(begun), ops.logical_not(_are_finite(after)))
    takes_old = ops.logical_or(step_is_skipped, ops.logical_and(any_skipped, became_non_finite))
    old = begun
    if tracks_losses(metric):
        has_counted = ops.greater(begun[1], 0)
        pairs = zip(begun, _of_skipped_steps(values_before, after), strict=True)
        old = [ops.where(has_counted, counted, skipped) for counted, skipped in pairs]
    return [ops.where(takes_old, *pair) for pair in zip(old, after, strict=True)]


def _of_skipped_steps(values_before, after) -> list:
    """Returns `total` and `count` of a tracker in which no step has counted; NaN where no loss was finite."""
    # Those of the steps before carry the sign already.
    contributions = [(values_before, ops.less(values_before[1], 0), 1.0), (after, ops.greater(after[1], 0), -1.0)]
    total, count = 0.0, 0.0
    for values, is_there, sign in contributions:
        is_used = ops.logical_and(is_there, ops.isfinite(values[0]))
        total += ops.where(is_used, sign * values[0], ops.zeros_like(values[0]))
        count += ops.where(is_used, sign * values[1], ops.zeros_like(values[1]))
    has_none = ops.equal(count, 0)
    return [
        ops.where(has_none, ops.full_like(total, float("nan")), total),
        ops.where(has_none, -ops.ones_like(count), count),
    ]


def nothing_counted(values: list, is_traced: bool):
    """Returns whether no step has counted since the metrics were reset: a bool scalar of shape `()`.

    Args:
        values: `(metric, values)` for each metric of `flat`.
        is_traced: Whether a program is made of the step, so that no answer is known yet.
    """
    is_new = ops.convert_to_tensor(True)
    counts = [now[1] for metric, now in values if tracks_losses(metric)]
    for count in counts:
        is_new = ops.logical_and(is_new, ops.less_equal(count, 0))
    # To ask another metric is to run its `reset_state`, which empties the lists and counters of Python that a metric
    # of the user's may keep: of steps that have counted, unless the trackers say that there are none.
    if not is_traced and not bool(is_new):
        return is_new
    for metric, now in values:
        if not tracks_losses(metric) and (now or counts):
            for value, reset in zip(now, reset_values(metric, now), strict=True):
                is_new = ops.logical_and(is_new, ops.all(ops.equal(value, ops.cast(reset, value.dtype))))
    return is_new


def reset_values(metric, values) -> list:
    """Returns what `metric.reset_state()` makes of `values`, those of its variables, and changes none of these.

    A variable that it leaves alone, such as a count over all epochs, keeps its value. It is not read where it is: while
    a program is made, JAX may have given its array to the last step.
    """
    pairs = list(zip(metric.variables, values, strict=True))
    with keras.StatelessScope(state_mapping=pairs) as scope:
        metric.reset_state()
    return [scope.get_current_value(variable) for variable in metric.variables]


def names_of_trackers(metrics) -> set:
    """Returns the names of those of `metrics` that track losses."""
    return {metric.name for metric in flat(metrics) if tracks_losses(metric)}


def shown(metrics, results: dict, nothing_has_counted) -> dict:
    """Returns `results`, those of `metrics`, with NaN for what is no tracker of losses where nothing has counted."""
    trackers = names_of_trackers(metrics)

    def or_nan(value):
        # Whole numbers know no NaN.
        if "float" not in keras.backend.standardize_dtype(value.dtype):
            return value
        return ops.where(nothing_has_counted, ops.full_like(value, float("nan")), value)

    return {
        name: value if name in trackers else keras.tree.map_structure(or_nan, value) for name, value in results.items()
    }


def of_epoch(metrics, results: dict, last_logs: dict) -> dict:
    """Returns `results`, those of `metrics` at the end of an epoch, but the last step's logs where a metric is empty.

    A metric that has counted nothing says 0.0: a tracker that the step never updates, where the step itself says a
    loss, and any other metric where all steps were skipped, of which the logs say NaN.
    """
    trackers = {metric.name: metric for metric in flat(metrics) if tracks_losses(metric)}
    counts = {name: ops.convert_to_numpy(ops.convert_to_tensor(tracker.count)) for name, tracker in trackers.items()}
    empty = {name for name, count in counts.items() if count == 0}
    others = {name: last_logs[name] for name in results if name not in trackers}
    arrays = [np.asarray(ops.convert_to_numpy(value)) for value in keras.tree.flatten(others)]
    floats = [array for array in arrays if not np.issubdtype(array.dtype, np.integer)]
    # Below 0 is a tracker of skipped steps alone. Without one the steps have said it of the others.
    only_skipped = min(counts.values(), default=0) < 0 and max(counts.values()) <= 0
    if only_skipped or floats and all(np.isnan(array).all() for array in floats):
        empty |= set(others)
    return {name: last_logs[name] if name in empty else value for name, value in results.items()}


def results_now(results) -> dict:
    """Returns copies of what `results()` says, as tensors: a metric may return the variable that it holds."""
    return keras.tree.map_structure(lambda value: ops.copy(ops.convert_to_tensor(value)), results())


def results_of_trackers(metrics, results: dict) -> dict:
    """Returns `results`, those of `metrics`, with what trackers of losses say now in the place of what they said."""
    trackers = [metric for metric in flat(metrics) if tracks_losses(metric) and metric.name in results]
    return results | {metric.name: metric.result() for metric in trackers}


def replaced(logs, in_step: dict, shown_now: dict):
    """Returns `logs` with what metrics say now in the place of what they said within the step.

    A train step of the user's own may report what else it likes: an entry is a metric's if it has its name and value.

    Args:
        logs: The result of a train step; anything but a dictionary comes back as it is.
        in_step, shown_now: Results of the metrics by name, before they took their old values and after.
    """
    if not isinstance(logs, dict):
        return logs
    logs = dict(logs)
    for name, value in logs.items():
        if name not in in_step:
            # Keras' own metric of those that were given to `compile` says theirs in a dictionary.
            logs[name] = replaced(value, in_step, shown_now)
            continue
        leaves = [keras.tree.flatten(part[name]) for part in (logs, in_step, shown_now)]
        if len({len(part) for part in leaves}) == 1:
            new = [_replaced_value(*values) for values in zip(*leaves, strict=True)]
            logs[name] = keras.tree.pack_sequence_as(logs[name], new)
    return logs


def _replaced_value(value, in_step, now):
    if isinstance(value, float):
        value = ops.convert_to_tensor(value, in_step.dtype)
    if not ops.is_tensor(value) or tuple(value.shape) != tuple(in_step.shape):
        return value
    in_step, now = ops.cast(in_step, value.dtype), ops.cast(now, value.dtype)
    is_same = ops.equal(value, in_step)
    if "float" in keras.backend.standardize_dtype(value.dtype):
        is_same = ops.logical_or(is_same, ops.logical_and(ops.isnan(value), ops.isnan(in_step)))
    return ops.where(ops.all(is_same), now, value)


def _are_finite(values):
    floats = [value for value in values if "float" in keras.backend.standardize_dtype(value.dtype)]
    return ops.isfinite(sum((ops.sum(ops.cast(value, "float32")) for value in floats), 0.0))
