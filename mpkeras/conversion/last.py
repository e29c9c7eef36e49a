"""The last conversion of each model, and what is known from it."""

import weakref

from mpkeras.conversion.plan import Conversion, layers_of, why_not_float8
from mpkeras.policies.heads import heads_of

# Model -> its last conversion.
_conversions: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def last_conversion(model) -> Conversion | None:
    """Returns the last conversion of `model`; `None` where there was none."""
    return _conversions.get(model)


def conversion_of(model) -> Conversion:
    """Returns the last conversion of a `model` that was converted."""
    return _conversions[model]


def set_last_conversion(model, conversion: Conversion | None):
    """Makes `conversion` the last one of `model`; with `None` there was none."""
    _conversions.pop(model, None)
    if conversion is not None:
        _conversions[model] = conversion


def converted_by(model):
    """Returns the `Policy` that the layers of `model` were given last; `None` if they were given none."""
    conversion = last_conversion(model)
    return None if conversion is None else conversion.asked_for


def known_heads(model) -> list:
    """Returns the layers that make outputs of `model`, as its graph shows, and as calls have shown to a conversion."""
    conversion = last_conversion(model)
    return [*heads_of(model).layers, *(() if conversion is None else conversion.heads)]


def times_stored(model) -> int:
    """Returns how often weights of `model` were stored in another dtype."""
    conversion = last_conversion(model)
    return 0 if conversion is None else conversion.times_stored


def float8_products(model) -> dict:
    """Returns `{id: reason}` of the layers of a converted model with a product: why it is not in float8, or `None`.

    Empty for a model that was not converted to a policy with float8.
    """
    conversion = last_conversion(model)
    if conversion is None:
        return {}
    return why_not_float8(model, conversion, dtypes_of(model))


def dtypes_of(model) -> dict:
    """Returns `{id: dtype}`: what each layer of `model` computes in."""
    return {id(layer): layer.compute_dtype for layer in layers_of(model)}
