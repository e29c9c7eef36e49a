"""Results of float32 layers inside a layer of the user's own: in 16 bits where the backend refuses to mix them."""

import contextlib
import functools
import importlib

import keras

from mpkeras import _keras
from mpkeras._replaced import replaced_on_all
from mpkeras.policies.dtypes import SIXTEEN_BIT_DTYPES, tensor_dtype
from mpkeras.policies.heads import has_own_call
from mpkeras.policies.rules import default_rules, first_match

# The part of the active backend: only that may be imported.
_backend = importlib.import_module(f"mpkeras.conversion._{keras.backend.backend()}")


def taking_inner_results(layer, call, refuses=lambda args, kwargs, error: False):
    """Returns `call` of `layer`, which runs where it mixes a float32 result of a layer inside with 16 bits.

    `x + self.norm(x)` is an error on TensorFlow, and `self.norm(x) @ y` on torch, too, where a rule keeps `norm`
    in float32. Under stock Keras `norm` returns 16 bits. It does so here within this `call` alone, and only if `call`
    does not run otherwise; what `norm` computes stays in float32. The first call is traced before it runs, for shapes
    alone: a call that fails half way would leave its assignments in the graph.

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

    def needs_rounding(inner_layers, args, kwargs) -> bool:
        if can_run(layer, call, args, kwargs):
            return False
        with rounded(inner_layers):
            return can_run(layer, call, args, kwargs)

    @functools.wraps(call)
    def call_taking_results(*args, **kwargs):
        if is_rounded and not is_rounded[0]:
            return call(*args, **kwargs)
        inner_layers = _kept_inside(layer)
        if not inner_layers:
            return call(*args, **kwargs)
        if not is_rounded and not all(inner.built for inner in _keras.flatten_layers(layer)):
            # Keras builds what is not built by a run of its own, whose results are not used.
            try:
                return call(*args, **kwargs)
            except Exception as error:
                if not refuses(args, kwargs, error):
                    raise
                with rounded(inner_layers):
                    return call(*args, **kwargs)
        if not is_rounded:
            is_rounded.append(needs_rounding(inner_layers, args, kwargs))
        with rounded(inner_layers) if is_rounded[0] else contextlib.nullcontext():
            return call(*args, **kwargs)

    is_rounded: list[bool] = []
    return call_taking_results


def can_run(layer, call, args, kwargs) -> bool:
    """Whether `call` of `layer` can be traced as the layers in it compute now; nothing is computed."""
    with _keras.kept_losses(_keras.flatten_layers(layer, include_self=True)):
        try:
            _backend.trace(layer, call, args, kwargs, is_dry_run=True)
        except Exception:
            return False
    return True


def _kept_inside(layer) -> list:
    """Returns the layers that a default rule keeps in float32 in `layer`, but those within other layers of the user's.

    A head that no such rule names is not among them: it stays in 16 bits where what is behind it takes these alone.
    """
    kept: list = []
    for inner in _keras.direct_sublayers(layer) if layer.compute_dtype in SIXTEEN_BIT_DTYPES else ():
        stock = [inner] if has_own_call(inner) else _keras.flatten_layers(inner, include_self=True)
        kept += [part for part in stock if part.compute_dtype == "float32" and first_match(default_rules(), part)]
    return list({id(part): part for part in kept}.values())
