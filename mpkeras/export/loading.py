"""Reading the file of a Keras model, with one clear error for each way in which it can be unreadable."""

import importlib
import json
import os
import re
import sys
import zipfile
from pathlib import Path

import keras

from mpkeras.insight.report import shortened

_H5_SUFFIXES = (".h5", ".hdf5")
# How Keras names a class or function that it does not know, in `.keras` and in `.h5` files.
_UNKNOWN = (
    re.compile(r"Could not locate (?P<what>class|function) '(?P<name>[^']+)'"),
    re.compile(r"Unknown (?P<what>[\w ]+): '(?P<name>[^']+)'"),
)


def load(path, custom_objects=None) -> keras.Model:
    """Returns the model in a `.keras` or `.h5` file, not compiled.

    Args:
        path: The file.
        custom_objects: Classes and functions by name, beside those that are registered.

    Raises:
        ValueError: If there is no such file, or no model in it, or one with classes that are not known.
    """
    path = Path(path)
    _check_file(path)
    try:
        return keras.saving.load_model(path, custom_objects=custom_objects, compile=False)
    except Exception as error:  # Keras lets pass what zipfile, json, h5py and the layers raise.
        raise ValueError(_reason(path, error)) from error


def import_modules(names) -> dict:
    """Imports the user's modules, which may lie in the current directory, and returns their classes and functions.

    Importing a module registers what is decorated with `keras.saving.register_keras_serializable`; for what
    is not, the names are returned as `load` takes them.

    Raises:
        ValueError: If a module cannot be imported.
    """
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
    """Returns whether the file of a model holds a loss and an optimizer; `load` leaves them out."""
    path = Path(path)
    if path.suffix in _H5_SUFFIXES:
        import h5py  # a dependency of Keras

        with h5py.File(path, "r") as file:
            return "training_config" in file.attrs
    return bool(compile_config(path))


def compile_config(path) -> dict | None:
    """Returns what a `.keras` file says of `compile`; `None` for a model that was not compiled."""
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


def _reason(path: Path, error: Exception) -> str:
    chain: list[BaseException] = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    messages = [str(link) for link in chain]
    for message in messages:
        for pattern in _UNKNOWN:
            if found := pattern.search(message):
                return (
                    f"Expected a model of classes and functions that are known. Received: '{path}' with the "
                    f"{found['what']} '{found['name']}'. Name the module that defines it: `--import MODULE`."
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
