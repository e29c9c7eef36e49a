"""The command line: `mpkeras`, and `python -m mpkeras`.

A package of its own, because `import mpkeras` imports Keras and its backend, which takes seconds. No module here
imports them at its top: the parsers are built without them, and a command imports mpkeras when it runs.
"""

import argparse
import os
import runpy
import sys
from pathlib import Path

from _mpkeras_cli.advise import add_advise
from _mpkeras_cli.audit import add_audit
from _mpkeras_cli.convert import add_convert
from _mpkeras_cli.demo import add_demo
from _mpkeras_cli.forecast import add_forecast
from _mpkeras_cli.hardware import add_hardware
from _mpkeras_cli.plan import add_plan
from _mpkeras_cli.replay import add_replay
from _mpkeras_cli.run import add_run
from _mpkeras_cli.words import in_options

# Each adds its subcommand to the subparsers of an `argparse` parser.
COMMANDS = (add_demo, add_run, add_hardware, add_audit, add_advise, add_forecast, add_plan, add_convert, add_replay)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the input in one line, and leaves the usage to `--help`."""

    def error(self, message):
        one_line = " ".join(in_options(str(message)).split())
        self.exit(2, f"{self.prog}: error: {one_line}\n")


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser with every subcommand."""
    parser = _Parser(prog="mpkeras", description="Mixed precision for Keras 3 that cannot fail silently.")
    # From the file in which it is written, without an import of the package.
    version = runpy.run_path(str(Path(__file__).parents[1] / "mpkeras" / "_version.py"))["__version__"]
    parser.add_argument("--version", action="version", version=f"mpkeras {version}")

    def print_help(args) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(run=print_help)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for add in COMMANDS:
        add(subparsers)
    return parser


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
