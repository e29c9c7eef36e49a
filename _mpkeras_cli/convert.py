"""`mpkeras convert`: a saved model with the dtypes of a policy, saved or exported again."""

from _mpkeras_cli.command import add_model, add_report, check_policies, import_mpkeras

# The names of `mpkeras.tools.export.files.FORMATS`, which cannot be imported without Keras.
FORMAT_NAMES = ("keras", "savedmodel", "onnx", "tflite")


def add_convert(subparsers):
    option = add_report(
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
    add_model(option)
    option("out", metavar="OUT", help="a .keras, .onnx or .tflite file, or a directory for a SavedModel")
    option("--policy", required=True, metavar="NAME", help="such as mixed_bfloat16, mixed_float16, bfloat16 or float32")
    option("--format", choices=FORMAT_NAMES, help="what to write (default: what OUT ends in)")
    option("--force", action="store_true", help="replace OUT if it exists")


def _convert(args):
    import_mpkeras(args.error)
    from mpkeras.tools.export.convert import convert

    check_policies([args.policy], args)
    options = {"format": args.format, "imports": args.imports, "force": args.force}
    return convert(args.model, args.out, args.policy, **options)
