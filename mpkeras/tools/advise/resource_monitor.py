"""`ResourceMonitor`: step time, throughput and memory among the logs of `fit`."""

import math
import threading
import time

import keras

from mpkeras.seams import ModelInFit, ModelView, checked_count, devices

_device = devices.backend_module()


class ResourceMonitor(keras.callbacks.Callback):
    """Adds `step_time_ms`, `examples_per_s`, `state_bytes` and `peak_bytes` to the logs of every epoch.

    History and the progress bar show them wherever this callback stands in the list. Callbacks that are to write or
    monitor them (`CSVLogger`, `TensorBoard`, the Keras callback of W&B, `EarlyStopping`) come after it: Keras hands the
    logs of an epoch from one callback to the next. Where `MixedPrecision` stands does not matter.

    - `step_time_ms`: milliseconds a training step, the mean over the epoch: wall time from batch to batch, with the
      input pipeline, the other callbacks and the wait for the device in it. Validation is not counted. In the
      first epoch of a `fit` the first batch, which compiles, is left out, and where their number is known the last
      one, too: a smaller batch compiles once more. NaN where nothing is left.
    - `examples_per_s`: examples a second at a full batch. Only where the batch size is known: given here, or seen by
      the train step that `MixedPrecision` guards (on JAX and torch; on TensorFlow, a dataset that drops the remainder).
    - `peak_bytes`: the most memory that was in use up to now. On an accelerator its own, of the fullest of several
      devices: by `tf.config.experimental.get_memory_info`, `jax.Device.memory_stats` or
      `torch.cuda.max_memory_allocated`. On a CPU, and where the device does not tell, the peak resident set of the
      whole process, by `resource.getrusage`; left out where there is no such module (Windows).

    - `state_bytes`: what training holds beside the activations: weights and the optimizer's state.

    Nothing is measured inside of a step, and the device is waited for once an epoch: a step costs two readings of
    the clock. With `steps_per_execution` the batches of one execution share its time.

    Args:
        batch_size: Examples a step, as given to `fit` or to the dataset; by default what the guarded step has seen.

    Raises:
        ValueError: If `batch_size` is not a whole number of at least 1.

    Example:

    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> callbacks = [mpkeras.callbacks.ResourceMonitor(batch_size=2), keras.callbacks.CSVLogger("log.csv")]
    >>> history = model.fit(np.ones((8, 2)), np.ones((8, 1)), batch_size=2, verbose=0, callbacks=callbacks)
    >>> history.history["step_time_ms"][0] > 0, history.history["examples_per_s"][0] > 0
    (True, True)
    """

    # Keras would otherwise wait for the device after every batch to hand this callback its logs, which it does
    # not read.
    async_safe = True

    def __init__(self, batch_size: int | None = None) -> None:
        super().__init__()
        if batch_size is not None:
            batch_size = checked_count("batch_size", batch_size, "Pass what `fit` or the dataset has, or leave it out.")
        self.batch_size = batch_size

    def on_train_begin(self, logs=None):
        self._is_first_epoch = True
        # Batches may end in threads of Keras' own. Not before: a lock can be neither copied nor pickled.
        self._lock = threading.Lock()

    def on_epoch_begin(self, epoch, logs=None):
        # (wall time, steps done) where timing begins and ends.
        self._begin = self._end = None
        self._batches_begun = 0
        self._last_batch = -1

    def on_train_batch_begin(self, batch, logs=None):
        self._batches_begun += 1
        if self._begin is None and self._batches_begun == (2 if self._is_first_epoch else 1):
            self._begin = time.perf_counter(), batch
        if self._is_first_epoch and self._end is None and batch == self._start_of_last_execution():
            _device.wait(self.model)
            self._end = time.perf_counter(), batch

    def on_train_batch_end(self, batch, logs=None):
        with self._lock:
            self._last_batch = max(self._last_batch, batch)

    def on_test_begin(self, logs=None):
        self._stop()

    def on_epoch_end(self, epoch, logs=None):
        self._stop()
        self._is_first_epoch = False
        if logs is None:
            return
        logs["step_time_ms"] = self._step_time_ms()
        batch_size = self.batch_size or ModelInFit(self.model).seen_batch_size
        if batch_size is not None:
            logs["examples_per_s"] = 1e3 * batch_size / logs["step_time_ms"]
        bytes_by_part = ModelView(self.model).training_bytes(getattr(self.model, "optimizer", None))
        logs["state_bytes"] = sum(sum(bytes_by_part.get(name, {}).values()) for name in ("weights", "slots"))
        peak_bytes = _device.peak_bytes() or process_peak_bytes()
        if peak_bytes is not None:
            logs["peak_bytes"] = peak_bytes

    def _start_of_last_execution(self) -> int | None:
        """Returns the number of the batch with which the last execution of an epoch begins, if Keras knows."""
        steps = self.params.get("steps")
        if steps is None:
            return None
        together = self.model.steps_per_execution
        return (steps - 1) // together * together

    def _stop(self):
        """Ends the timing of an epoch where it has not ended: after its last batch, before validation."""
        if self._begin is not None and self._end is None:
            _device.wait(self.model)
            # How many batches there were is known when all of them have ended: see `_step_time_ms`.
            self._end = time.perf_counter(), None

    def _step_time_ms(self) -> float:
        if self._begin is None or self._end is None:
            return math.nan
        (begun, first), (ended, last) = self._begin, self._end
        steps = (self._last_batch + 1 if last is None else last) - first
        return 1e3 * (ended - begun) / steps if steps else math.nan


def process_peak_bytes() -> int | None:
    """Returns the peak resident set of this process; `None` where the system does not tell."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts in units of 1024 bytes, macOS in bytes.
    return peak if sys.platform == "darwin" else peak * 1024
