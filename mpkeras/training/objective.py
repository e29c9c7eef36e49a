"""What a custom loop trains for: one loss or several, the model's own, and metrics, all in float32."""

import keras
from keras import ops

from mpkeras import _keras
from mpkeras._arguments import named
from mpkeras.policies.dtypes import widen
from mpkeras.training import training_backend


class Objective:
    """The losses and metrics of a train step.

    Args:
        loss_fn: As in `mpkeras.make_train_step`.
        metrics: As in `mpkeras.make_train_step`.
    """

    def __init__(self, loss_fn, metrics):
        # As its user gave them, for the file of a failed step.
        self.given = loss_fn, metrics
        # Of a bound method the object, which may hold variables that it writes.
        self.given_losses = [getattr(loss, "__self__", loss) for loss in keras.tree.flatten(loss_fn)]
        self._losses = _checked_losses(loss_fn)
        # A list, or a list for each output that has one.
        self._metrics = _checked_metrics(metrics)
        _check_names(self.metrics)

    @property
    def metrics(self) -> list:
        lists = self._metrics.values() if isinstance(self._metrics, dict) else [self._metrics]
        return [metric for metrics in lists for metric in metrics]

    @property
    def metric_variables(self) -> list:
        return [variable for metric in self.metrics for variable in metric.variables]

    def total_loss(self, y, y_pred, sample_weight, model_losses):
        """Returns the loss to train, float32 of shape `()`: of all outputs, and the model's own.

        Args:
            y, y_pred, sample_weight: Of the structure of the model's outputs; `sample_weight` may be one
                tensor for all of them, or `None`.
            model_losses: List of tensors of any shape, `model.losses`; summed, as `fit` does.
        """
        y_pred = keras.tree.map_structure(widen, y_pred)
        losses = []
        if self._losses is not None:
            losses = [loss(*arguments) for loss, *arguments in _by_output(self._losses, y, y_pred, sample_weight)]
        # The model's own losses are divided by the same number as an average over the batch, on every replica.
        replicas = training_backend.replicas()
        losses += [ops.sum(ops.cast(loss, "float32")) / replicas for loss in model_losses]
        if not losses:
            raise ValueError(
                "Expected a loss to train. Received: `loss_fn=None` for a model that adds no loss of its own. "
                "Pass `loss_fn`, or call `add_loss` in a layer."
            )
        return sum(losses[1:], start=losses[0])

    def update_metrics(self, y, y_pred, sample_weight):
        for metrics, y_of, y_pred_of, weight in _by_output(self._metrics, y, y_pred, sample_weight):
            for metric in metrics:
                metric.update_state(y_of, y_pred_of, sample_weight=weight)


def _reduced(function):
    """Returns a plain function as a loss: weighted and averaged as Keras does."""
    mean = _Values(name="loss")

    def loss(y, y_pred, sample_weight):
        values = ops.cast(function(y, y_pred), "float32")
        if len(values.shape):
            return mean(values, values, sample_weight=sample_weight)
        if sample_weight is not None:
            raise ValueError(
                "Expected `loss_fn` to return one loss an example, so that `sample_weight` can weigh them. "
                "Received: a scalar. Return the losses before their mean, or leave `sample_weight` out."
            )
        if training_backend.replicas() > 1:
            raise ValueError(
                "Expected `loss_fn` to be a `keras.losses.Loss`, or to return one loss an example, where several "
                "replicas average together. Received: a scalar. Return the losses before their mean."
            )
        return values

    return loss


class _Values(keras.losses.Loss):
    """Keras' own reduction of losses that are there already."""

    def call(self, y_true, y_pred):
        return y_pred


def _checked_losses(loss_fn):
    if loss_fn is None:
        return None
    if isinstance(loss_fn, (list, tuple, dict)) and not loss_fn:
        raise ValueError(
            f"Expected at least one loss. Received: loss_fn={loss_fn!r}. Where the model adds its own, pass `None`."
        )
    if isinstance(loss_fn, (list, tuple)):
        return dict(enumerate(_checked_losses(loss) for loss in loss_fn))
    if isinstance(loss_fn, dict):
        return {name: _checked_losses(loss) for name, loss in loss_fn.items()}
    if isinstance(loss_fn, str):
        loss_fn = named(keras.losses.get, loss_fn, "loss_fn", "mean_squared_error")
    if isinstance(loss_fn, keras.losses.Loss):
        return _with_targets(loss_fn, _weighted(loss_fn))
    if callable(loss_fn) and not isinstance(loss_fn, type):
        return _with_targets(loss_fn, _reduced(loss_fn))
    raise TypeError(
        "Expected `loss_fn` to be a `keras.losses.Loss`, its name, a function `loss_fn(y, y_pred)`, or a list "
        f"or dictionary of these. Received: loss_fn={loss_fn!r} (of type {type(loss_fn).__name__}). "
        "Pass for example `keras.losses.MeanSquaredError()`."
    )


def _weighted(loss):
    if loss.reduction not in ("sum", "sum_over_batch_size", "mean", "mean_with_sample_weight"):
        raise ValueError(
            "Expected a loss that is reduced to a scalar. Received: "
            f"reduction={loss.reduction!r} of {type(loss).__name__}. Use 'sum_over_batch_size'."
        )
    return lambda y, y_pred, sample_weight: loss(y, y_pred, sample_weight=sample_weight)


def _with_targets(loss_fn, loss):
    """Returns `loss`, which refuses a batch without targets where `loss_fn` is one of Keras' or calls Keras' own."""
    # A function of the user's, and a class with a `__call__` of its own, may do without.
    needs_targets = type(loss_fn).__call__ is keras.losses.Loss.__call__ or (
        not isinstance(loss_fn, keras.losses.Loss) and _keras.is_of_keras(loss_fn)
    )
    if not needs_targets:
        return loss

    def loss_with_targets(y, y_pred, sample_weight):
        if y is None:
            name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
            raise ValueError(
                f"Expected targets `y`, which loss '{name}' compares the outputs with. Received: y=None. Call "
                "`step(x, y)`, or pass `loss_fn=None` for a model that adds its own losses."
            )
        return loss(y, y_pred, sample_weight)

    return loss_with_targets


def _checked_metrics(metrics):
    if metrics is None:
        return []
    if isinstance(metrics, (list, tuple)) and metrics and all(isinstance(m, (list, tuple)) for m in metrics):
        metrics = dict(enumerate(metrics))
    if isinstance(metrics, dict):
        return {name: _checked_list(several) for name, several in metrics.items()}
    return _checked_list(metrics)


def _checked_list(metrics) -> list:
    metrics = list(metrics) if isinstance(metrics, (list, tuple)) else [metrics]
    for metric in metrics:
        if not isinstance(metric, keras.metrics.Metric):
            raise TypeError(
                "Expected `metrics` to hold `keras.metrics.Metric` objects. Received: "
                f"{metric!r} (of type {type(metric).__name__}). Pass for example `keras.metrics.MeanSquaredError()`."
            )
    return metrics


def _check_names(metrics):
    names = [metric.name for metric in metrics]
    taken = {"loss", "loss_scale", "skipped"} | {name for name in names if names.count(name) > 1}
    if taken & set(names):
        raise ValueError(
            "Expected metrics with names of their own, as they name the step's results. Received: "
            f"{sorted(names)}. Rename {sorted(taken & set(names))} with `name=`."
        )


def _by_output(functions, y, y_pred, sample_weight):
    """Yields `(function, y, y_pred, sample_weight)` for one function, or for each output that has one."""
    if not isinstance(functions, dict):
        yield functions, y, y_pred, sample_weight
        return
    outputs = y_pred if isinstance(y_pred, dict) else dict(enumerate(keras.tree.flatten(y_pred)))
    if not set(functions) <= set(outputs):
        raise ValueError(
            "Expected losses and metrics for outputs of the model. Received: "
            f"{sorted(map(str, functions))} for outputs {sorted(map(str, outputs))}. "
            "Use the names of a dictionary of outputs, or a list in the order of a list of outputs."
        )
    for key, function in functions.items():
        weight = sample_weight[key] if isinstance(sample_weight, (dict, list, tuple)) else sample_weight
        yield function, None if y is None else y[key], outputs[key], weight
