"""A check of an argument that tools alone take: a budget of time."""

import math
import numbers

_LEAVE_OUT = "Leave it out for the default."


def check_seconds(name: str, value, remedy: str = _LEAVE_OUT):
    """Raises `ValueError` unless `value` is a positive and finite number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) < math.inf:
        raise ValueError(f"Expected `{name}` to be a positive number of seconds. Received: {name}={value!r}. {remedy}")
