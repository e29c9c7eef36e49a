"""Validations, evaluations and predictions that are not finite: said as in training, and never the best epoch."""

import functools
import math
from collections.abc import Callable
from numbers import Real

import keras
import numpy as np

from mpkeras import _keras, _replaced
from mpkeras.conversion.plan import computes_in
from mpkeras.training.large_data import LARGEST
from mpkeras.training.own_loops import listed
from mpkeras.training.whole_numbers import arrays_in_memory


class Look(keras.callbacks.Callback):
    """Looks at the values of one evaluation.

    Attributes:
        logs: The values at its end, by name.
        first_batches: By name, the batch from which on a value was not finite, counted from 0.
    """

    # Keras reads the values of each batch in any case; on JAX it need not wait for this callback.
    async_safe = True

    def __init__(self):
        super().__init__()
        self.logs: dict = {}
        self.first_batches: dict[str, int] = {}

    def on_test_batch_end(self, batch, logs=None):
        for name in not_finite(logs):
            # Keras may hand over batches out of their order.
            self.first_batches[name] = min(batch, self.first_batches.get(name, batch))

    def on_test_end(self, logs=None):
        self.logs = dict(logs or {})

    def about(self, name: str, shown_as: str) -> str:
        """Returns what a value is, as which name it is shown, and since which batch."""
        since = f" from batch {self.first_batches[name]} on" if name in self.first_batches else ""
        return f"`{shown_as}` is {float(self.logs[name])}{since}"


def not_finite(logs) -> list:
    """Returns the names of the numbers in `logs` that are not finite."""
    return [name for name, value in (logs or {}).items() if isinstance(value, Real) and not math.isfinite(value)]


_HOW_TO_FIND_OUT = (
    "The forward pass is at fault: `mpkeras.callbacks.NumericsMonitor()` among the callbacks of `fit` names the layer, "
    "and `mpkeras.trace_numerics(model, x)` does so for one batch. Look for inf or NaN in the data, keep more layers "
    "in float32, or go from float16 to 'mixed_bfloat16'."
)


class Validations:
    """The evaluations of one model, in `fit` and beside it.

    Args:
        warn: Called with what kind of warning it is, and the message.
    """

    def __init__(self, warn: Callable[[str, str], None]):
        self._warn = warn
        # The validation of the present epoch, and the callbacks that keep the best one as far as they were covered.
        self._validation: Look | None = None
        self._monitors: list = []

    def note_validation(self, look: Look, callbacks):
        """Takes down the validation of an epoch; a value of it that is not finite is no improvement to `callbacks`."""
        self._validation = look
        for callback in callbacks if not_finite(look.logs) else ():
            is_improvement = getattr(callback, _keras.IMPROVEMENT_METHOD, None)
            if callable(is_improvement) and callback not in self._monitors:
                covered = _only_finite(is_improvement)
                if _replaced.replace(callback, _keras.IMPROVEMENT_METHOD, covered, kind="monitor"):
                    self._monitors.append(callback)

    def let_monitors_be(self):
        """Takes back what `note_validation` has covered; done when `fit` ends."""
        while self._monitors:
            _replaced.restore(self._monitors.pop(), _keras.IMPROVEMENT_METHOD, kind="monitor")

    def note_evaluation(self, look: Look):
        """Warns of an evaluation beside those of `fit`; of a metric that has overflowed, as NaN may be its value."""
        # There is no training to compare with: the mean of no examples is NaN as well.
        bad = [name for name in not_finite(look.logs) if name == "loss" or math.isinf(look.logs[name])]
        if bad:
            self._warn("evaluation", f"In `evaluate` {look.about(bad[0], bad[0])}. {_HOW_TO_FIND_OUT}")

    def note_prediction(self, model, outputs, x):
        """Warns of rows that `predict` made NaN or inf of in float16; not of -inf, by which models leave out classes.

        Nothing is said of rows that hold such a number in the data, or one beyond float16, of which a look has told.
        """
        rows = {row for array in keras.tree.flatten(outputs) for row in _rows_beyond(array)}
        if rows and computes_in(model, ["float16"]):
            arrays = [array for array in arrays_in_memory(x) if array.dtype.kind == "f"]
            # Slices: a `predict_step` of the user's may return more rows than it was given.
            named = sorted(
                row for row in rows if all((np.abs(array[row : row + 1]) <= LARGEST).all() for array in arrays)
            )
            if named:
                which = f"rows {listed(list(map(str, named)), 3)} are" if len(named) > 1 else f"row {named[0]} is"
                self._warn(
                    "prediction",
                    f"In `predict` {which} not finite, in float16 at least. `mpkeras.trace_numerics(model, x)` names "
                    "the layer for such rows: keep it in float32, or go from float16 to 'mixed_bfloat16'.",
                )

    def begin_epoch(self):
        """Forgets the validation of the epoch before."""
        self._validation = None

    def end_epoch(self, epoch, logs):
        """Warns where the validation of an epoch was not finite; `logs` are those of its training."""
        look, self._validation = self._validation, None
        if look is None:
            return
        # Where training is not finite either, its own warning is the one to follow; and some metrics are NaN by nature.
        bad = [name for name in not_finite(look.logs) if name not in not_finite(logs)]
        if bad:
            self._warn(
                "validation",
                f"In the validation of epoch {epoch + 1} {look.about(bad[0], f'val_{bad[0]}')}, while training is "
                "finite. Callbacks that keep the best epoch or wait for a better one go by such values; an epoch that "
                f"has one is not taken for the best. {_HOW_TO_FIND_OUT}",
            )


def _rows_beyond(array) -> list[int]:
    """Returns the numbers of the rows of an array that hold NaN or inf."""
    if not isinstance(array, np.ndarray) or not array.ndim or array.dtype.kind != "f":
        return []
    is_beyond = ~(array < np.inf)
    return np.flatnonzero(is_beyond.reshape(len(array), -1).any(axis=1)).tolist() if is_beyond.any() else []


def _only_finite(is_improvement):
    @functools.wraps(is_improvement)
    def is_finite_improvement(value, *args, **kwargs):
        # To Keras 3.15 the first value is an improvement whatever it is, and after NaN none is ever better.
        return math.isfinite(value) and is_improvement(value, *args, **kwargs)

    return is_finite_improvement
