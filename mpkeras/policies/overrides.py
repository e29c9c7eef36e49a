"""Attributes that a layer has for as long as it is converted: on the instance, where no file holds them."""

import weakref

_MISSING = object()
# Layer -> what it had of its own before: `{attribute: value}`.
_BEFORE: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def override(layer, name: str, value):
    """Gives `layer` another value of `name`; what it has of its own is kept for `restore`, the first time."""
    _BEFORE.setdefault(layer, {}).setdefault(name, vars(layer).get(name, _MISSING))
    # Not by `setattr`, which Keras and torch both watch.
    vars(layer)[name] = value


def is_overridden(layer, name: str) -> bool:
    return name in _BEFORE.get(layer, {})


def restore(layer, name: str):
    """Takes back what `override` did, if it did."""
    before = _BEFORE.get(layer, {})
    if name not in before:
        return
    value = before.pop(name)
    if value is _MISSING:
        del vars(layer)[name]
    else:
        vars(layer)[name] = value
