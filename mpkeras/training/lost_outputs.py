"""Layers of the user's own that compute in 16 bits what 16 bits cannot tell: they are named at the first batch."""

import contextlib
import dataclasses
import functools
import math
import warnings
import weakref
from collections.abc import Callable, Iterator

import keras
import ml_dtypes

from mpkeras import _keras
from mpkeras._replaced import replaced
from mpkeras.conversion.converted_layer import ConvertedLayer
from mpkeras.conversion.noted_casts import Given, noting_casts
from mpkeras.conversion.plan import layers_of
from mpkeras.policies.dtypes import FLOAT_DTYPES, SIXTEEN_BIT_DTYPES, tensor_dtype
from mpkeras.policies.heads import STEPPING, has_own_call, with_own_code
from mpkeras.policies.rules import is_quantized, kept_by, path_rule
from mpkeras.training import training_backend
from mpkeras.training.differences import lost_share
from mpkeras.training.lost_arithmetic import BetweenLayers, computes_between_layers
from mpkeras.training.unseen_run import run_on_few_rows
from mpkeras.training.whole_numbers import in_one_message, was_named


@dataclasses.dataclass(frozen=True)
class LostOutputs:
    """A layer whose outputs, or added losses, in 16 bits are far from those in float32 on the same inputs.

    Attributes:
        layer: Path of the layer.
        dtype: The 16-bit dtype that it computes in.
        error: The norm of the difference over the norm of the outputs in float32; inf where numbers that are finite in
            float32 are beyond the 16-bit dtype.
        are_losses: Whether these are what it gives to `add_loss`.
    """

    layer: str
    dtype: str
    error: float
    are_losses: bool = False

    def sentences(self) -> tuple[str, str]:
        """Returns a sentence with the number, and one with the remedy."""
        which = "The losses that are added by" if self.are_losses else "The outputs of"
        what = f"{which} layer '{self.layer}' in {self.dtype} are {_how_far(self.dtype, self.error)}"
        return what, f"Keep the layer in float32 with {kept_by(path_rule(self.layer))}."


@dataclasses.dataclass(frozen=True)
class LostArithmetic:
    """What a model computes itself between its layers, far from the same in float32 on the same numbers.

    Attributes:
        layer: Path of the model.
        dtype, error: As of `LostOutputs`.
        purpose: For what it is, as a predicate of the model: `"returns"`, or `"gives to layer 'head'"`.
        is_of_graph: Whether it is of operations in a graph, and not of a `call` of the user's.
    """

    layer: str
    dtype: str
    error: float
    purpose: str
    is_of_graph: bool

    def sentences(self) -> tuple[str, str]:
        """Returns a sentence with the number, and one with the remedy."""
        by = "by operations in its graph" if self.is_of_graph else "in its own `call`"
        what = (
            f"Between its layers model '{self.layer}' computes {by}, in {self.dtype}, numbers that it {self.purpose}; "
            f"they are {_how_far(self.dtype, self.error)}"
        )
        island = "" if self.is_of_graph else ", or compute them in a method under `@mpkeras.float32_island`"
        return what, f"Cast what they are computed from with `keras.ops.cast(..., 'float32')`{island}."


def _how_far(dtype: str, error: float) -> str:
    if error < math.inf:
        share = f"{error:.0%}" if error < 10 else "more than 1000%"
        return (
            f"off by {share} from those in float32 on the same inputs: positions that are counted in 16 bits, long "
            "sums, small differences and sines of large numbers are lost so."
        )
    limits = ml_dtypes.finfo(dtype)
    largest, smallest = float(limits.max), float(limits.smallest_subnormal)
    return (
        f"inf or NaN, and finite in float32 on the same inputs: {dtype} ends at {largest:.6g}, which squares, sums and "
        f"exponentials soon exceed, and takes numbers far below {smallest:.0e} for 0, by which nothing can be divided."
    )


def may_lose_outputs(model) -> bool:
    """Whether `model`, or a layer of it, computes in 16 bits with arithmetic of the user's own."""
    return bool(_looked_at(model))


def lost_outputs(model, x) -> list[LostOutputs | LostArithmetic]:
    """Returns the layers of the user's own whose outputs 16 bits lose, a tenth of them and more; `[]` for most models.

    The model runs once, as in inference, on a few rows of the batch where it takes any number, and each layer with
    arithmetic of the user's own runs again in float32. Of layers that hold such a one the inner one is named. Layers
    that draw random numbers in inference cannot be compared. The arithmetic of the model between its layers comes
    first.

    Args:
        model: A built `keras.Model`.
        x: The arguments of the model, as arrays or tensors.
    """
    wholes, layers = _wholes(model), _own_layers(model)
    return run_on_few_rows(model, x, lambda: _Looks(wholes, layers)).found() if wholes or layers else []


def _looked_at(model) -> list:
    """Returns what is compared: the models that compute between their layers, and layers."""
    return [*_wholes(model), *_own_layers(model)]


def _wholes(model) -> list:
    """Returns `model` and the models in it that compute between their layers, with other models behind those around.

    Of a model inside with a `call` of its own all outputs are compared, as those of a layer.
    """
    return [
        whole
        for whole in layers_of(model)
        if (whole is model or not has_own_call(whole)) and computes_between_layers(whole)
    ]


class _Looks:
    """Models and layers in one run: as `_wholes` and `_own_layers` return them."""

    def __init__(self, wholes, layers):
        self._between_layers = list(map(BetweenLayers, wholes))
        self._of_layers = _Comparison(layers)

    def observers(self) -> Iterator:
        """Yields the context managers in which all are compared."""
        yield from self._of_layers.observers()
        # The outermost model at last: where it runs once more, nothing inside of its layers does.
        for look in reversed(self._between_layers):
            yield from look.observers()

    def found(self) -> list[LostOutputs | LostArithmetic]:
        """Returns what was found between layers, and behind it what was found in them."""
        between = [look for look in self._between_layers if look.lost is not None]
        return [*map(_arithmetic_lost, between), *self._of_layers.found()]


def _arithmetic_lost(look) -> LostArithmetic:
    (purpose, error), model = look.lost, look.model
    return LostArithmetic(_keras.path_of(model), model.compute_dtype, error, purpose, not has_own_call(model))


def _own_layers(model) -> list:
    """Returns the layers that compute in 16 bits with arithmetic of the user's own, or run such layers in loops."""
    layers = layers_of(model)
    in_loops = {id(inner) for layer in layers if isinstance(layer, STEPPING) for inner in _keras.flatten_layers(layer)}
    return [
        layer
        for layer in layers
        if layer.compute_dtype in SIXTEEN_BIT_DTYPES
        and id(layer) not in in_loops
        and layer is not model
        and not is_quantized(layer)
        and with_own_code(layer)
    ]


class _Comparison:
    """The layers of one run beside what they compute in float32."""

    def __init__(self, layers):
        self._layers = layers
        # All that was found, a layer as often as it was called.
        self._found: list[LostOutputs] = []
        self._given = Given()
        self._is_paused = False

    def found(self) -> list[LostOutputs]:
        """Returns what was found, each layer once, in the order in which they ran."""
        worst: dict[str, LostOutputs] = {}
        for lost in self._found:
            if lost.layer not in worst or worst[lost.layer].error < lost.error:
                worst[lost.layer] = lost
        return list(worst.values())

    def observers(self) -> Iterator:
        """Yields the context managers in which the calls of the layers are compared."""
        for layer in self._layers:
            yield replaced(layer, "call", self._compared(layer), kind="observed")
            yield noting_casts(layer, self._given.note)

    def _compared(self, layer) -> Callable:
        call = layer.call

        @functools.wraps(call)
        def compared(*args, **kwargs):
            # A layer around may be tried on symbols in this run, which have no numbers.
            if self._is_paused or _keras.in_symbolic_scope():
                return call(*args, **kwargs)
            number_before = len(self._found)
            # First: attention takes the masks off what it is given.
            in_float32 = functools.partial(self._in_float32, layer, args, kwargs, ConvertedLayer(layer).states)
            references = in_float32()
            with _added_losses(layer) as added:
                outputs = call(*args, **kwargs)
            if len(self._found) > number_before or references is None:
                return outputs
            found = self._compare(layer, (outputs, added), references, in_float32)
            if found is not None:
                self._found.append(found)
            # The layers behind it would be given NaN, and be named one at a time, each in a training of its own.
            is_beyond = found is not None and found.error == math.inf and not found.are_losses
            return _in_dtypes_of(outputs, references[0]) if is_beyond else outputs

        return compared

    def _in_float32(self, layer, args, kwargs, states):
        """Returns the outputs of `layer` in float32, and the losses that it adds; `None` where they are not known."""
        self._is_paused = True
        try:
            args, kwargs = self._given.instead_of((args, kwargs))
            with _added_losses(layer) as added:
                outputs = ConvertedLayer(layer).outputs_in_float32(args, kwargs, in_inference=True, states=states)
        finally:
            self._is_paused = False
        return None if outputs is None else (outputs, added)

    def _compare(self, layer, results, references, again) -> LostOutputs | None:
        for number, are_losses in enumerate((False, True)):
            share = lost_share(results[number], references[number], lambda number=number: again()[number])
            if share is not None:
                return LostOutputs(_keras.path_of(layer), layer.compute_dtype, share, are_losses)
        return None


@contextlib.contextmanager
def _added_losses(layer):
    """Context manager around a call of `layer`: what that gives to `add_loss`. Tensors that it keeps are put back."""
    kept = _keras.tensors_put_back(_keras.flatten_layers(layer, include_self=True))
    with kept, ConvertedLayer(layer).noting_added_losses() as added:
        yield added


def _in_dtypes_of(outputs, references):
    """Returns the floats of `references` in the dtypes and with the masks of `outputs`, a structure like it."""

    def narrow(value, reference):
        if tensor_dtype(value) not in FLOAT_DTYPES:
            return value
        tensor = keras.ops.cast(reference, tensor_dtype(value))
        _keras.copy_mask(value, tensor)
        return tensor

    return keras.tree.map_structure(narrow, outputs, references)


# Layers that were named already, and how each was compared: its dtype, and the shapes of a row of the batch.
_told: weakref.WeakSet = weakref.WeakSet()
_compared: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def warn_of_lost_outputs(model, x):
    """Warns of layers whose outputs 16 bits lose on a batch; for rows of one shape each is compared once."""
    if training_backend.is_distributed(model):
        return
    rows = tuple(tuple(getattr(leaf, "shape", ()))[1:] for leaf in keras.tree.flatten(x))
    compared = [(_compared.setdefault(layer, set()), (layer.compute_dtype, rows)) for layer in _looked_at(model)]
    if all(how in already for already, how in compared):
        return
    for already, how in compared:
        already.add(how)
    layers = {_keras.path_of(layer): layer for layer in layers_of(model)}
    lost_of_layers = [(lost, layers[lost.layer]) for lost in lost_outputs(model, x)]
    untold = [(lost, layer) for lost, layer in lost_of_layers if layer not in _told and not was_named(layer)]
    if not untold:
        return
    _told.update(layer for _, layer in untold)
    rules = {
        type(layer).__name__ if has_own_call(layer) else path_rule(lost.layer)
        for lost, layer in untold
        if isinstance(lost, LostOutputs)
    }
    warnings.warn(in_one_message([lost for lost, _ in untold], sorted(rules)), stacklevel=3)


def named_for_lost_outputs(model) -> set[str]:
    """Returns the paths of the layers of `model` that a warning has named."""
    return {_keras.path_of(layer) for layer in layers_of(model) if layer in _told}
