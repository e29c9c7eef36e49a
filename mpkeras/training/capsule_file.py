"""The file of a capsule, `.mpk`: a zip of `.npy` arrays and one JSON, written whole or not at all, read without trust.

Nothing in it is compressed, so no entry is larger than the file; nothing is unpacked to disk, so no name is a path.
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

import ml_dtypes
import numpy as np

# Goes up when an older mpkeras could not read what is written.
FORMAT = 1
_INDEX = "capsule.json"
_NAME = re.compile(r"arrays/\d{1,6}\.npy")
_MAX_INDEX_BYTES = 64 * 2**20
# NumPy's own kinds that are stored as they are; all others go as unsigned words beside their name.
_PLAIN = "?bhilqBHILQefdFD"
_REMEDY = "Ask for the file again, or write a new one: `mpkeras.callbacks.BlackBox`."


def write(path, content: dict, arrays: dict) -> int:
    """Writes a capsule and returns its size in bytes; on an error there is no file, or the one that was there before.

    Args:
        path: Where it goes; the folder must exist.
        content: What JSON can hold, without NaN and infinities.
        arrays: NumPy arrays of numbers by name, ml_dtypes' among them.
    """
    path = Path(path)
    index: dict = {"format": FORMAT, "content": content, "arrays": {}, "bytes": 0}
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                for i, (name, array) in enumerate(arrays.items()):
                    data, entry = _encoded(np.asarray(array))
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


def _encoded(array) -> tuple:
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
            entries = _checked_entries(path, archive)
            index = _checked_index(path, archive.read(entries[_INDEX]))
            arrays = {
                name: _decoded(path, name, entry, archive.read(entries[_file_of(path, name, entry, entries)]))
                for name, entry in index["arrays"].items()
            }
    except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
        # RuntimeError: an encrypted entry.
        what = "which does not exist" if isinstance(error, FileNotFoundError) else f"{type(error).__name__}: {error}"
        raise _refused(path, what) from error
    return index["content"], arrays


def _refused(path, what: str, remedy: str = _REMEDY) -> ValueError:
    return ValueError(f"Expected a whole capsule, as mpkeras writes it. Received: '{path}' ({what}). {remedy}")


def _checked_entries(path, archive) -> dict:
    """Returns the entries of the archive by name, none of which can be larger than what it takes up in the file."""
    infos = archive.infolist()
    names = [info.filename for info in infos]
    if len(set(names)) != len(names) or _INDEX not in names:
        raise _refused(
            path, f"a zip archive without `{_INDEX}`" if _INDEX not in names else "a name that is there twice"
        )
    for info in infos:
        if info.filename != _INDEX and not _NAME.fullmatch(info.filename):
            raise _refused(path, f"an entry named {info.filename[:80]!r}")
        if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 0x1:
            raise _refused(path, f"a compressed or encrypted entry {info.filename!r}")
    # Entries that overlap in the file would add up to more than the file.
    if sum(info.file_size for info in infos) > path.stat().st_size:
        raise _refused(path, "entries that are larger than the file")
    entries = {info.filename: info for info in infos}
    if entries[_INDEX].file_size > _MAX_INDEX_BYTES:
        raise _refused(path, f"a `{_INDEX}` of {entries[_INDEX].file_size} bytes")
    return entries


def _checked_index(path, text: bytes) -> dict:
    def refuse(constant):
        raise ValueError(f"{constant} in the JSON")

    try:
        index = json.loads(text.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise _refused(path, f"JSON that cannot be read: {type(error).__name__}: {str(error)[:120]}") from error
    version = index.get("format") if isinstance(index, dict) else None
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise _refused(path, "an index without a format number")
    if version > FORMAT:
        raise _refused(
            path,
            f"format {version}, where this mpkeras reads up to {FORMAT}",
            "Install the mpkeras that wrote it, or a newer one.",
        )
    if not isinstance(index.get("content"), dict) or not isinstance(index.get("arrays"), dict):
        raise _refused(path, "an index without content and arrays")
    return index


def _file_of(path, name, entry, entries) -> str:
    is_entry = isinstance(entry, dict) and isinstance(entry.get("file"), str) and entry["file"] in entries
    if not is_entry or entry["file"] == _INDEX:
        raise _refused(path, f"no entry for the array {name[:80]!r}")
    return entry["file"]


def _decoded(path, name, entry, data: bytes):
    if hashlib.sha256(data).hexdigest() != entry.get("sha256"):
        raise _refused(path, f"the array {name[:80]!r} does not have the checksum that was written")
    stream = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(stream)
        shape, fortran_order, stored = _read_header[version](stream)
        dtype = np.dtype(getattr(ml_dtypes, entry["dtype"], entry["dtype"]))
    except (ValueError, KeyError, TypeError, SyntaxError, AttributeError) as error:
        raise _refused(path, f"the array {name[:80]!r}: {type(error).__name__}: {str(error)[:120]}") from error
    words = stored if dtype.char in _PLAIN else np.dtype(f"u{dtype.itemsize}")
    # Before anything of that size is made: what is declared has to be what is there.
    is_as_said = list(shape) == entry.get("shape") and stored == words and stored.itemsize == dtype.itemsize
    if stored.hasobject or not is_as_said or len(data) - stream.tell() != math.prod(shape) * stored.itemsize:
        raise _refused(path, f"the array {name[:80]!r} is not what the index says")
    array = np.frombuffer(data, stored, offset=stream.tell()).reshape(shape, order="F" if fortran_order else "C")
    return array.astype(dtype) if dtype.char in _PLAIN else np.ascontiguousarray(array).view(dtype).reshape(shape)


_read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
