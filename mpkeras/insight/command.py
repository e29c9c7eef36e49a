"""The subcommand `hardware`."""

import json


def add_parser(subparsers):
    """Adds the subcommand to `subparsers` of an `argparse` parser."""
    description = "Says on which devices Keras computes, what each does natively, and which policy suits."
    parser = subparsers.add_parser("hardware", help="devices and what each does natively", description=description)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def run(args) -> int:
    # Imported here: it asks for devices, which `--help` needs not.
    from mpkeras.insight.hardware import hardware

    report = hardware()
    print(json.dumps(report.to_dict(), indent=2) if args.json else report)
    return 0
