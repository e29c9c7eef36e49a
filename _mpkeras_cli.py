"""The installed command `mpkeras`: outside of the package, so that it runs before TensorFlow is imported.

`import mpkeras` imports Keras, and Keras its backend. TensorFlow 2.21 then says on standard error which libraries it
found and which kernels it has, whatever `TF_CPP_MIN_LOG_LEVEL` says; a command has its own lines to show there.
"""

import contextlib
import os
import re
import sys
import tempfile

# Informational lines of absl's log, and what else TensorFlow writes around them. Warnings and errors have W, E and F.
NOTE = re.compile(rb"I\d{4} |WARNING: All log messages before absl::|To enable the following instructions: ")


@contextlib.contextmanager
def without_notes():
    """Holds back what is written to standard error, by compiled code too; afterwards all but the notes comes out."""
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


def main() -> int:
    """Runs `mpkeras.cli.main`, whose exit status it returns."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    with without_notes():
        from mpkeras import cli
    return cli.main()
