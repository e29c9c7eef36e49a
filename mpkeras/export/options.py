"""Options that the commands share which read a saved model."""


def add_model_options(parser):
    """Adds `MODEL`, `--import` and `--json` to an `argparse` parser."""
    option = parser.add_argument
    option("model", metavar="MODEL", help="a .keras or .h5 file")
    option(
        "--import",
        action="append",
        default=[],
        dest="imports",
        metavar="MODULE",
        help="import this module first, which defines classes and functions of the model; may be repeated. "
        "The current directory is searched, too",
    )
    option("--json", action="store_true", help="print the result as JSON")
