"""What the commands share: their parsers and options, printing a report, and an import of mpkeras without notes."""

import argparse
import io
import json
import math
import os
import sys
from collections.abc import Callable

from _mpkeras_cli.notes import without_notes
from _mpkeras_cli.words import in_options


def add_command(subparsers, name: str, run: Callable, *, help: str, description: str) -> Callable:
    """Adds a subcommand that `run` carries out, and returns the function that adds its options."""
    parser = subparsers.add_parser(
        name, help=help, description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    # `error` ends the command with one line and status 2.
    parser.set_defaults(run=run, error=parser.error)
    return parser.add_argument


def add_report(subparsers, name, make, *, help, description):
    """Adds a subcommand that prints what `make(args)` returns, a report or text."""

    def run(args) -> int:
        try:
            report = make(args)
        except (ValueError, OSError, ModuleNotFoundError, MemoryError) as reason:
            args.error(reason)
        print(in_options(json.dumps(report.to_dict(), indent=2) if args.json else str(report)))
        return 0

    return add_command(subparsers, name, run, help=help, description=description)


def count(text: str) -> int:
    """Returns a whole number of at least 1, as the `type` of an option."""
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, received {text!r}")
    return number


def positive(unit: str) -> Callable[[str], float]:
    """Returns a function for the `type` of an option: it returns a positive, finite number of `unit`."""

    def convert(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = 0.0
        if not 0 < number < math.inf:
            raise argparse.ArgumentTypeError(f"expected a positive number of {unit}, received {text!r}")
        return number

    return convert


def add_model(option):
    option("model", metavar="MODEL", help="a .keras or .h5 file")
    add_import(option)
    add_json(option)


def add_import(option):
    option(
        "--import",
        action="append",
        default=[],
        dest="imports",
        metavar="MODULE",
        help="import this module first, which defines classes and functions of the model; may be repeated. "
        "The current directory is searched, too",
    )


def add_json(option):
    option("--json", action="store_true", help="print the result as JSON")


def add_open_size(option):
    option(
        "--open-size",
        type=count,
        default=64,
        metavar="N",
        help="taken for each size that the inputs leave open, such as the length of a sequence (default: 64)",
    )


def add_plot(option, name: str):
    option("--plot", metavar="FILE", help=f"draw the figure into this file, such as {name}")


def compiled(args, make: Callable, **options):
    """Returns the report `make(model, ...)` of a saved model that is compiled, and draws it where `--plot` says."""
    # Before what takes minutes.
    if args.plot:
        _check_plot(args.plot, args.error)
    if args.device is not None:
        _check_device(args.device, args.error)
    check_policies(args.policies or [], args)
    report = make(
        args.model,
        batch_size=args.batch,
        open_size=args.open_size,
        imports=args.imports,
        device=args.device,
        policies=args.policies,
        budget_s=args.budget,
        verbose=verbose(args),
        **options,
    )
    if args.plot:
        report.plot().savefig(args.plot)
    return report


def _check_plot(path, error):
    from mpkeras.tools.shared.report import make_figure

    is_new = not os.path.exists(path)
    try:
        # Without an ending, matplotlib takes its own.
        make_figure().savefig(io.BytesIO(), format=os.path.splitext(path)[1][1:] or None)
        open(path, "ab").close()
    except (ValueError, OSError) as reason:
        error(f"argument --plot: cannot draw into {path!r} ({reason}); name another file")
    if is_new:
        os.remove(path)


def check_policies(names, args):
    """Ends the command where a name is that of no policy, also of none that the modules of `--import` register."""
    from mpkeras import get_policy
    from mpkeras.tools.export.files import import_modules

    import_modules(args.imports)
    for name in names:
        try:
            get_policy(name)
        except ValueError as reason:
            args.error(f"argument --policy: {reason}")


def _check_device(name, error):
    from mpkeras.tools.forecast.targets import find_target

    try:
        find_target(name)
    except ValueError as reason:
        error(f"argument --device: {reason}")


def verbose(args) -> int:
    """Returns 1 where a progress bar has a place; in a pipe it would be a line for each of its steps."""
    return int(not args.json and sys.stdout.isatty())


def import_mpkeras(error):
    """Imports mpkeras without notes; where the environment is wrong, ends the command by `error(message)`."""
    with without_notes():
        try:
            import mpkeras  # noqa: F401
        except (ImportError, ValueError) as reason:
            if not is_of_environment(reason):
                raise
            error(reason)


def is_of_environment(reason: Exception) -> bool:
    """Whether an import of mpkeras raised `reason` for what environment variables say, or for want of a backend."""
    # An `ImportError` that names mpkeras is its own; any other says that an installation is broken.
    return not isinstance(reason, ImportError) or reason.name in ("mpkeras", "tensorflow", "jax", "torch")
