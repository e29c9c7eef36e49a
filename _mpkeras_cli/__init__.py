"""The command line: `mpkeras`, and `python -m mpkeras`.

A package of its own, because `import mpkeras` imports Keras and its backend, which takes seconds. No module here
imports them at its top: the parsers are built without them, and a command imports mpkeras when it runs.
"""

import argparse
import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

from _mpkeras_cli import advise, audit, convert, demo, forecast, hardware, replay, run

# Each adds its subcommand.
COMMANDS = (demo, run, hardware, audit, advise, forecast, convert, replay)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the input in one line, and leaves the usage to `--help`."""

    def error(self, message):
        one_line = " ".join(str(message).split())
        self.exit(2, f"{self.prog}: error: {one_line}\n")


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser with every subcommand."""
    parser = _Parser(prog="mpkeras", description="Mixed precision for Keras 3 that cannot fail silently.")
    parser.add_argument("--version", action="version", version=f"mpkeras {version()}")

    def print_help(args) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(run=print_help)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


def version() -> str:
    """Returns the version of mpkeras, from the file in which it is written, without importing the package."""
    spec = find_spec("mpkeras")
    assert spec is not None and spec.origin is not None
    return runpy.run_path(str(Path(spec.origin).with_name("_version.py")))["__version__"]


def main(argv=None) -> int:
    """Runs one command, or without one prints the help, and returns the exit status.

    0 is success, 2 bad input (with one line on standard error), 130 an interrupt from the keyboard.

    Args:
        argv: The arguments without the program's name; by default those of the process.
    """
    # Or TensorFlow tells about CUDA drivers and CPU kernels in between. What matters it raises.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        args = build_parser().parse_args(argv)
        return args.run(args)
    except SystemExit as end:  # how argparse ends: the status is ours to return
        if isinstance(end.code, str):  # of a module of the user's own: as Python does with it
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    except KeyboardInterrupt:
        print("mpkeras: interrupted", file=sys.stderr)
        return 130
