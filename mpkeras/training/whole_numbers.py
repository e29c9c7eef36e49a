"""Whole numbers that 16 bits would round before a layer reads them: ids, codes, positions, dates, counters."""

import dataclasses
import functools
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

import keras
import ml_dtypes
import numpy as np

from mpkeras import _keras
from mpkeras._replaced import replaced
from mpkeras.conversion.exact_inputs import only_moves, reads_names
from mpkeras.conversion.noted_casts import noting_casts
from mpkeras.conversion.outputs import reads_variables_in_float32
from mpkeras.conversion.plan import layers_of
from mpkeras.conversion.raw_inputs import casts_by_itself, hands_inputs_on
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES
from mpkeras.policies.heads import has_own_arithmetic
from mpkeras.policies.own_state import variables_from_outside
from mpkeras.policies.rules import DEFAULT_RULES, first_match, is_quantized, kept_by, path_rule
from mpkeras.training import training_backend
from mpkeras.training.unseen_run import ROWS, run_on_few_rows

# Arithmetic that Keras does not know: what it makes of a number, only its author can say.
_OF_USERS = tuple(
    getattr(keras.layers, name)
    for name in ("TorchModuleWrapper", "JaxLayer", "FlaxLayer", "TFSMLayer")
    if hasattr(keras.layers, name)
)
# Keras' layers that return what is positive as it is, outside of training, in which a batch is looked at.
_KEEPING = (
    keras.layers.ReLU,
    keras.layers.LeakyReLU,
    keras.layers.PReLU,
    keras.layers.ELU,
    keras.layers.Dropout,
    keras.layers.SpatialDropout1D,
    keras.layers.SpatialDropout2D,
    keras.layers.SpatialDropout3D,
    keras.layers.AlphaDropout,
    keras.layers.GaussianDropout,
    keras.layers.GaussianNoise,
)
_KEEPING_ACTIVATIONS = (keras.activations.relu, keras.activations.leaky_relu, keras.activations.elu)
# In float32 every number from here on is whole, whatever it counts.
_ALL_WHOLE = 2.0**24
# So many rows are looked at before all are.
_FEW_ROWS = 16
# So many layers are named in one warning.
_NAMED = 3


@dataclasses.dataclass(frozen=True)
class Rounded:
    """A whole number that is rounded before a layer reads it.

    Attributes:
        layer: Path of the layer that casts the number.
        reader: Path of the layer that reads the number: the same one, or another one behind it.
        dtype: The 16-bit dtype that it is cast to.
        before, after: The number, and what it becomes.
        variable: The name of the layer's variable that holds the number; `None` where it came with the data.
    """

    layer: str
    reader: str
    dtype: str
    before: float
    after: float
    variable: str | None = None

    @property
    def rules(self) -> tuple[str, ...]:
        """The float32 rules under which the number arrives as it is."""
        return tuple(dict.fromkeys((path_rule(self.layer), path_rule(self.reader))))

    def shown_with(self, paths: dict) -> "Rounded":
        """Returns the same with other paths, by those that the layers have now."""
        return dataclasses.replace(
            self, layer=paths.get(self.layer, self.layer), reader=paths.get(self.reader, self.reader)
        )

    def sentences(self) -> tuple[str, str]:
        """Returns a sentence with the numbers, and one with the remedy."""
        becomes = f"{self.before:.15g} becomes {self.after:.15g}"
        if self.variable is not None:
            what = (
                f"Layer '{self.layer}' reads its variable '{self.variable}' in {self.dtype}, which cannot hold the "
                f"whole number in it: {becomes}."
            )
            return what, f"Keep it whole with `add_weight(..., autocast=False)`, or {kept_by(*self.rules)}."
        if self.layer == self.reader:
            what = f"Layer '{self.layer}' is given whole numbers that {self.dtype} cannot hold, rounded: {becomes}."
        else:
            what = (
                f"Layer '{self.layer}' rounds whole numbers that {self.dtype} cannot hold, and hands them on to layer "
                f"'{self.reader}': {becomes}."
            )
        remedy = f"If they are ids, codes, positions or dates, keep them whole with {kept_by(*self.rules)}."
        return what, remedy


def rounded_whole_numbers(model, x) -> list[Rounded]:
    """Returns the whole numbers that `model` rounds before a layer reads them; `[]` for most batches.

    Named are layers of the user's own, and stock ones that hand numbers on to those or to an `Embedding`. Numbers that
    a `Dense` or a convolution weighs are features, and not named; nor are integers, which Keras does not cast. Where
    the batch holds such numbers the model runs once, and is exactly as before afterwards.

    Named are variables, too, that a layer of the user's own reads in 16 bits and no optimizer moves, for the numbers
    that they hold now.

    Args:
        model: A built `keras.Model`.
        x: The arguments of the model, as arrays or tensors; anything else has no values, and returns `[]`.
    """
    observed = _Observed(model)
    return _rounded_in_a_run(model, x, observed, _few(_rows_of_columns(numbers_in(x), observed.dtypes).values()))


def _few(rows) -> list[int]:
    return list(dict.fromkeys(rows))[:ROWS]


def _rounded_in_a_run(model, x, observed, needed) -> list[Rounded]:
    """Returns the same, by a run on the rows `needed` among others; where there are none, what variables hold alone."""
    # Behind the run that is known, too, which models read their variables in float32: their first call tells.
    if needed or observed.in_variables():
        observed = run_on_few_rows(model, x, lambda: _Observed(model), needed)
    return [*observed.found(), *observed.in_variables()]


def numbers_in(structure) -> list:
    """Returns the numbers in a structure as arrays on the host, as float32 where Keras makes that of them."""
    arrays = []
    for value in keras.tree.flatten(structure):
        if not hasattr(value, "shape") or isinstance(value, keras.KerasTensor):
            continue
        try:
            array = np.asarray(keras.ops.convert_to_numpy(value) if keras.ops.is_tensor(value) else value)
        except Exception:  # Parts of it are in other processes, or it is sparse.
            continue
        if array.dtype.name in ("float64", "bfloat16"):
            array = array.astype("float32")
        if array.dtype.kind in "iuf":
            arrays.append(array)
    return arrays


class _Loss(NamedTuple):
    """A whole number in an array, and what a 16-bit dtype makes of it.

    Attributes:
        column: The axis along which the array has the column that holds the number, and the number of that.
        row: The row of the array that holds it.
        before, after: The number, and what it becomes.
    """

    column: tuple[int, int]
    row: int
    before: float
    after: float


def _lost(array, dtype: str) -> _Loss | None:
    """Returns a whole number of an array of which `dtype` makes another one, or `None` if there is none.

    An array of whole numbers alone counts, and a column of them beside others, along whichever axis: in a table one may
    be an id.
    """
    return next(_losses(np.asarray(array), dtype), None)


def _losses(array, dtype: str) -> Iterator[_Loss]:
    """Yields what `_lost` returns, of each column."""
    limit = 2.0 ** (ml_dtypes.finfo(dtype).nmant + 1)
    # The cheap question first: most data stays below.
    if not array.size or array.dtype.kind not in "iuf" or max(float(array.max()), -float(array.min())) <= limit:
        return
    if array.ndim < 2:
        array = array.reshape(-1, 1)
    # The last axis first: most tables have their columns there.
    for axis in reversed(range(1, array.ndim)):
        moved = np.moveaxis(array, axis, -1)
        # The first rows tell of nearly every column of features that it is none of whole numbers.
        few = moved[:_FEW_ROWS].reshape(-1, array.shape[axis])
        may_be_whole = np.flatnonzero(((few == np.round(few)) | ~np.isfinite(few)).all(axis=0))
        if may_be_whole.size:
            columns = moved if may_be_whole.size == few.shape[1] else moved[..., may_be_whole]
            for loss in _losses_in_columns(columns, dtype, limit):
                yield loss._replace(column=(axis, int(may_be_whole[loss.column[1]])))


def _losses_in_columns(rows, dtype: str, limit: float) -> Iterator[_Loss]:
    """Yields what `_lost` returns, of each column along the last axis."""
    columns = rows.reshape(-1, rows.shape[-1])
    with np.errstate(invalid="ignore"):
        is_large = np.maximum(columns.max(axis=0), -columns.min(axis=0)) > limit
        is_large |= np.isnan(columns).any(axis=0) if columns.dtype.kind == "f" else False
    for number in np.flatnonzero(is_large):
        places = np.flatnonzero(np.isfinite(columns[:, number]))
        values = columns[places, number].astype("float64")
        if not values.size or (values != np.round(values)).any():
            continue
        with np.errstate(over="ignore"):
            rounded = values.astype(dtype).astype("float64")
        is_lost = np.abs(rounded - values) >= 0.5
        if columns.dtype.kind == "f":
            is_lost &= np.abs(values) < _ALL_WHOLE
        if is_lost.any():
            first = int(np.argmax(is_lost))
            row = int(places[first]) // (len(columns) // len(rows))
            yield _Loss((rows.ndim - 1, int(number)), row, float(values[first]), float(rounded[first]))


def _rows_of_columns(arrays, dtypes, at_most: int | None = None) -> dict:
    """Returns the first row in which a whole number is lost, by column: of `at_most` columns of each array.

    A column is `(number of the array, dtype, axis, number along it)`.
    """
    return {
        (number, dtype, *loss.column): loss.row
        for number, array in enumerate(arrays)
        for dtype in sorted(dtypes)
        for loss in itertools.islice(_losses(array, dtype), at_most)
    }


class _Observed:
    """The layers of a model that may read whole numbers, and what they were given in one run.

    Attributes:
        dtypes: The 16-bit dtypes to which numbers are cast before such a layer reads them; empty where there is none.
        variables: `(layer, name, variable)` of each variable that such a layer reads, and no optimizer moves.
    """

    def __init__(self, model):
        layers = [layer for layer in layers_of(model) if not isinstance(layer, keras.layers.InputLayer)]
        # Layers inside a layer of the user's are given what that layer computed, or has cast already.
        self._casting = [layer for layer in layers if _casts_to_16_bits(layer) and _reads(layer)]
        self._moving = [layer for layer in layers if _casts_to_16_bits(layer) and hands_on(layer)]
        self._reading = [layer for layer in layers if _reads(layer) or _reads_names(layer)] if self._moving else []
        if not self._reading:
            self._moving = []
        self.dtypes = {layer.compute_dtype for layer in [*self._casting, *self._moving]}
        in_16_bits = [layer for layer in layers if _computes_in_16_bits(layer)]
        self.variables = [(layer, *pair) for layer in in_16_bits for pair in variables_from_outside(layer).items()]
        # By the `id` of the layer: what it casts first, and all that a moving one makes of such numbers.
        self._lost: dict = {}
        self._handed_on: dict = {}
        self._read: list = []

    def asked(self) -> list:
        """Returns what tells whether another run would ask the same layers."""
        layers = [*self._casting, *self._moving, *self._reading]
        return [(id(layer), layer.compute_dtype) for layer in layers]

    def observers(self) -> Iterator:
        """Yields the context managers in which a run is observed."""
        for layer in [*self._casting, *self._moving]:
            yield noting_casts(layer, functools.partial(self._note_cast, layer))
        for layer in self._reading:
            yield replaced(layer, "call", self._noting_inputs(layer), kind="observed")

    def _note_cast(self, layer, tensor, cast):
        dtype = keras.backend.standardize_dtype(cast.dtype)
        for array in numbers_in([tensor]):
            lost = _lost(array, dtype)
            if lost is not None:
                self._lost.setdefault(id(layer), (lost.before, lost.after))
                exact = array.astype("float64")
                with np.errstate(over="ignore"):
                    rounded = exact.astype(dtype).astype("float64")
                changed = np.abs(rounded - exact) >= 0.5
                # The first of those that become the same number.
                pairs = zip(rounded[changed].tolist()[::-1], exact[changed].tolist()[::-1], strict=True)
                known = self._handed_on.get(id(layer), {})
                self._handed_on[id(layer)] = {**dict(pairs), **known}

    def _noting_inputs(self, layer) -> Callable:
        call = layer.call

        @functools.wraps(call)
        def noting(*args, **kwargs):
            self._read += [(layer, array) for array in numbers_in((args, kwargs)) if array.dtype.kind not in "iu"]
            return call(*args, **kwargs)

        return noting

    def found(self) -> list[Rounded]:
        """Returns what the run has shown, each reader once, in the order in which they ran."""
        rounded = {
            id(layer): _rounded(layer, layer, *self._lost[id(layer)])
            for layer in self._casting
            if id(layer) in self._lost
        }
        for reader, array in self._read:
            if id(reader) in rounded:
                continue
            for layer in self._moving:
                pair = self._arrived(layer, array)
                if pair is not None and layer is not reader:
                    rounded[id(reader)] = _rounded(layer, reader, *pair)
                    break
        return list(rounded.values())

    def in_variables(self) -> list[Rounded]:
        """Returns the whole numbers in variables that are rounded where they are read."""
        rounded = []
        for layer, name, variable in self.variables:
            lost = next((_lost(array, layer.compute_dtype) for array in numbers_in([variable.value])), None)
            if lost is not None and not reads_variables_in_float32(layer):
                rounded.append(_rounded(layer, layer, lost.before, lost.after, name))
        return rounded

    def _arrived(self, layer, array) -> tuple | None:
        """Returns a number before and after `layer` rounded it, if `array` holds it and nothing that is not rounded."""
        pairs = self._handed_on.get(id(layer))
        if not pairs:
            return None
        values = array.astype("float64").ravel()
        with np.errstate(over="ignore"):
            is_rounded = np.array_equal(values.astype(layer.compute_dtype).astype("float64"), values, equal_nan=True)
        after = next((value for value in values.tolist() if value in pairs), None) if is_rounded else None
        return None if after is None else (pairs[after], after)


def _rounded(layer, reader, before, after, variable=None) -> Rounded:
    return Rounded(_keras.path_of(layer), _keras.path_of(reader), layer.compute_dtype, before, after, variable)


def _computes_in_16_bits(layer) -> bool:
    casts = layer.autocast or casts_by_itself(layer)
    return layer.compute_dtype in SIXTEEN_BIT_DTYPES and not is_quantized(layer) and casts


def _casts_to_16_bits(layer) -> bool:
    return _computes_in_16_bits(layer) and not _keras.casts_no_inputs(layer) and not hands_inputs_on(layer)


def _reads(layer) -> bool:
    """Whether the arithmetic of a layer is the user's own, or is a difference, in which nothing is weighed."""
    if has_own_arithmetic(layer) or isinstance(layer, (*_OF_USERS, keras.layers.Subtract)):
        return True
    # Keras' own layers hand what they are given to those inside: a wrapper, an `RNN`, a model in one of them.
    return any(_reads(inner) or reads_names(inner) for inner in _given_the_same(layer))


def _given_the_same(layer) -> list:
    """Returns the layers inside `layer` to which it may hand what it is given itself."""
    graph = _keras.graph_of(layer)
    if graph is None:
        return [] if isinstance(layer, keras.Model) else _keras.direct_sublayers(layer)
    inputs = {id(tensor) for tensor in keras.tree.flatten(_keras.input_structure(graph))}
    nodes = [node for node in _keras.nodes_of(graph) if inputs.intersection(map(id, node.input_tensors))]
    return [node.operation for node in nodes if isinstance(node.operation, keras.layers.Layer)]


def hands_on(layer) -> bool:
    """Whether a stock layer hands numbers on as they are, but for those that are negative."""
    if isinstance(layer, keras.layers.Activation) and layer.activation in _KEEPING_ACTIVATIONS:
        return True
    return only_moves(layer) or isinstance(layer, _KEEPING)


def _reads_names(layer) -> bool:
    """Whether a layer takes numbers as they are: an `Embedding`, or one that a rule of its class keeps in float32."""
    rules = [rule for rule, _ in DEFAULT_RULES if ":" not in rule and rule != "Softmax"]
    return reads_names(layer) or (layer.compute_dtype == "float32" and first_match(rules, layer) is not None)


# Layers that were named already.
_told: weakref.WeakSet = weakref.WeakSet()


def was_named(layer) -> bool:
    """Whether a warning has named `layer`."""
    return layer in _told


def may_round(model) -> bool:
    """Whether a layer of `model` may round whole numbers before they are read."""
    observed = _Observed(model)
    return bool(observed.dtypes or observed.variables)


def in_one_message(named, rules=()) -> str:
    """Returns the sentences of the first few of `named`, how many more there are, and `rules` that keep them all."""
    others = len(named) - _NAMED
    message = " ".join(sentence for one in named[:_NAMED] for sentence in one.sentences())
    if others <= 0:
        return message
    remedy = f": {kept_by(*rules)} keeps them all" if rules else ""
    return f"{message} So it is with {others} more layers{remedy}."


# By model: which layers were asked last, and the columns in which lost numbers were followed to them.
_followed: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def _followed_to(model, observed) -> set:
    """Returns the columns in which lost numbers were followed to the layers that are `observed` now."""
    asked = observed.asked()
    if _followed.get(model, (None,))[0] != asked:
        _followed[model] = asked, set()
    return _followed[model][1]


def warn_of_rounding(model, x, again: bool):
    """Warns, once of each layer, of whole numbers that `model` rounds before a layer reads them in a batch.

    Unless `again`, numbers are followed in columns alone in which none were before: to which layers a number comes is
    seldom a matter of its value.
    """
    if training_backend.is_distributed(model):
        return
    layers = {_keras.path_of(layer): layer for layer in layers_of(model)}
    observed = _Observed(model)
    row_of = _rows_of_columns(numbers_in(x), observed.dtypes)
    followed = () if again else _followed_to(model, observed)
    needed = _few(row for column, row in row_of.items() if column not in followed)
    named = _rounded_in_a_run(model, x, observed, needed)
    if needed:
        # The run may have shown that some hand on what they are given.
        _followed_to(model, _Observed(model)).update(column for column, row in row_of.items() if row in needed)
    untold = [rounded for rounded in named if layers[rounded.reader] not in _told]
    if not untold:
        return
    _told.update(layers[rounded.reader] for rounded in untold)
    message = in_one_message(untold)
    if any(rounded.variable is None for rounded in untold):
        message += " Or pass integers to a `keras.Input(..., dtype='int32')`, where no `call` casts them itself."
    warnings.warn(message, stacklevel=3)


def arrays_in_memory(x) -> list:
    """Returns the arrays in a structure, if there is nothing else in it and they have as many rows; otherwise `[]`."""
    leaves = keras.tree.flatten(x)
    arrays = [np.asarray(leaf) for leaf in leaves] if all(map(_is_in_memory, leaves)) else []
    return [] if any(not array.ndim or len(array) != len(arrays[0]) for array in arrays) else arrays


def warn_of_rounded_rows(model, x, arrays, size):
    """Warns of the rows of `x` with whole numbers that `model` rounds, in a batch of `size` rows."""
    observed = _Observed(model)
    row_of = _rows_of_columns(arrays, observed.dtypes, at_most=size)
    followed = _followed_to(model, observed)
    rows = dict.fromkeys(row for column, row in row_of.items() if column not in followed)
    if rows:
        warn_of_rounding(model, batch_with(rows, x, arrays, size), again=False)


def batch_with(rows, x, arrays, size):
    """Returns a batch of `size` rows of `x`, whose arrays are `arrays`, with `rows` among them."""
    chosen = np.resize([*rows, *range(len(arrays[0]))][:size], size)
    return keras.tree.pack_sequence_as(x, [array[chosen] for array in arrays])


def _is_in_memory(value) -> bool:
    """Whether a value is an array of NumPy or a table of pandas: others may be on a device, or in a file."""
    return type(value) is np.ndarray or type(value).__module__.split(".")[0] == "pandas" and hasattr(value, "__array__")
