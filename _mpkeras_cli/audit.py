"""`mpkeras audit`: what the layers of a saved model compute in, and what looks wrong."""

from _mpkeras_cli.command import add_model, add_open_size, add_report, check_policies, import_mpkeras


def add_audit(subparsers):
    option = add_report(
        subparsers,
        "audit",
        _audit,
        help="what the layers of a saved model compute in, and what looks wrong",
        description="""\
Says what each layer of a saved model computes in, how much of it is in 16 bits, and what looks wrong.

  mpkeras audit model.keras                             the model as it was saved
  mpkeras audit model.keras --policy mixed_bfloat16     as this policy would make it; the file stays as it is
  mpkeras audit model.keras --summary                   without the table and the notes

Nothing is run, and no data is needed. The environment variable KERAS_BACKEND chooses the backend.
""",
    )
    add_model(option)
    option("--policy", metavar="NAME", help="audit the model as this policy makes it, such as mixed_bfloat16")
    option("--summary", action="store_true", help="print the sums and what is more than a note, and no table")
    add_open_size(option)


def _audit(args):
    if args.summary and args.json:
        args.error("argument --summary: not allowed with argument --json, which holds everything; leave out one")
    import_mpkeras(args.error)
    from _mpkeras_cli.saved_model import audit_saved

    check_policies([] if args.policy is None else [args.policy], args)
    report = audit_saved(args.model, policy=args.policy, imports=args.imports, open_size=args.open_size)
    return report.summary() if args.summary else report
