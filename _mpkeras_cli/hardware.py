"""`mpkeras hardware`: the devices of this machine, and what each computes natively."""

from _mpkeras_cli.command import add_json, add_report, import_mpkeras


def add_hardware(subparsers):
    option = add_report(
        subparsers,
        "hardware",
        _hardware,
        help="devices and what each does natively",
        description="Says on which devices Keras computes, what each does natively, and which policy suits.",
    )
    add_json(option)


def _hardware(args):
    import_mpkeras(args.error)
    import mpkeras

    return mpkeras.hardware()
