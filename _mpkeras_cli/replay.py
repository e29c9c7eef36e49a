"""The subcommand `replay`."""

import argparse
import json

from _mpkeras_cli.options import add_import_option
from _mpkeras_cli.quiet import import_mpkeras

_DESCRIPTION = """\
Runs a skipped step again, from the file that `mpkeras.callbacks.BlackBox` or `step.capsule` wrote, and says what
happened: the loss, the loss scale, the first layer and the first operation that are not finite, and what to do.

  mpkeras replay failures/net-epoch1-step12.mpk
  mpkeras replay failure.mpk --import my_layers         with classes and functions of your own
  mpkeras replay failure.mpk --compare                  where 16 bits leave float32, too

Nothing in the file is executed, unless you allow Python lambdas with --unsafe. The environment variable
KERAS_BACKEND chooses the backend; the bits are those of the backend that the file names.
"""


def add_parser(subparsers):
    """Adds the subcommand to `subparsers` of an `argparse` parser."""
    parser = subparsers.add_parser(
        "replay",
        help="run a skipped step again from its file, and name the first operation that is not finite",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    option = parser.add_argument
    option("file", metavar="FILE", help="a .mpk file")
    add_import_option(parser)
    option(
        "--compare", action="store_true", help="also run the step in float32, and show how far each layer is from it"
    )
    option("--unsafe", action="store_true", help="allow Python lambdas, which may run any code")
    option("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run, error=parser.error)


def run(args) -> int:
    """Replays and returns 0; bad input ends the program through `args.error`, with one line and status 2."""
    import_mpkeras(args.error)
    from mpkeras.export.files import import_modules
    from mpkeras.export.saved_model import replayed

    try:
        report = replayed(args.file, import_modules(args.imports), safe_mode=not args.unsafe, compare=args.compare)
    except ValueError as reason:
        args.error(reason)
    print(json.dumps(report.to_dict(), indent=2) if args.json else report)
    return 0
