"""Standard error without the notes that TensorFlow writes while it starts. It imports nothing of mpkeras."""

import contextlib
import os
import re
import sys
import tempfile

# Informational lines of absl's log, and what else TensorFlow writes around them while it starts, whatever
# `TF_CPP_MIN_LOG_LEVEL` says. Warnings and errors have W, E and F.
NOTE = re.compile(rb"I\d{4} |WARNING: All log messages before absl::|To enable the following instructions: ")


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
