"""Checks of arguments that many functions take: counts, switches and a budget of time."""

import math
import numbers

_LEAVE_OUT = "Leave it out for the default."


def checked_count(name: str, value, remedy: str = _LEAVE_OUT) -> int:
    """Returns `value` as an `int`. Raises `ValueError` unless it is a whole number of at least 1; `True` is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ValueError(f"Expected `{name}` to be a whole number of at least 1. Received: {name}={value!r}. {remedy}")
    return int(value)


def check_switch(name: str, value, remedy: str = _LEAVE_OUT):
    """Raises `TypeError` unless `value` is `True` or `False`: any text, "no" among it, would count as yes."""
    if not isinstance(value, bool):
        raise TypeError(f"Expected `{name}` to be True or False. Received: {name}={value!r}. {remedy}")


def check_seconds(name: str, value, remedy: str = _LEAVE_OUT):
    """Raises `ValueError` unless `value` is a positive and finite number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
        raise ValueError(f"Expected `{name}` to be a positive number of seconds. Received: {name}={value!r}. {remedy}")
