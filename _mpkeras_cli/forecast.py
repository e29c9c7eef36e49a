"""`mpkeras forecast`: what memory a saved model takes on a GPU or TPU that is not there."""

from _mpkeras_cli.command import (
    add_model,
    add_open_size,
    add_plot,
    add_report,
    compiled,
    count,
    import_mpkeras,
    positive,
)


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
    option(
        "--batch",
        type=count,
        metavar="N",
        help="rows of a batch, over all devices (default: those of the model, or 32)",
    )
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
    add_plot(option, "forecast.png")


def _forecast(args):
    import_mpkeras(args.error)
    from _mpkeras_cli.saved_model import forecast_saved

    return compiled(args, forecast_saved, devices=args.devices, largest_batch=args.largest_batch)
