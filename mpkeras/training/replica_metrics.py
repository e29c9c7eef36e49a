"""Metrics in the logs of an epoch: of all replicas of a strategy together."""

import keras
import numpy as np

from mpkeras.training import metric_states, training_backend


class MetricsOfAllReplicas(keras.callbacks.Callback):
    """Puts what metrics say of all replicas into the logs of an epoch, for the callbacks behind it.

    Keras averages the logs of replicas: of a count, or of a ratio such as precision, that is another number. It asks
    the metrics again when an epoch ends, but not where the logs have names that no metric has, as those of a prepared
    model.
    """

    def __init__(self):
        super().__init__()
        self._results: dict = {}

    def on_epoch_begin(self, epoch, logs=None):
        self._results = {}

    def on_test_begin(self, logs=None):
        # The validation resets the metrics next.
        self._results = self._results or self._results_now()

    def on_epoch_end(self, epoch, logs=None):
        results = self._results or self._results_now()
        trackers = metric_states.names_of_trackers(self.model.metrics)
        shown = {name: value for name, value in results.items() if logs and name in logs}
        # A metric may have a number for each class, as `F1Score` has.
        others = [logs[name] for name in shown if name not in trackers and not isinstance(shown[name], dict)]
        # Nothing has counted where all are NaN, as the steps have said.
        has_counted = not others or not all(np.isnan(value).all() for value in others)
        for name, value in shown.items():
            if has_counted or name in trackers:
                logs[name] = value

    def _results_now(self) -> dict:
        if training_backend.replicas(self.model) == 1:
            return {}
        return keras.tree.map_structure(
            lambda value: keras.ops.convert_to_numpy(value)[()], self.model.get_metrics_result()
        )
