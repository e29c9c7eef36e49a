"""The subcommand `convert`."""

import argparse
import json

from _mpkeras_cli.options import add_model_options
from _mpkeras_cli.quiet import import_mpkeras

# The names of `mpkeras.export.files.FORMATS`, which cannot be imported without Keras.
FORMAT_NAMES = ("keras", "savedmodel", "onnx", "tflite")

_DESCRIPTION = """\
Gives a saved model the dtypes of a policy and writes it again; its weights stay the same float32 numbers,
but under bfloat16.

  mpkeras convert model.keras --policy mixed_bfloat16 faster.keras
  mpkeras convert model.keras --policy bfloat16 half.keras              rounds the weights: half the size
  mpkeras convert model.keras --policy mixed_bfloat16 served            a SavedModel, float32 in and out
  mpkeras convert model.keras --policy float32 model.tflite             the float32 twin, for TFLite

A `.keras` result loads in plain Keras, without mpkeras. The environment variable KERAS_BACKEND chooses the
backend: SavedModel is written on tensorflow and jax, TFLite on tensorflow, ONNX on each of the three.
"""


def add_parser(subparsers):
    """Adds the subcommand to `subparsers` of an `argparse` parser."""
    parser = subparsers.add_parser(
        "convert",
        help="give a saved model the dtypes of a policy, and save or export it",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_model_options(parser)
    option = parser.add_argument
    option("out", metavar="OUT", help="a .keras, .onnx or .tflite file, or a directory for a SavedModel")
    option("--policy", required=True, metavar="NAME", help="such as mixed_bfloat16, mixed_float16, bfloat16 or float32")
    option("--format", choices=FORMAT_NAMES, help="what to write (default: what OUT ends in)")
    option("--force", action="store_true", help="replace OUT if it exists")
    parser.set_defaults(run=run, error=parser.error)


def run(args) -> int:
    """Converts and returns 0; bad input ends the program through `args.error`, with one line and status 2."""
    import_mpkeras(args.error)
    from mpkeras.export.convert import convert

    options = {"format": args.format, "imports": args.imports, "force": args.force}
    try:
        report = convert(args.model, args.out, args.policy, **options)
    except ValueError as reason:
        args.error(reason)
    print(json.dumps(report.to_dict(), indent=2) if args.json else report)
    return 0
