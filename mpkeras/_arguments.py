"""Checks of arguments that many functions take: counts, switches, words and paths."""

import numbers
import os
from pathlib import Path

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


def is_one_of(value, words: tuple) -> bool:
    """Whether `value` is one of `words`, which are texts. An array, compared number by number, is none."""
    return isinstance(value, str) and value in words


def named(get, name: str, argument: str, example: str):
    """Returns what `get`, as `keras.losses.get`, knows as `name`. Raises `ValueError` where it knows nothing of it."""
    try:
        return get(name)
    except ValueError as error:
        raise ValueError(
            f"Expected `{argument}` to be a name that Keras knows. Received: {argument}={name!r}. Pass for example "
            f"{example!r}, or an object of your own."
        ) from error


def checked_path(name: str, value, remedy: str) -> Path:
    """Returns `value` as a `Path`. Raises `TypeError` unless it is a text or a path object: bytes name no file here."""
    if isinstance(value, (str, os.PathLike)) and isinstance(os.fspath(value), str):
        return Path(value)
    raise TypeError(
        f"Expected `{name}` to be a text or a `pathlib.Path`. Received: {name}={value!r} (of type "
        f"{type(value).__name__}). {remedy}"
    )
