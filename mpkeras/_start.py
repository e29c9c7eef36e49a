"""Imports Keras, before any other module of mpkeras does: with a clear error where its backend is not installed.

Under `python -m mpkeras` Python imports the package before it runs `__main__`: here is the only place where the lines
that TensorFlow writes while it starts can be held back, and where a missing backend can end in one line.
"""

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator

_BACKENDS = ("tensorflow", "jax", "torch")


def _runs_as_command() -> bool:
    """Returns whether this is `python -m mpkeras`: while Python looks for a module to run, `sys.argv[0]` is "-m"."""
    return sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] == "mpkeras"


def _import_keras():
    try:
        importlib.import_module("keras")
    except ModuleNotFoundError as error:
        backend = (error.name or "").partition(".")[0]
        if backend not in _BACKENDS:
            raise
        raise ModuleNotFoundError(
            f"Expected a backend of Keras that is installed. Received: '{backend}', which is not. Run "
            f'`pip install "mpkeras[{backend}]"`, or set the environment variable KERAS_BACKEND to another one '
            "(tensorflow, jax, torch) that is.",
            name=backend,
        ) from error
    backend = sys.modules["keras"].backend.backend()
    if backend not in _BACKENDS:
        raise ImportError(
            "Expected a Keras backend that trains: 'tensorflow', 'jax' or 'torch'. Received: "
            f"KERAS_BACKEND={backend!r}. Set KERAS_BACKEND to one of them before importing keras.",
            name="mpkeras",
        )


@contextlib.contextmanager
def ending_in_one_line() -> Iterator[None]:
    """Context manager: under `python -m mpkeras` wrong environment variables end the process as bad options do."""
    try:
        yield
    except (ImportError, ValueError) as error:
        if not _runs_as_command():
            raise
        from _mpkeras_cli.command import is_of_environment

        if not is_of_environment(error):
            raise
        # No command begins: `mpkeras`, which imports nothing of the package first, has those that need no backend.
        print(f"mpkeras: error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if _runs_as_command():
    from _mpkeras_cli.notes import without_notes

    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with ending_in_one_line(), without_notes():
        _import_keras()
else:
    _import_keras()
