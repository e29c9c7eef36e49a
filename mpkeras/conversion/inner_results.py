"""Results of float32 layers inside a layer of the user's own: in 16 bits where the backend refuses to mix them."""

import contextlib
import functools
import importlib
import weakref

import keras

from mpkeras import _keras
from mpkeras._replaced import replaced_on_all
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES, tensor_dtype
from mpkeras.policies.heads import has_own_call
from mpkeras.policies.rules import default_rules, first_match

# The part of the active backend: only that may be imported.
_backend = importlib.import_module(f"mpkeras.conversion._{keras.backend.backend()}")
# Layers that a rule of a policy keeps in float32, or that have moved there as they overflowed.
_kept: weakref.WeakSet = weakref.WeakSet()
_times_changed = 0


def note_kept_in_float32(layer, is_kept: bool = True):
    """Takes down whether `layer` is in float32 by a rule that is no default, and not as its user made it so."""
    global _times_changed
    if (layer in _kept) != is_kept:
        (_kept.add if is_kept else _kept.discard)(layer)
        _times_changed += 1


def changes_asked_about(layers) -> int | None:
    """Returns a number that grows as a call has to find out again which of the layers inside return 16 bits.

    `None` where no call of one of `layers` ever has to.
    """
    return _times_changed if any(layer in _kept for layer in layers) else None


def taking_inner_results(layer, call, refuses=lambda args, kwargs, error: False):
    """Returns `call` of `layer`, which runs where it mixes a float32 result of a layer inside with 16 bits.

    `x + self.norm(x)` is an error on TensorFlow, and `self.norm(x) @ y` on torch, too, where a rule keeps `norm`
    in float32. Under stock Keras `norm` returns 16 bits. It does so here within this `call` alone, and only if `call`
    does not run otherwise; what `norm` computes stays in float32. Of layers that other rules keep, as few as possible
    return 16 bits: what one of them makes may be too large for these. The first call is traced before it runs, for
    shapes alone: a call that fails half way would leave its assignments in the graph.

    Args:
        layer: A layer in 16 bits whose `call` is the user's own.
        call: Its `call`.
        refuses: Function of the arguments and an error: whether the error refuses two float dtypes. Asked while Keras
            builds `layer` by a call.
    """
    if keras.backend.backend() == "jax":  # Which refuses none.
        return call

    def rounded(inner_layers):
        def rounding(inner, replacement):
            inner_call = inner.call if replacement is None else replacement

            @functools.wraps(inner_call)
            def call_and_round(*args, **kwargs):
                return keras.tree.map_structure(as_stock, inner_call(*args, **kwargs))

            return call_and_round

        def as_stock(value):
            if not keras.ops.is_tensor(value) or tensor_dtype(value) != "float32":
                return value
            narrow = keras.ops.cast(value, layer.compute_dtype)
            _keras.copy_mask(value, narrow)
            return narrow

        return replaced_on_all(inner_layers, "call", rounding)

    def to_round(by_default, others, args, kwargs) -> list:
        if can_run(layer, call, args, kwargs):
            return []
        with rounded([*by_default, *others]):
            if not can_run(layer, call, args, kwargs):
                return []
        for inner in tuple(others):
            fewer = [other for other in others if other is not inner]
            with rounded([*by_default, *fewer]):
                others = fewer if can_run(layer, call, args, kwargs) else others
        return [*by_default, *others]

    @functools.wraps(call)
    def call_taking_results(*args, **kwargs):
        if known.get("at") == _times_changed and not known["layers"]:
            return call(*args, **kwargs)
        by_default, others = _kept_inside(layer)
        if not by_default and not others:
            return call(*args, **kwargs)
        if not known and not all(inner.built for inner in _keras.flatten_layers(layer)):
            # Keras builds what is not built by a run of its own, whose results are not used. What is not built behind
            # it never runs.
            known["layers"] = []
            try:
                return call(*args, **kwargs)
            except Exception as error:
                if not refuses(args, kwargs, error):
                    raise
                with rounded([*by_default, *others]):
                    return call(*args, **kwargs)
        if known.get("of") != list(map(id, others)):
            known.update(of=list(map(id, others)), layers=to_round(by_default, others, args, kwargs))
        known["at"] = _times_changed
        with rounded(known["layers"]) if known["layers"] else contextlib.nullcontext():
            return call(*args, **kwargs)

    # The layers that return 16 bits; of which others that was found out, and after how many changes of `_kept`.
    known: dict = {}
    return call_taking_results


def can_run(layer, call, args, kwargs) -> bool:
    """Whether `call` of `layer` can be traced as the layers in it compute now; nothing is computed."""
    return dtypes_returned(layer, call, args, kwargs) is not None


def dtypes_returned(layer, call, args, kwargs) -> list | None:
    """Returns the dtypes of what `call` of `layer` would return, by a trace; `None` where it cannot be traced."""
    dtypes: list = []

    def run(*args, **kwargs):
        outputs = call(*args, **kwargs)
        dtypes[:] = map(tensor_dtype, keras.tree.flatten(outputs))
        return outputs

    layers = _keras.flatten_layers(layer, include_self=True)
    # A tensor of the trace that a `call` keeps would be of no use to the next one.
    with _keras.kept_losses(layers), _keras.tensors_put_back(layers):
        try:
            _backend.trace(layer, run, args, kwargs, is_dry_run=True)
        except Exception:
            return None
    return dtypes


def _kept_inside(layer) -> tuple[list, list]:
    """Returns the layers that default rules keep in float32 in `layer`, and those that other rules keep.

    Layers within other layers of the user's are left out. A head that no such rule names is not among them: it stays in
    16 bits where what is behind it takes these alone.
    """
    by_default: dict = {}
    others: dict = {}
    for inner in _keras.direct_sublayers(layer) if layer.compute_dtype in SIXTEEN_BIT_DTYPES else ():
        stock = [inner] if has_own_call(inner) else _keras.flatten_layers(inner, include_self=True)
        for part in stock:
            if part.compute_dtype == "float32" and (part in _kept or first_match(default_rules(), part)):
                (others if part in _kept else by_default)[id(part)] = part
    return list(by_default.values()), list(others.values())
