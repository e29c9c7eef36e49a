"""The subcommand `forecast`."""

import argparse
import io
import json
import os
import sys

from _mpkeras_cli.options import add_model_options, add_open_size_option, count, positive
from _mpkeras_cli.quiet import import_mpkeras

_DESCRIPTION = """\
Compiles the training step of a saved model for an accelerator that need not be there, and says what memory it takes.

  mpkeras forecast model.keras --device l4 --batch 64
  mpkeras forecast model.keras --device a100 --largest-batch --budget 600
  mpkeras forecast model.keras --device v5e --devices 8 --batch 256 --json

Devices: t4, a100, l4, h100, h200, b200, v5e, v5p, v6e, cpu. Nothing is run. The optimizer and the loss are those that
the model was saved with, or Adam and the mean squared error. The compilers come with `pip install "mpkeras[forecast]"`,
for Linux on x86-64. The environment variable KERAS_BACKEND chooses the backend that reads the file; JAX compiles.
"""


def add_parser(subparsers):
    """Adds the subcommand to `subparsers` of an `argparse` parser."""
    parser = subparsers.add_parser(
        "forecast",
        help="what memory a saved model takes on a GPU or TPU that is not there",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser)
    option = parser.add_argument
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
    add_open_size_option(parser)
    option("--plot", metavar="FILE", help="draw the figure into this file, such as forecast.png")
    parser.set_defaults(run=run, error=parser.error)


def run(args) -> int:
    """Compiles, prints and returns 0; bad input ends the program through `args.error`, with one line and status 2."""
    import_mpkeras(args.error)
    from mpkeras.export.saved_model import forecast_saved
    from mpkeras.insight.report import make_figure

    # A bar in a pipe would be a line for each of its steps.
    verbose = int(not args.json and sys.stdout.isatty())
    try:
        if args.plot:
            # Before what takes minutes.
            _check_plot(args.plot, make_figure(), args.error)
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
            verbose=verbose,
        )
        if args.plot:
            report.plot().savefig(args.plot)
    except (ValueError, OSError, ModuleNotFoundError) as reason:
        args.error(reason)
    print(json.dumps(report.to_dict(), indent=2) if args.json else report)
    return 0


def _check_plot(path, figure, error):
    is_new = not os.path.exists(path)
    try:
        # Without an ending, matplotlib takes its own.
        figure.savefig(io.BytesIO(), format=os.path.splitext(path)[1][1:] or None)
        open(path, "ab").close()
    except (ValueError, OSError) as reason:
        error(f"argument --plot: cannot draw into {path!r} ({reason}); name another file")
    if is_new:
        os.remove(path)
