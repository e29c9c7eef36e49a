"""The file of a skipped step, `.mpk`: its batch, all state before it, and what it takes to make the model anew.

The file is a zip of `.npy` arrays and one JSON, written whole or not at all, and read without trust. Nothing in it is
compressed, so no entry is larger than the file; nothing is unpacked to disk, so no name is a path.
"""

import hashlib
import io
import json
import math
import os
import re
import tempfile
import zipfile
from pathlib import Path

import keras
import ml_dtypes
import numpy as np
from keras import ops

from mpkeras import devices
from mpkeras.conversion.converted_layer import ConvertedLayer
from mpkeras.training.last_step import SkippedStep
from mpkeras.training.model_view import ModelView

# Goes up when an older mpkeras cannot read what is written.
FORMAT = 1
_NOT_DENSE = ("RaggedTensor", "SparseTensor", "BCOO", "IndexedSlices", "PerReplica", "DistributedValues")
_INDEX = "capsule.json"
_NAME = re.compile(r"arrays/\d{1,6}\.npy")
_MAX_INDEX_BYTES = 64 * 2**20
# NumPy's own kinds that are stored as they are; all others go as unsigned words beside their name.
_PLAIN = "?bhilqBHILQefdFD"
_REMEDY = "Ask for the file again, or write a new one: `mpkeras.callbacks.BlackBox`."


def capsule_of_fit(path, model, optimizers, moving_before: dict, *, batch, logs, number: int, epoch: int) -> int:
    """Writes the capsule of the last step of `fit`, which was skipped, and returns its size in bytes.

    Args:
        path: Where it goes; the folder must exist.
        model, optimizers, moving_before: As the attributes of `SkippedStep`.
        batch, logs: What the step was given and returned.
        number, epoch: Of the step, both counted from 0.
    """
    skipped = SkippedStep.of_fit(model, optimizers, moving_before, batch)
    settings = {"jit_compile": bool(model.jit_compile), "run_eagerly": bool(model.run_eagerly)}
    content = {"kind": "fit", "step": number, "epoch": epoch, **settings}
    content |= _serialized("compile", lambda: model.get_compile_config() or None)
    return _write_step(path, skipped, said_in_fit(logs, optimizers, True), content)


def capsule_of_step(path, parts, moving_before: dict, *, batch, result: dict, number: int) -> int:
    """Writes the capsule of the last step of a `TrainStep` that is made of `parts`, as `capsule_of_fit` does."""
    skipped = SkippedStep.of_parts(parts, moving_before, batch)
    content = {"kind": "step", "step": number, "epoch": None, "options": parts.options()}
    loss, metrics = parts.objective.given
    content |= _serialized("loss", lambda: keras.saving.serialize_keras_object(loss))
    content |= _serialized("metrics", lambda: keras.saving.serialize_keras_object(metrics))
    content |= _serialized("optimizer", lambda: _config_of(parts.optimizer))
    return _write_step(path, skipped, said_by_step(result), content)


def _write_step(path, skipped, said, content) -> int:
    arrays: dict = {}
    content["batch"] = _described_batch(skipped.batch, arrays)
    state_before, state_after, is_exact = skipped.states()
    changed = {name: array for name, array in state_after.items() if array.tobytes() != state_before[name].tobytes()}
    model = skipped.model
    policy = ModelView(model).converted_by()
    content |= {
        "model_name": model.name,
        "layers": layer_dtypes(model),
        "is_exact": is_exact,
        "devices": ModelView(model).devices_that_share_a_batch,
        "versions": devices.environment(),
        **_serialized("model", lambda: keras.saving.serialize_keras_object(model)),
        **_serialized("policy", lambda: None if policy is None else keras.saving.serialize_keras_object(policy)),
    }
    for group, values in (("said", said), ("state", state_before), ("after", changed)):
        arrays |= {f"{group}/{name}": array for name, array in values.items()}
    return write(path, content, arrays)


def said_by_step(result: dict) -> dict:
    """Returns what a step of `make_train_step` returned as arrays, by their names in a capsule."""
    own_names = ("loss", "loss_scale", "skipped")
    return _single_values({name if name in own_names else f"logs/{name}": value for name, value in result.items()})


def said_in_fit(logs, optimizers, skipped: bool) -> dict:
    """Returns what a step of `fit` said as arrays, by their names in a capsule."""
    named = {f"logs/{name}": value for name, value in logs.items()} if isinstance(logs, dict) else {}
    return _single_values({**named, "loss_scale": optimizers[0].loss_scale, "skipped": skipped})


def _single_values(named: dict) -> dict:
    # A user's own train step may return anything else, too.
    values = {name: value for name, value in named.items() if ops.is_tensor(value) or isinstance(value, (float, int))}
    return {name: as_numpy(value) for name, value in values.items()}


def layer_dtypes(model) -> list:
    """Returns `[path, class, compute dtype, variable dtype]` of each layer that computes, as JSON can hold it.

    Behind them stands "float8" of those that multiply in it.
    """
    rows = []
    for layer in computing_layers(model):
        row = [ConvertedLayer(layer).path, type(layer).__name__, layer.compute_dtype, layer.variable_dtype]
        rows.append([*row, "float8"] if ConvertedLayer(layer).multiplies_in_float8 else row)
    return rows


def computing_layers(model) -> list:
    """Returns the layers of `model`, itself included, but for the inputs."""
    return [layer for layer in ModelView(model).layers if not isinstance(layer, keras.layers.InputLayer)]


def _config_of(optimizer) -> dict:
    config = keras.saving.serialize_keras_object(optimizer)
    # The wrapper writes the length of its window there, for plain Keras; `options` has it.
    inner = optimizer.inner_optimizer
    config["config"]["inner_optimizer"]["config"]["gradient_accumulation_steps"] = inner.gradient_accumulation_steps
    return config


def _serialized(name: str, serialize) -> dict:
    """Returns `{name: what serialize() returns}`, or why there is none: a capsule of half a description still helps."""
    try:
        return {name: serialize()}
    except Exception as error:  # of a user's own `get_config`
        return {name: None, f"why_no_{name}": f"{type(error).__name__}: {str(error)[:300]}"}


def as_numpy(value):
    return np.array(ops.convert_to_numpy(value))


def _described_batch(structure, arrays: dict):
    """Returns `structure` as JSON can hold it; what is in it goes into `arrays`."""
    if structure is None:
        return None
    if isinstance(structure, dict):
        return {"dict": [[str(key), _described_batch(value, arrays)] for key, value in structure.items()]}
    if isinstance(structure, (list, tuple)):
        kind = "tuple" if isinstance(structure, tuple) else "list"
        return {kind: [_described_batch(value, arrays) for value in structure]}
    if type(structure).__name__ in _NOT_DENSE:
        raise ValueError(
            f"Expected a batch of dense tensors. Received: a {type(structure).__name__}, which a capsule cannot hold. "
            "Make it dense before the model, or pad it."
        )
    name = f"batch/{sum(key.startswith('batch/') for key in arrays)}"
    arrays[name] = as_numpy(structure) if ops.is_tensor(structure) else np.asarray(structure)
    return {"array": name}


def batch_of(described, arrays: dict):
    """Returns the structure that `_described_batch` took apart. Raises `ValueError` where it is none."""
    if described is None:
        return None
    if isinstance(described, dict) and len(described) == 1:
        ((kind, value),) = described.items()
        if kind == "array" and isinstance(value, str) and value in arrays:
            return arrays[value]
        if kind == "dict" and isinstance(value, list) and all(isinstance(v, list) and len(v) == 2 for v in value):
            return {str(key): batch_of(item, arrays) for key, item in value}
        if kind in ("list", "tuple") and isinstance(value, list):
            items = [batch_of(item, arrays) for item in value]
            return tuple(items) if kind == "tuple" else items
    raise ValueError(
        f"Expected a batch of arrays in lists, tuples and dictionaries. Received: {str(described)[:80]}. Ask for the "
        "file again: it is not what mpkeras writes."
    )


def write(path, content: dict, arrays: dict) -> int:
    """Writes a capsule and returns its size in bytes; on an error there is no file, or the one that was there before.

    Args:
        path: Where it goes; the folder must exist.
        content: A structure that JSON can hold, without NaN and infinities.
        arrays: Arrays of numbers by name, of dtypes of NumPy or ml_dtypes.
    """
    path = Path(path)
    index: dict = {"format": FORMAT, "content": content, "arrays": {}, "bytes": 0}
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                for i, (name, array) in enumerate(arrays.items()):
                    data, entry = _npy(np.asarray(array))
                    archive.writestr(f"arrays/{i}.npy", data)
                    index["arrays"][name] = {"file": f"arrays/{i}.npy", **entry}
                    index["bytes"] += len(data)
                archive.writestr(_INDEX, json.dumps(index, allow_nan=False))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    return path.stat().st_size


def _npy(array) -> tuple:
    """Returns the bytes of an `.npy` file and what the index says of it."""
    dtype = array.dtype.name
    if array.dtype.char not in _PLAIN:
        if array.dtype.hasobject or array.dtype.kind in "USmM":
            raise ValueError(
                f"Expected arrays of numbers. Received: an array of dtype {array.dtype}. Text belongs into the data "
                "pipeline, before the batch."
            )
        # NumPy alone knows no bfloat16 and float8: the same bits as unsigned words.
        array = np.ascontiguousarray(array).reshape(array.shape).view(f"u{array.dtype.itemsize}")
    stream = io.BytesIO()
    np.lib.format.write_array(stream, array, allow_pickle=False)
    data = stream.getvalue()
    return data, {"dtype": dtype, "shape": list(array.shape), "sha256": hashlib.sha256(data).hexdigest()}


def read(path) -> tuple[dict, dict]:
    """Returns `(content, arrays)` of a capsule.

    Raises:
        ValueError: If there is no such file, or it is no capsule, damaged, or of a newer mpkeras.
    """
    path = Path(path)
    try:
        with zipfile.ZipFile(path) as archive:
            entries = _checked_entries(archive, path.stat().st_size)
            index = _checked_index(archive.read(entries.pop(_INDEX)))
            arrays = {}
            for name, entry in index["arrays"].items():
                file = entry.get("file") if isinstance(entry, dict) else None
                _expect(isinstance(file, str) and file in entries, f"no entry for the array {name[:80]!r}")
                arrays[name] = _array_of(f"the array {name[:80]!r}", entry, archive.read(entries[file]))
    except (_DamagedError, OSError, zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        # RuntimeError: an encrypted entry.
        what, remedy = f"{type(error).__name__}: {error}", _REMEDY
        if isinstance(error, _DamagedError):
            what, remedy = error.args
        elif isinstance(error, FileNotFoundError):
            what = "which does not exist"
        raise ValueError(
            f"Expected a whole capsule, as mpkeras writes it. Received: '{path}' ({what}). {remedy}"
        ) from error
    return index["content"], arrays


class _DamagedError(Exception):
    """A fault of a file, and the remedy; `read` adds the path."""


def _expect(is_so: bool, otherwise: str, remedy: str = _REMEDY):
    if not is_so:
        raise _DamagedError(otherwise, remedy)


def _checked_entries(archive, file_size: int) -> dict:
    """Returns the entries of the archive by name, none of which can be larger than what it takes up in the file."""
    infos = archive.infolist()
    entries = {info.filename: info for info in infos}
    _expect(_INDEX in entries, f"a zip archive without `{_INDEX}`")
    _expect(len(entries) == len(infos), "a name that is there twice")
    for name, info in entries.items():
        _expect(name == _INDEX or bool(_NAME.fullmatch(name)), f"an entry named {name[:80]!r}")
        is_plain = info.compress_type == zipfile.ZIP_STORED and info.file_size == info.compress_size
        _expect(is_plain and not info.flag_bits & 0x1, f"a compressed or encrypted entry {name!r}")
    # Entries that overlap in the file would add up to more than the file.
    _expect(sum(info.file_size for info in infos) <= file_size, "entries that are larger than the file")
    size = entries[_INDEX].file_size
    _expect(size <= _MAX_INDEX_BYTES, f"a `{_INDEX}` of {size} bytes")
    return entries


def _checked_index(text: bytes) -> dict:
    def refuse(constant):
        raise ValueError(f"{constant} in the JSON")

    try:
        index = json.loads(text.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        what = f"JSON that cannot be read: {type(error).__name__}: {str(error)[:120]}"
        raise _DamagedError(what, _REMEDY) from error
    version = index.get("format") if isinstance(index, dict) else None
    if type(version) is not int or version < 1:
        raise _DamagedError("an index without a format number", _REMEDY)
    too_new = f"format {version}, where this mpkeras reads up to {FORMAT}"
    _expect(version <= FORMAT, too_new, "Install the mpkeras that wrote it, or a newer one.")
    has_both = all(isinstance(index.get(name), dict) for name in ("content", "arrays"))
    _expect(has_both, "an index without content and arrays")
    return index


def _array_of(name: str, entry: dict, data: bytes):
    is_whole = hashlib.sha256(data).hexdigest() == entry.get("sha256")
    _expect(is_whole, f"{name} does not have the checksum that was written")
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        shape, fortran_order, stored = _read_header[version](stream)
        dtype = np.dtype(getattr(ml_dtypes, entry["dtype"], entry["dtype"]))
    except (ValueError, KeyError, TypeError, SyntaxError, AttributeError) as error:
        raise _DamagedError(f"{name}: {type(error).__name__}: {str(error)[:120]}", _REMEDY) from error
    words = stored if dtype.char in _PLAIN else np.dtype(f"u{dtype.itemsize}")
    # Before anything of that size is made: what is declared has to be what is there.
    is_as_said = list(shape) == entry.get("shape") and stored == words and stored.itemsize == dtype.itemsize
    is_as_large = len(data) - stream.tell() == math.prod(shape) * stored.itemsize
    _expect(is_as_said and is_as_large and not stored.hasobject, f"{name} is not what the index says")
    array = np.frombuffer(data, stored, offset=stream.tell()).reshape(shape, order="F" if fortran_order else "C")
    return array.astype(dtype) if dtype.char in _PLAIN else np.ascontiguousarray(array).view(dtype).reshape(shape)


_read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
