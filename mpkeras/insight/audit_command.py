"""The subcommand `audit`."""

import argparse
import json
from pathlib import Path

from mpkeras.export.options import add_model_options, count

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
    option(
        "--open-size",
        type=count,
        default=64,
        metavar="N",
        help="taken for each size that the inputs leave open, such as the length of a sequence (default: 64)",
    )
    parser.set_defaults(run=run, error=parser.error)


def run(args) -> int:
    """Audits and returns 0; bad input ends the program through `args.error`, with one line and status 2."""
    from mpkeras.conversion.apply import apply_policy
    from mpkeras.export import loading
    from mpkeras.insight.audit import audit_with_optimizer
    from mpkeras.insight.findings import Finding
    from mpkeras.policies.registry import get_policy

    if args.summary and args.json:
        args.error("argument --summary: not allowed with argument --json, which holds everything; leave out one")
    try:
        policy = None if args.policy is None else get_policy(args.policy)
        custom_objects = loading.import_modules(args.imports)
        model = loading.load(args.model, custom_objects)
        if policy is not None:
            apply_policy(model, policy)
    except (ValueError, TypeError) as reason:
        args.error(reason)
    optimizer, why_not = _saved_optimizer(Path(args.model), custom_objects)
    report = audit_with_optimizer(model, optimizer, open_size=args.open_size)
    if why_not is not None:
        what = f"The optimizer in the file is not audited: {why_not}."
        report.findings.append(Finding("note", None, what, "Call `mpkeras.audit` on the compiled model in Python."))
    if args.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print(report.summary() if args.summary else report)
    return 0


def _saved_optimizer(path, custom_objects) -> tuple:
    """Returns `(optimizer, why_not)`: the optimizer that a model was saved with, without its state.

    The model itself is loaded without: its losses and metrics may be functions that only its owner has.
    """
    import keras

    from mpkeras.export.loading import compile_config, is_compiled, shortened

    if not is_compiled(path):
        return None, None
    if path.suffix != ".keras":
        return None, f"a '{path.suffix}' file holds it in another form"
    config = (compile_config(path) or {}).get("optimizer")
    try:
        with keras.saving.custom_object_scope(custom_objects):
            optimizer = keras.optimizers.get(config)
    except Exception as error:  # one of the owner's, or of a newer Keras: the layers can be audited all the same
        return None, shortened(f"{type(error).__name__}: {error}")
    return optimizer, None
