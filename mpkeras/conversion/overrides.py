"""Attributes that a layer has for as long as it is converted: on the instance, where no file holds them."""

_MISSING = object()
# `{attribute: (what the layer had of its own before, what it was given)}`. On the layer, too, with which it goes: the
# functions in it hold the layer.
_RECORD = "_mpkeras_overrides"


def override(layer, name: str, value):
    """Gives `layer` another value of `name`; what it has of its own is kept for `restore`, the first time."""
    before = _record(layer)[name][0] if is_overridden(layer, name) else vars(layer).get(name, _MISSING)
    # Not by `setattr`, which Keras and torch both watch.
    vars(layer).setdefault(_RECORD, {})[name] = before, value
    vars(layer)[name] = value


def is_overridden(layer, name: str) -> bool:
    """Whether `layer` has the value that `override` gave it; what its user has set since is the user's."""
    record = _record(layer)
    return name in record and vars(layer).get(name, _MISSING) is record[name][1]


def restore(layer, name: str):
    """Takes back what `override` did, if it did; what the layer's user has set since is left alone."""
    is_ours = is_overridden(layer, name)
    record = _record(layer)
    before, _ = record.pop(name, (_MISSING, None))
    if not record:
        vars(layer).pop(_RECORD, None)
    if not is_ours:
        return
    if before is _MISSING:
        del vars(layer)[name]
    else:
        vars(layer)[name] = before


def overridden(layer) -> frozenset[str]:
    """Returns the names of the attributes that `layer` has from `override` now."""
    return frozenset(name for name in _record(layer) if is_overridden(layer, name))


def _record(layer) -> dict:
    return vars(layer).get(_RECORD, {})
