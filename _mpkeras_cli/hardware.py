"""The subcommand `hardware`."""

import json

from _mpkeras_cli.quiet import import_mpkeras


def add_parser(subparsers):
    """Adds the subcommand to `subparsers` of an `argparse` parser."""
    description = "Says on which devices Keras computes, what each does natively, and which policy suits."
    parser = subparsers.add_parser("hardware", help="devices and what each does natively", description=description)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run, error=parser.error)


def run(args) -> int:
    """Prints the report and returns 0."""
    import_mpkeras(args.error)
    import mpkeras

    report = mpkeras.hardware()
    print(json.dumps(report.to_dict(), indent=2) if args.json else report)
    return 0
