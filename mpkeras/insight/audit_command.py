"""The subcommand `audit`."""

import argparse
import json
import zipfile
from pathlib import Path

_DESCRIPTION = """\
Says what each layer of a saved model computes in, how much of it is in 16 bits, and what looks wrong.

  mpkeras audit model.keras                             the model as it was saved
  mpkeras audit model.keras --policy mixed_bfloat16     as this policy would make it; the file stays as it is

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
    option = parser.add_argument
    option("model", metavar="MODEL", help="a .keras or .h5 file")
    option("--policy", metavar="NAME", help="audit the model as this policy makes it, such as mixed_bfloat16")
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
    parser.set_defaults(run=run, error=parser.error)


def run(args) -> int:
    """Audits and returns 0; bad input ends the program through `args.error`, with one line and status 2."""
    from mpkeras.conversion import apply_policy
    from mpkeras.export import loading
    from mpkeras.insight.audit import audit_with_optimizer
    from mpkeras.policies.registry import get_policy

    try:
        policy = None if args.policy is None else get_policy(args.policy)
        custom_objects = loading.import_modules(args.imports)
        model = loading.load(args.model, custom_objects)
        optimizer = _saved_optimizer(Path(args.model), custom_objects)
        if policy is not None:
            apply_policy(model, policy)
    except (ValueError, TypeError) as reason:
        args.error(reason)
    report = audit_with_optimizer(model, optimizer)
    print(json.dumps(report.to_dict(), indent=2) if args.json else report)
    return 0


def _saved_optimizer(path, custom_objects):
    """Returns the optimizer that a model was saved with, without its state; `None` if there is none to be read.

    The model itself is loaded without: its losses and metrics may be functions that only its owner has.
    """
    import keras

    try:
        config = json.loads(zipfile.ZipFile(path).read("config.json"))
        optimizer = (config.get("compile_config") or {}).get("optimizer")
        return optimizer and keras.optimizers.deserialize(optimizer, custom_objects=custom_objects)
    except Exception:  # An `.h5` file, or an optimizer of the owner's: the layers can be audited all the same.
        return None
