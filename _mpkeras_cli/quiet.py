"""Importing mpkeras without the lines that TensorFlow writes while it starts.

TensorFlow 2.21 says on standard error which libraries it found and which kernels it has, whatever
`TF_CPP_MIN_LOG_LEVEL` says; a command has its own lines to show there.
"""

import contextlib
import os
import re
import sys
import tempfile

# Informational lines of absl's log, and what else TensorFlow writes around them. Warnings and errors have W, E and F.
NOTE = re.compile(rb"I\d{4} |WARNING: All log messages before absl::|To enable the following instructions: ")


def import_mpkeras(error):
    """Imports mpkeras without notes; without a backend of Keras, ends the command by `error(message)`."""
    with without_notes():
        try:
            import mpkeras  # noqa: F401
        except ModuleNotFoundError as reason:
            if reason.name not in ("tensorflow", "jax", "torch"):
                raise
            error(reason)


@contextlib.contextmanager
def without_notes():
    """Holds back all that is written to standard error, by compiled code too; then writes all of it but the notes."""
    try:
        held, stderr = tempfile.TemporaryFile(), os.dup(2)
    except OSError:  # No folder to write to, or standard error is closed.
        yield
        return
    with held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        finally:
            if sys.stderr:
                sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            for line in held:
                if not NOTE.match(line):
                    os.write(2, line)
