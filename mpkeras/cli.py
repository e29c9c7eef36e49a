"""The command line: `python -m mpkeras`, also installed as `mpkeras` (`_mpkeras_cli`)."""

import argparse
import os
import sys

from mpkeras._version import __version__
from mpkeras.demo import command as demo_command
from mpkeras.export import command as convert_command
from mpkeras.insight import advice_command, audit_command
from mpkeras.insight import command as hardware_command
from mpkeras.training import command as run_command

# Each adds its subcommand.
COMMANDS = (demo_command, run_command, hardware_command, audit_command, advice_command, convert_command)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the input in one line, and leaves the usage to `--help`."""

    def error(self, message):
        one_line = " ".join(str(message).split())
        self.exit(2, f"{self.prog}: error: {one_line}\n")


def build_parser() -> argparse.ArgumentParser:
    """Returns the parser with every subcommand."""
    parser = _Parser(prog="mpkeras", description="Mixed precision for Keras 3 that cannot fail silently.")
    parser.add_argument("--version", action="version", version=f"mpkeras {__version__}")

    def print_help(args) -> int:
        parser.print_help()
        return 0

    parser.set_defaults(run=print_help)
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
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
