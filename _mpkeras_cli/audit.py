"""The subcommand `audit`."""

import argparse
import json

from _mpkeras_cli.options import add_model_options, add_open_size_option
from _mpkeras_cli.quiet import import_mpkeras

_DESCRIPTION = """\
Says what each layer of a saved model computes in, how much of it is in 16 bits, and what looks wrong.

  mpkeras audit model.keras                             the model as it was saved
  mpkeras audit model.keras --policy mixed_bfloat16     as this policy would make it; the file stays as it is
  mpkeras audit model.keras --summary                   without the table and the notes

Nothing is run, and no data is needed. The environment variable KERAS_BACKEND chooses the backend.
"""


def add_parser(subparsers):
    """Adds the subcommand to `subparsers` of an `argparse` parser."""
    parser = subparsers.add_parser(
        "audit",
        help="what the layers of a saved model compute in, and what looks wrong",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser)
    option = parser.add_argument
    option("--policy", metavar="NAME", help="audit the model as this policy makes it, such as mixed_bfloat16")
    option("--summary", action="store_true", help="print the sums and what is more than a note, and no table")
    add_open_size_option(parser)
    parser.set_defaults(run=run, error=parser.error)


def run(args) -> int:
    """Audits and returns 0; bad input ends the program through `args.error`, with one line and status 2."""
    if args.summary and args.json:
        args.error("argument --summary: not allowed with argument --json, which holds everything; leave out one")
    import_mpkeras(args.error)
    from mpkeras.export.saved_model import audit_saved

    try:
        report = audit_saved(args.model, policy=args.policy, imports=args.imports, open_size=args.open_size)
    except (ValueError, TypeError) as reason:
        args.error(reason)
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print(report.summary() if args.summary else report)
    return 0
