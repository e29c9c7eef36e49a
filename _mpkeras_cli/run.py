"""The subcommand `run`."""

import argparse
import os
import sys

from _mpkeras_cli import run_program
from _mpkeras_cli.quiet import import_mpkeras


def add_parser(subparsers):
    """Adds the subcommand to `subparsers` of an `argparse` parser."""
    description = (
        "Runs an unmodified Keras program as `python SCRIPT ARGUMENTS` would, with every `compile` followed by "
        "`mpkeras.prepare`: it trains under the policy, guarded and with loss scaling."
    )
    parser = subparsers.add_parser("run", help="run a program in mixed precision, unmodified", description=description)
    parser.add_argument(
        "--policy",
        metavar="NAME",
        help="what the models of the program compute in; by default what the program sets by "
        "`keras.config.set_dtype_policy`, or what MPKERAS_POLICY says",
    )
    parser.add_argument("script", metavar="SCRIPT", help="a Python file")
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="what the program finds in `sys.argv`"
    )
    parser.set_defaults(run=run, error=parser.error)


def run(args) -> int:
    """Starts the program in the place of this process; bad input ends the command by `args.error`."""
    if not os.path.isfile(args.script):
        args.error(f"expected a Python file, received {args.script!r}: there is no such file")
    if args.policy is not None:
        missing: list = []
        import_mpkeras(missing.append)
        # Without the backend: the program may choose another one, and is told of the policy where it imports Keras.
        if not missing:
            from mpkeras import get_policy

            try:
                get_policy(args.policy)
            except ValueError as error:
                args.error(f"argument --policy: {error}")
    command = [sys.executable, run_program.__file__, args.policy or "", args.script, *args.arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    # In the place of this process, which may have imported Keras on some backend: the program may ask for another one.
    # Its signals and its exit status are its own.
    os.execv(sys.executable, command)
