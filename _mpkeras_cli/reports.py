"""The subcommands that print a report, as a table or JSON: of this machine, a saved model, or a skipped step."""

import io
import json
import os
import sys

from _mpkeras_cli.command import add_command, count, import_mpkeras, positive

# The names of `mpkeras.export.files.FORMATS`, which cannot be imported without Keras.
FORMAT_NAMES = ("keras", "savedmodel", "onnx", "tflite")


def add_hardware(subparsers):
    option = _add_report(
        subparsers,
        "hardware",
        _hardware,
        help="devices and what each does natively",
        description="Says on which devices Keras computes, what each does natively, and which policy suits.",
    )
    _add_json(option)


def _hardware(args):
    import_mpkeras(args.error)
    import mpkeras

    return mpkeras.hardware()


def add_audit(subparsers):
    option = _add_report(
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
    _add_model(option)
    option("--policy", metavar="NAME", help="audit the model as this policy makes it, such as mixed_bfloat16")
    option("--summary", action="store_true", help="print the sums and what is more than a note, and no table")
    _add_open_size(option)


def _audit(args):
    if args.summary and args.json:
        args.error("argument --summary: not allowed with argument --json, which holds everything; leave out one")
    import_mpkeras(args.error)
    from mpkeras.export.saved_model import audit_saved

    report = audit_saved(args.model, policy=args.policy, imports=args.imports, open_size=args.open_size)
    return report.summary() if args.summary else report


def add_advise(subparsers):
    option = _add_report(
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
used: `x` (or one array for each input, by its name), and `y` with the loss that the model was saved with.

The environment variable KERAS_BACKEND chooses the backend.
""",
    )
    _add_model(option)
    option("--batch-size", type=count, metavar="N", help="examples a step (default: 32, or all of the data)")
    option("--budget", type=positive("seconds"), metavar="S", help="seconds for all, compiling included (default: 60)")
    option("--data", metavar="FILE", help="an .npz file with arrays `x` and `y`: a batch of your own")
    option("--no-measure", action="store_true", help="advice from the device and the layers alone, at once")


def _advise(args):
    for name in ("data", "batch_size", "budget"):
        if args.no_measure and getattr(args, name) is not None:
            option = "--" + name.replace("_", "-")
            args.error(f"argument --no-measure: not allowed with argument {option}, as nothing is run; leave out one")
    import_mpkeras(args.error)
    from mpkeras.export.saved_model import advise_saved

    return advise_saved(
        args.model,
        data=args.data,
        batch_size=args.batch_size,
        budget_s=60.0 if args.budget is None else args.budget,
        imports=args.imports,
        measure=not args.no_measure,
        verbose=_verbose(args),
    )


def add_forecast(subparsers):
    option = _add_report(
        subparsers,
        "forecast",
        _forecast,
        help="what memory a saved model takes on a GPU or TPU that is not there",
        description="""\
Compiles the training step of a saved model for an accelerator that need not be there, and says what memory it takes.

  mpkeras forecast model.keras --device l4 --batch 64
  mpkeras forecast model.keras --device a100 --largest-batch --budget 600
  mpkeras forecast model.keras --device v5e --devices 8 --batch 256 --json

Devices: t4, a100, l4, h100, h200, b200, v5e, v5p, v6e, cpu. Nothing is run. The optimizer and the loss are those that
the model was saved with, or Adam and the mean squared error. The compilers come with `pip install "mpkeras[forecast]"`,
for Linux on x86-64. The environment variable KERAS_BACKEND chooses the backend that reads the file; JAX compiles.
""",
    )
    _add_model(option)
    option("--device", default="h100", metavar="NAME", help="what to compile for (default: h100)")
    option("--devices", type=count, default=1, metavar="N", help="how many of them share a batch (default: 1)")
    option("--batch", type=count, metavar="N", help="rows of a batch, over all devices (default: 32)")
    option("--largest-batch", action="store_true", help="look for the largest batch that fits; compiles several times")
    option(
        "--policy",
        action="append",
        metavar="NAME",
        dest="policies",
        help="may be repeated (default: float32, mixed_bfloat16 and mixed_float16)",
    )
    option("--budget", type=positive("seconds"), metavar="S", help="seconds for all; shows what was found until then")
    _add_open_size(option)
    option("--plot", metavar="FILE", help="draw the figure into this file, such as forecast.png")


def _forecast(args):
    import_mpkeras(args.error)
    from mpkeras.export.saved_model import forecast_saved

    if args.plot:
        # Before what takes minutes.
        _check_plot(args.plot, args.error)
    report = forecast_saved(
        args.model,
        batch_size=args.batch,
        open_size=args.open_size,
        imports=args.imports,
        device=args.device,
        devices=args.devices,
        policies=args.policies,
        largest_batch=args.largest_batch,
        budget_s=args.budget,
        verbose=_verbose(args),
    )
    if args.plot:
        report.plot().savefig(args.plot)
    return report


def _check_plot(path, error):
    from mpkeras.insight.report import make_figure

    is_new = not os.path.exists(path)
    try:
        # Without an ending, matplotlib takes its own.
        make_figure().savefig(io.BytesIO(), format=os.path.splitext(path)[1][1:] or None)
        open(path, "ab").close()
    except (ValueError, OSError) as reason:
        error(f"argument --plot: cannot draw into {path!r} ({reason}); name another file")
    if is_new:
        os.remove(path)


def add_convert(subparsers):
    option = _add_report(
        subparsers,
        "convert",
        _convert,
        help="give a saved model the dtypes of a policy, and save or export it",
        description="""\
Gives a saved model the dtypes of a policy and writes it again; its weights stay the same float32 numbers,
but under bfloat16.

  mpkeras convert model.keras --policy mixed_bfloat16 faster.keras
  mpkeras convert model.keras --policy bfloat16 half.keras              rounds the weights: half the size
  mpkeras convert model.keras --policy mixed_bfloat16 served            a SavedModel, float32 in and out
  mpkeras convert model.keras --policy float32 model.tflite             the float32 twin, for TFLite

A `.keras` result loads in plain Keras, without mpkeras. The environment variable KERAS_BACKEND chooses the
backend: SavedModel is written on tensorflow and jax, TFLite on tensorflow, ONNX on each of the three.
""",
    )
    _add_model(option)
    option("out", metavar="OUT", help="a .keras, .onnx or .tflite file, or a directory for a SavedModel")
    option("--policy", required=True, metavar="NAME", help="such as mixed_bfloat16, mixed_float16, bfloat16 or float32")
    option("--format", choices=FORMAT_NAMES, help="what to write (default: what OUT ends in)")
    option("--force", action="store_true", help="replace OUT if it exists")


def _convert(args):
    import_mpkeras(args.error)
    from mpkeras.export.convert import convert

    options = {"format": args.format, "imports": args.imports, "force": args.force}
    return convert(args.model, args.out, args.policy, **options)


def add_replay(subparsers):
    option = _add_report(
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
KERAS_BACKEND chooses the backend; the bits are those of the backend that the file names.
""",
    )
    option("file", metavar="FILE", help="a .mpk file")
    _add_import(option)
    option(
        "--compare", action="store_true", help="also run the step in float32, and show how far each layer is from it"
    )
    option("--unsafe", action="store_true", help="allow Python lambdas, which may run any code")
    _add_json(option)


def _replay(args):
    import_mpkeras(args.error)
    from mpkeras.export.files import import_modules
    from mpkeras.export.saved_model import replayed

    return replayed(args.file, import_modules(args.imports), safe_mode=not args.unsafe, compare=args.compare)


def _add_report(subparsers, name, make, *, help, description):
    """Adds a subcommand that prints what `make(args)` returns, a report or text."""

    def run(args) -> int:
        try:
            report = make(args)
        except (ValueError, OSError, ModuleNotFoundError) as reason:
            args.error(reason)
        print(json.dumps(report.to_dict(), indent=2) if args.json else report)
        return 0

    return add_command(subparsers, name, run, help=help, description=description)


def _add_model(option):
    option("model", metavar="MODEL", help="a .keras or .h5 file")
    _add_import(option)
    _add_json(option)


def _add_import(option):
    option(
        "--import",
        action="append",
        default=[],
        dest="imports",
        metavar="MODULE",
        help="import this module first, which defines classes and functions of the model; may be repeated. "
        "The current directory is searched, too",
    )


def _add_json(option):
    option("--json", action="store_true", help="print the result as JSON")


def _add_open_size(option):
    option(
        "--open-size",
        type=count,
        default=64,
        metavar="N",
        help="taken for each size that the inputs leave open, such as the length of a sequence (default: 64)",
    )


def _verbose(args) -> int:
    """Returns 1 where a progress bar has a place; in a pipe it would be a line for each of its steps."""
    return int(not args.json and sys.stdout.isatty())
