"""`mpkeras advise`: which policy and jit setting pay off for a saved model, measured."""

from _mpkeras_cli.command import add_model, add_report, count, import_mpkeras, positive, verbose


def add_advise(subparsers):
    option = add_report(
        subparsers,
        "advise",
        _advise,
        help="which policy and jit setting pay off for a saved model, measured",
        description="""\
Measures training steps of a saved model in float32, bfloat16 and float16, compiled and not, and says what to choose.

  mpkeras advise model.keras
  mpkeras advise model.keras --batch-size 256 --budget 120
  mpkeras advise model.keras --data batch.npz

Without data the inputs are random numbers of the model's input shapes, integers 0 and 1, and the loss is the mean
square of the outputs: good for times, not for saying whether float16 trains. With `--data` the arrays of the file are
used: `x` (or one array for each input, by its name), and `y` with the loss that the model was saved with (of a model
with several outputs, one array for each, by its name).

The environment variable KERAS_BACKEND chooses the backend.
""",
    )
    add_model(option)
    option(
        "--batch-size",
        type=count,
        metavar="N",
        help="examples a step (default: those of the model, 32, or all of the data)",
    )
    option("--budget", type=positive("seconds"), metavar="S", help="seconds for all, compiling included (default: 60)")
    option("--data", metavar="FILE", help="an .npz file with arrays `x` and `y`: a batch of your own")
    option("--no-measure", action="store_true", help="advice from the device and the layers alone, at once")


def _advise(args):
    for name in ("data", "batch_size", "budget"):
        if args.no_measure and getattr(args, name) is not None:
            option = "--" + name.replace("_", "-")
            args.error(f"argument --no-measure: not allowed with argument {option}, as nothing is run; leave out one")
    import_mpkeras(args.error)
    from _mpkeras_cli.saved_model import advise_saved

    return advise_saved(
        args.model,
        data=args.data,
        batch_size=args.batch_size,
        budget_s=60.0 if args.budget is None else args.budget,
        imports=args.imports,
        measure=not args.no_measure,
        verbose=verbose(args),
    )
