"""Files of models: reading one, with a clear error for each way to be unreadable, and writing it in each format."""

import contextlib
import importlib
import importlib.util
import io
import json
import os
import re
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import keras

from mpkeras.seams import ModelView, checked_path, dtypes
from mpkeras.tools.shared.report import shortened

_H5_SUFFIXES = (".h5", ".hdf5")
# How Keras names a class or function that it does not know, in `.keras` and in `.h5` files.
_UNKNOWN = (
    re.compile(r"Could not locate (?P<what>class|function) '(?P<name>[^']+)'"),
    re.compile(r"Unknown (?P<what>[\w ]+): '(?P<name>[^']+)'"),
)


def load(path, custom_objects=None) -> keras.Model:
    """Returns the model in a `.keras` or `.h5` file, not compiled; raises `ValueError` where it cannot be read.

    `custom_objects` are classes and functions by name, beside those that are registered.
    """
    path = checked_path("path", path, "Pass the `.keras` or `.h5` file of a model.")
    _check_file(path)
    try:
        return keras.saving.load_model(path, custom_objects=custom_objects, compile=False)
    except Exception as error:  # Keras lets pass what zipfile, json, h5py and the layers raise.
        raise ValueError(_why_unreadable(path, error)) from error


def import_modules(names) -> dict:
    """Imports the user's modules, which may lie in the current directory, and returns their classes and functions.

    Importing a module registers what is decorated with `keras.saving.register_keras_serializable`; what is not, `load`
    takes by these names. A module that cannot be imported raises `ValueError`, and what is no list `TypeError`.
    """
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(
            f"Expected `imports` to be a list of names of modules. Received: imports={names!r} (of type "
            f"{type(names).__name__}). Pass for example ['my_layers']."
        )
    custom_objects = {}
    if names and os.getcwd() not in sys.path and "" not in sys.path:
        # As `python -m` does; the installed script `mpkeras` starts without it.
        sys.path.insert(0, os.getcwd())
    for name in names:
        try:
            module = importlib.import_module(name)
        except Exception as error:  # The module's own code runs here.
            raise ValueError(
                "Expected a module that can be imported from here. Received: "
                f"{name!r} ({type(error).__name__}: {error}). Name it as `import` does, without '.py'."
            ) from error
        for key, value in vars(module).items():
            if callable(value) and getattr(value, "__module__", None) == module.__name__:
                custom_objects[key] = value
    return custom_objects


def is_compiled(path) -> bool:
    """Whether the file of a model holds a loss and an optimizer; `load` leaves them out."""
    return bool(compile_config(path))


def compile_config(path) -> dict | None:
    """Returns what a file says of `compile`, by names of arguments; `None` for a model that was not compiled."""
    path = Path(path)
    if path.suffix in _H5_SUFFIXES:
        import h5py  # a dependency of Keras

        with h5py.File(path, "r") as file:
            text = file.attrs.get("training_config")
        config = {} if text is None else json.loads(text)
        return {**config, "optimizer": config.get("optimizer_config")} if config else None
    with zipfile.ZipFile(path) as archive:
        return json.loads(archive.read("config.json")).get("compile_config")


def _check_file(path: Path):
    remedy = "Pass the file that `model.save('model.keras')` wrote."
    if not path.exists():
        raise ValueError(f"Expected the file of a Keras model. Received: '{path}', which does not exist. {remedy}")
    if path.is_dir():
        raise ValueError(
            f"Expected the file of a Keras model. Received: '{path}', a directory. {remedy} A SavedModel holds no "
            "layers, so that it cannot be converted."
        )
    if path.suffix not in (".keras", *_H5_SUFFIXES):
        raise ValueError(f"Expected a `.keras` or `.h5` file. Received: '{path}'. {remedy}")
    if path.suffix == ".keras" and not zipfile.is_zipfile(path):
        raise ValueError(
            f"Expected a `.keras` file to be a zip archive. Received: '{path}', which is none, or half of one. {remedy}"
        )


def _why_unreadable(path: Path, error: Exception) -> str:
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    messages = [str(link) for link in chain]
    for message in messages:
        for pattern in _UNKNOWN:
            if match := pattern.search(message):
                return (
                    f"Expected a model of classes and functions that are known. Received: '{path}' with the "
                    f"{match['what']} '{match['name']}'. Name the module that defines it: `--import MODULE`."
                )
    if any("lambda" in message for message in messages):
        return (
            f"Expected a model without Python lambdas, which may run any code. Received: '{path}', which has one. "
            "If you trust it, load it in Python with `safe_mode=False`, and call `mpkeras.apply_policy`."
        )
    if path.name.endswith(".weights.h5") or "No model config" in messages[0]:
        return (
            f"Expected a whole model. Received: '{path}', which holds weights only. "
            "Make the model, load the weights into it, and call `mpkeras.apply_policy`."
        )
    # The innermost says what is wrong; those around it repeat whole configurations.
    return (
        f"Expected a file that Keras {keras.__version__} can load. Received: '{path}' "
        f"({type(chain[-1]).__name__}: {shortened(messages[-1])}). Save it anew with this Keras or an older one."
    )


class Format(NamedTuple):
    """One way to write a model."""

    name: str
    suffix: str  # "" for a directory
    keras_name: str | None  # for `Model.export`; None for `Model.save`
    backends: tuple  # that Keras writes it on
    since: tuple  # the first Keras that has it


FORMATS = {
    form.name: form
    for form in (
        Format("keras", ".keras", None, ("tensorflow", "jax", "torch"), (3, 10)),
        # On torch, Keras 3.15 asks for packages that do not go with today's torch and NumPy.
        Format("savedmodel", "", "tf_saved_model", ("tensorflow", "jax"), (3, 10)),
        Format("onnx", ".onnx", "onnx", ("tensorflow", "jax", "torch"), (3, 10)),
        # On torch it needs `litert-torch`, which was not tried.
        Format("tflite", ".tflite", "litert", ("tensorflow",), (3, 13)),
    )
}


def choose(out, name: str | None = None) -> Format:
    """Returns the format that `out` is written in, by its ending or by `name`; raises `ValueError` if they differ."""
    suffix = Path(out).suffix
    if name is None:
        for chosen in FORMATS.values():
            if chosen.suffix == suffix:
                return chosen
        raise ValueError(
            "Expected an output that ends in '.keras', '.onnx' or '.tflite', or a directory without an ending for a "
            f"SavedModel. Received: '{out}'. Change its ending, or say `--format savedmodel`."
        )
    if name not in FORMATS:
        raise ValueError(f"Expected a format of {', '.join(FORMATS)}. Received: format={name!r}. Choose one of them.")
    chosen = FORMATS[name]
    others = {other.suffix for other in FORMATS.values() if other.suffix}
    if chosen.suffix != suffix and (chosen.suffix or suffix in others):
        expected = f"end in '{chosen.suffix}'" if chosen.suffix else "be a directory"
        raise ValueError(
            f"Expected the output in the format {name!r} to {expected}. Received: '{out}'. Rename it, or leave out "
            "the format."
        )
    return chosen


def check(chosen: Format, policy):
    """Raises `ValueError` unless this process can write the format, and read it back under `policy`."""
    backend = keras.backend.backend()
    if _keras_version() < chosen.since:
        raise ValueError(
            f"Expected Keras {'.'.join(map(str, chosen.since))} or newer for the format {chosen.name!r}. Received: "
            f"Keras {keras.__version__}. Install a newer one, or write a SavedModel and convert that."
        )
    if backend not in chosen.backends:
        raise ValueError(
            f"Expected the {' or '.join(chosen.backends)} backend for the format {chosen.name!r}. Received: {backend}. "
            f"A `.keras` file loads on each: set KERAS_BACKEND={chosen.backends[0]}."
        )
    if chosen.name == "tflite" and policy.compute_dtype in dtypes.SIXTEEN_BIT_DTYPES:
        # Keras 3.15 and TensorFlow 2.21: a 16-bit product becomes a `Flex` operation, which the interpreter
        # refuses, and a 16-bit GELU stops the conversion.
        raise ValueError(
            "Expected a float32 policy for TFLite, whose interpreter has no 16-bit products. Received: policy "
            f"{policy.name!r}. Use `--policy float32`; no weight loses a bit by it."
        )
    missing = [name for name in _packages(chosen, backend) if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"Expected the packages that Keras writes {chosen.name!r} with on {backend}. Received: no "
            f"{', no '.join(missing)}. Run `pip install {' '.join(missing)}`."
        )


def _packages(chosen: Format, backend: str) -> tuple:
    if chosen.name != "onnx":
        return ("tensorflow",) if chosen.name == "savedmodel" else ()
    if backend == "torch":
        return ("onnx", "onnxscript")
    # Keras 3.14 writes ONNX from JAX itself; before it went by way of TensorFlow.
    return ("jax2onnx",) if backend == "jax" and _keras_version() >= (3, 14) else ("tf2onnx", "onnx")


def _keras_version() -> tuple:
    return tuple(int(part) for part in keras.__version__.split(".")[:2])


def check_place(out, chosen: Format, force: bool):
    """Raises `ValueError` unless `out` is not there yet, or is of this kind and `force` says so."""
    out = Path(out)
    if out.exists() and not force:
        raise ValueError(
            f"Expected an output that is not there yet. Received: '{out}', which exists. Say `--force` to replace it."
        )
    # A directory is removed as a whole: only where it is plainly a SavedModel.
    is_replaceable = (out / "saved_model.pb").is_file() if chosen.suffix == "" else out.is_file()
    if out.exists() and not is_replaceable:
        kind = "a SavedModel" if chosen.suffix == "" else "a file"
        raise ValueError(f"Expected to replace {kind}. Received: '{out}', which is none. Choose another output.")
    existing = next(parent for parent in out.absolute().parents if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ValueError(
            f"Expected an output in a directory that can be written to. Received: '{out}', and '{existing}' cannot. "
            "Choose another output."
        )


def write(model, out, chosen: Format):
    """Writes `model` to `out`, which appears, or changes, only when all of it is written; raises `ValueError`."""
    out = Path(out)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # In the same directory, so that the last step is a renaming.
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=".mpkeras-") as folder:
            _write(model, Path(folder) / out.name, chosen)
            if out.is_dir():
                shutil.rmtree(out)
            # ONNX keeps the weights of a large model in a second file beside it.
            for path in Path(folder).iterdir():
                path.replace(out.parent / path.name)
    except OSError as error:
        raise ValueError(
            f"Expected an output that can be written. Received: '{out}' ({error.strerror or error}). "
            "Choose another one, or make room."
        ) from error


def _write(model, path: Path, chosen: Format):
    try:
        # Converters print to standard output, torch's whole graphs when they fail.
        with contextlib.redirect_stdout(io.StringIO()):
            if chosen.keras_name is None:
                model.save(path)
            else:
                _call_once(model)
                model.export(str(path), format=chosen.keras_name, verbose=False)
    except OSError:
        raise
    except Exception as error:  # Each converter has exceptions of its own.
        raise ValueError(
            f"Expected a model that Keras {keras.__version__} on {keras.backend.backend()} writes as {chosen.name!r}. "
            f"Received: {type(error).__name__}: {shortened(str(error))}. "
            "Try the policy float32, another backend (KERAS_BACKEND) or another format."
        ) from error


def _call_once(model):
    # Keras writes ONNX of models that were called; one from a file was not. Symbols do: nothing is computed.
    graph = ModelView(model).graph
    if graph is not None:
        model(graph.input)


def size_of(path) -> int:
    """Returns the bytes of a file, or of all files in a directory."""
    path = Path(path)
    paths = [path, *path.parent.glob(path.name + ".data")] if path.is_file() else path.rglob("*")
    return sum(file.stat().st_size for file in paths if file.is_file())
