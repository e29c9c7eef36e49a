"""`mpkeras forecast`: what memory a saved model takes on a GPU or TPU that is not there."""

import io
import os

from _mpkeras_cli.command import add_model, add_open_size, add_report, count, import_mpkeras, positive, verbose


def add_forecast(subparsers):
    option = add_report(
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
    add_model(option)
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
    add_open_size(option)
    option("--plot", metavar="FILE", help="draw the figure into this file, such as forecast.png")


def _forecast(args):
    import_mpkeras(args.error)
    from _mpkeras_cli.saved_model import forecast_saved

    if args.plot:
        # Before what takes minutes.
        check_plot(args.plot, args.error)
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
        verbose=verbose(args),
    )
    if args.plot:
        report.plot().savefig(args.plot)
    return report


def check_plot(path, error):
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
