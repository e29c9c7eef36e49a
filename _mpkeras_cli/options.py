"""Options that commands share."""

import argparse
import math
from collections.abc import Callable


def add_model_options(parser):
    """Adds `MODEL`, `--import` and `--json` to an `argparse` parser."""
    option = parser.add_argument
    option("model", metavar="MODEL", help="a .keras or .h5 file")
    add_import_option(parser)
    option("--json", action="store_true", help="print the result as JSON")


def add_import_option(parser):
    """Adds `--import`."""
    parser.add_argument(
        "--import",
        action="append",
        default=[],
        dest="imports",
        metavar="MODULE",
        help="import this module first, which defines classes and functions of the model; may be repeated. "
        "The current directory is searched, too",
    )


def add_open_size_option(parser):
    """Adds `--open-size`. `count` checks it."""
    parser.add_argument(
        "--open-size",
        type=count,
        default=64,
        metavar="N",
        help="taken for each size that the inputs leave open, such as the length of a sequence (default: 64)",
    )


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
