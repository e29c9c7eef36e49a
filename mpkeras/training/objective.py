"""What a custom loop trains for: one loss or several, the model's own, and metrics, all in float32."""

import keras
from keras import ops

from mpkeras import _keras
from mpkeras.training.backend import training_backend


class Objective:
    """The losses and metrics of a train step.

    Args:
        loss_fn: As in `mpkeras.make_train_step`.
        metrics: As in `mpkeras.make_train_step`.
    """

    def __init__(self, loss_fn, metrics):
        # As its user gave them, for the file of a failed step.
        self.given = loss_fn, metrics
        self._losses = _checked_losses(loss_fn)
        self._metrics = _checked_metrics(metrics)

    @property
    def metrics(self) -> list:
        if isinstance(self._metrics, list):
            return self._metrics
        return [metric for metrics in self._metrics.values() for metric in metrics]

    def total_loss(self, y, y_pred, sample_weight, model_losses):
        """Returns the loss to train, float32 of shape `()`: of all outputs, and the model's own.

        Args:
            y, y_pred, sample_weight: Of the structure of the model's outputs; `sample_weight` may be one
                tensor for all of them, or `None`.
            model_losses: List of tensors of any shape, `model.losses`; summed, as `fit` does.
        """
        y_pred = keras.tree.map_structure(_in_float32, y_pred)
        losses = []
        if self._losses is not None:
            for loss, *arguments in flat_pairs(self._losses, y, y_pred, sample_weight):
                losses.append(loss(*arguments))
        # What an average over the batch is divided by on every replica, the model's own losses are, too.
        replicas = training_backend.replicas()
        losses += [ops.sum(ops.cast(loss, "float32")) / replicas for loss in model_losses]
        if not losses:
            raise ValueError(
                "Expected a loss to train. Received: `loss_fn=None` for a model that adds no loss of its own. "
                "Pass `loss_fn`, or call `add_loss` in a layer."
            )
        total = losses[0]
        for loss in losses[1:]:
            total = total + loss
        return total

    def update_metrics(self, y, y_pred, sample_weight):
        if isinstance(self._metrics, list):
            for metric in self._metrics:
                metric.update_state(y, y_pred, sample_weight=sample_weight)
            return
        for metrics, *arguments in flat_pairs(self._metrics, y, y_pred, sample_weight):
            for metric in metrics:
                metric.update_state(arguments[0], arguments[1], sample_weight=arguments[2])


class _Reduced:
    """A plain function as a loss: weighted and averaged as Keras does."""

    def __init__(self, function):
        self._function = function
        self._mean = _Values(name="loss")

    def __call__(self, y, y_pred, sample_weight):
        values = ops.cast(self._function(y, y_pred), "float32")
        if len(values.shape):
            return self._mean(values, values, sample_weight=sample_weight)
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
        loss_fn = keras.losses.get(loss_fn)
    if isinstance(loss_fn, keras.losses.Loss):
        return _weighted(loss_fn)
    if callable(loss_fn):
        return _Reduced(loss_fn)
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


def _checked_metrics(metrics):
    if metrics is None:
        return []
    if isinstance(metrics, dict):
        structure = {name: _checked_list(several) for name, several in metrics.items()}
    elif isinstance(metrics, (list, tuple)) and metrics and all(isinstance(m, (list, tuple)) for m in metrics):
        structure = {i: _checked_list(several) for i, several in enumerate(metrics)}
    else:
        return _checked_names(_checked_list(metrics))
    _checked_names([metric for several in structure.values() for metric in several])
    return structure


def _checked_list(metrics) -> list:
    metrics = list(metrics) if isinstance(metrics, (list, tuple)) else [metrics]
    for metric in metrics:
        if not isinstance(metric, keras.metrics.Metric):
            raise TypeError(
                "Expected `metrics` to hold `keras.metrics.Metric` objects. Received: "
                f"{metric!r} (of type {type(metric).__name__}). Pass for example `keras.metrics.MeanSquaredError()`."
            )
    return metrics


def _checked_names(metrics) -> list:
    names = [metric.name for metric in metrics]
    taken = {"loss", "loss_scale", "skipped"} | {name for name in names if names.count(name) > 1}
    if taken & set(names):
        raise ValueError(
            "Expected metrics with names of their own, as they name the step's results. Received: "
            f"{sorted(names)}. Rename {sorted(taken & set(names))} with `name=`."
        )
    return metrics


def flat_pairs(functions, y, y_pred, sample_weight):
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
        yield function, y[key], outputs[key], weight


def _in_float32(tensor):
    if keras.backend.standardize_dtype(tensor.dtype) not in ("float16", "bfloat16"):
        return tensor
    wide = ops.cast(tensor, "float32")
    _keras.copy_mask(tensor, wide)
    return wide
