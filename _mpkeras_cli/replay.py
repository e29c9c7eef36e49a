"""`mpkeras replay`: a skipped step run again from its file, and its first operation that is not finite."""

from _mpkeras_cli.command import add_import, add_json, add_report, import_mpkeras


def add_replay(subparsers):
    option = add_report(
        subparsers,
        "replay",
        _replay,
        help="run a skipped step again from its file, and name the first operation that is not finite",
        description="""\
Runs a skipped step again, from the file that `mpkeras.callbacks.BlackBox` or `step.capsule` wrote, and says what
happened: the loss, the loss scale, the first layer and the first operation that are not finite, and what to do.

  mpkeras replay failures/net-epoch1-step12.mpk
  mpkeras replay failure.mpk --import my_layers         with classes and functions of your own
  mpkeras replay failure.mpk --compare                  where 16 bits leave float32, too

Nothing in the file is executed, unless you allow Python lambdas with --unsafe. The environment variable
KERAS_BACKEND chooses the backend, which has to be the one that the step was skipped on.
""",
    )
    option("file", metavar="FILE", help="a .mpk file")
    add_import(option)
    option(
        "--compare", action="store_true", help="also run the step in float32, and show how far each layer is from it"
    )
    option("--unsafe", action="store_true", help="allow Python lambdas, which may run any code")
    add_json(option)


def _replay(args):
    import_mpkeras(args.error)
    from _mpkeras_cli.saved_model import replayed
    from mpkeras.tools.export.files import import_modules

    return replayed(args.file, import_modules(args.imports), safe_mode=not args.unsafe, compare=args.compare)
