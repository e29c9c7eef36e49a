"""Data beyond float16's range, which a layer would cast to inf: the layer is named before it trains or predicts."""

import dataclasses
import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterator

import ml_dtypes
import numpy as np

from mpkeras import _keras
from mpkeras._replaced import replaced
from mpkeras.conversion.noted_casts import Given, noting_casts
from mpkeras.conversion.plan import layers_of
from mpkeras.policies.rules import kept_by, path_rule
from mpkeras.training import training_backend
from mpkeras.training.unseen_run import ROWS, run_on_few_rows
from mpkeras.training.whole_numbers import batch_with, hands_on, in_one_message, numbers_in

# bfloat16 reaches as far as float32, in which the data comes.
LARGEST = float(ml_dtypes.finfo("float16").max)


@dataclasses.dataclass(frozen=True)
class TooLarge:
    """A layer that casts a finite number to inf.

    Attributes:
        layer: Path of the layer.
        number: The first such number.
        through: Paths of the layers that would hand the number on as it is, in front of this one, and cast it as well.
    """

    layer: str
    number: float
    through: tuple[str, ...] = ()

    def sentences(self) -> tuple[str, str]:
        """Returns a sentence with the number, and one with the remedy."""
        becomes = f"{self.number:.6g} becomes {math.copysign(math.inf, self.number)}"
        return (
            f"Layer '{self.layer}' is given numbers beyond float16's {LARGEST:.0f}: {becomes}.",
            "Scale the data, for example by a `keras.layers.Normalization` in front, which computes in float32, or "
            f"{kept_by(*map(path_rule, (*self.through, self.layer)))}.",
        )


def may_be_too_large(model) -> bool:
    """Whether a layer of `model` computes in float16."""
    return bool(_in_float16(model))


def _in_float16(model) -> list:
    return [layer for layer in layers_of(model) if layer.compute_dtype == "float16"]


def warn_of_large_data(model, x):
    """Warns, once of each layer, of layers that cast finite numbers of a batch to inf."""
    layers = [] if training_backend.is_distributed(model) else _in_float16(model)
    rows = _rows_too_large(numbers_in(x)) if layers else []
    if not rows:
        return
    found = run_on_few_rows(model, x, lambda: _Observed(layers), rows).found()
    untold = [too_large for layer, too_large in found if layer not in _told]
    _told.update(layer for layer, _ in found)
    if untold:
        warnings.warn(in_one_message(untold), stacklevel=3)


def warn_of_large_rows(model, x, arrays, size):
    """Warns of the rows of `x` with numbers that `model` casts to inf, in a batch of `size` rows."""
    rows = _rows_too_large(arrays) if may_be_too_large(model) else []
    if rows:
        warn_of_large_data(model, batch_with(rows, x, arrays, size))


def _rows_too_large(arrays) -> list[int]:
    """Returns the numbers of a few rows that hold a finite number beyond float16's range."""
    rows: dict = {}
    for array in arrays:
        # The cheap question first: most data stays below.
        if array.dtype.kind == "f" and array.ndim and array.size and not _reaches(array) <= LARGEST:
            is_large = np.isfinite(array) & (np.abs(array) > LARGEST)
            rows.update(dict.fromkeys(np.flatnonzero(is_large.reshape(len(array), -1).any(axis=1))[:ROWS].tolist()))
    return list(rows)[:ROWS]


def _reaches(array) -> float:
    return max(float(array.max()), -float(array.min()))


# Layers that were named already.
_told: weakref.WeakSet = weakref.WeakSet()


class _Observed:
    """Layers that compute in float16, and what they cast to inf in one run.

    A layer that hands numbers on as they are is given them uncast in this run: which layer computes with them shows so.
    """

    def __init__(self, layers):
        self._layers = layers
        self._given = Given()
        # The layers that compute with such numbers, those that hand them on, and the first one of each, as they ran.
        self._computing: dict = {}
        self._handing_on: dict = {}

    def observers(self) -> Iterator:
        """Yields the context managers in which a run is observed."""
        for layer in self._layers:
            if hands_on(layer):
                yield noting_casts(layer, functools.partial(self._note_cast, layer, self._handing_on))
                yield replaced(layer, "call", self._uncast(layer), kind="observed")
            else:
                yield noting_casts(layer, functools.partial(self._note_cast, layer, self._computing))

    def found(self) -> list[tuple]:
        """Returns `(layer, TooLarge)` of each layer that computes with such numbers, or of those that hand them on."""
        return list((self._computing or self._handing_on).values())

    def _note_cast(self, layer, found, tensor, cast):
        self._given.note(tensor, cast)
        for array, cast_array in zip(numbers_in(tensor), numbers_in(cast), strict=True):
            numbers = array[np.isfinite(array) & ~np.isfinite(cast_array)]
            if numbers.size and id(layer) not in found:
                through = (
                    () if found is self._handing_on else tuple(large.layer for _, large in self._handing_on.values())
                )
                found[id(layer)] = layer, TooLarge(_keras.path_of(layer), float(numbers[0]), through)

    def _uncast(self, layer) -> Callable:
        call = layer.call

        @functools.wraps(call)
        def call_uncast(*args, **kwargs):
            args, kwargs = self._given.instead_of((args, kwargs))
            return call(*args, **kwargs)

        return call_uncast
