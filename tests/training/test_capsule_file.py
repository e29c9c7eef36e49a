"""The file of a capsule: what is written is read bit for bit; what is damaged, hostile or too new is refused."""

import hashlib
import io
import json
import os
import zipfile

import ml_dtypes
import numpy as np
import pytest

import mpkeras
from mpkeras.training import capsule_file

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")

ARRAYS = {
    "plain": np.arange(6.0).reshape(2, 3),
    "not finite": np.array([np.inf, -np.inf, np.nan, -0.0], "float16"),
    "bfloat16": np.array([[1.5], [np.nan]], ml_dtypes.bfloat16),
    "float8": np.array([0.5, 448.0], ml_dtypes.float8_e4m3fn),
    "a single bfloat16": np.array(3.0, ml_dtypes.bfloat16),
    "bool": np.array(True),
    "empty": np.zeros((0, 3), "int64"),
    "by columns": np.asfortranarray(np.arange(6, dtype="uint8").reshape(2, 3)),
}


def written(tmp_path, arrays=ARRAYS):
    path = tmp_path / "a.mpk"
    assert capsule_file.write(path, {"kind": "test"}, arrays) == path.stat().st_size
    return path


def entries_of(path) -> dict:
    with zipfile.ZipFile(path) as archive:
        return {info.filename: archive.read(info) for info in archive.infolist()}


def rewritten(path, entries, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return path


def refused(path, expected):
    with pytest.raises(ValueError, match=expected) as error:
        mpkeras.load_capsule(path)
    # What was received and what to do.
    assert str(path) in str(error.value) and ("again" in str(error.value) or "Install" in str(error.value))


def test_arrays_are_read_bit_for_bit(tmp_path):
    content, arrays = capsule_file.read(written(tmp_path))
    assert content == {"kind": "test"} and arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert (arrays[name].dtype, arrays[name].shape) == (array.dtype, array.shape), name
        assert arrays[name].tobytes() == array.tobytes(), name


def test_plain_numpy_reads_the_arrays(tmp_path):
    entries = entries_of(written(tmp_path))
    index = json.loads(entries["capsule.json"])
    assert index["bytes"] == sum(len(data) for name, data in entries.items() if name != "capsule.json")
    entry = index["arrays"]["bfloat16"]
    words = np.load(io.BytesIO(entries[entry["file"]]), allow_pickle=False)
    assert entry["dtype"] == "bfloat16" and words.dtype == np.uint16
    assert words.tobytes() == ARRAYS["bfloat16"].tobytes()


@pytest.mark.parametrize(
    ("content", "array", "expected"),
    [
        pytest.param({}, np.array([{}], object), "Expected arrays of numbers", id="objects"),
        pytest.param({}, np.array(["text"]), "Expected arrays of numbers", id="text"),
        pytest.param({}, np.array([b"text"]), "Expected arrays of numbers", id="bytes"),
        pytest.param({"loss": float("nan")}, np.ones(2), "not JSON compliant", id="NaN in the content"),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_no_file(tmp_path, content, array, expected):
    with pytest.raises(ValueError, match=expected):
        capsule_file.write(tmp_path / "a.mpk", content, {"ok": np.ones(2), "array": array})
    assert list(tmp_path.iterdir()) == []


def test_an_error_while_writing_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    path = written(tmp_path)
    before = path.read_bytes()

    def full(descriptor):
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        capsule_file.write(path, {"kind": "other"}, {})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_any_flipped_byte_and_any_cut_is_noticed(tmp_path):
    path = written(tmp_path, {"a": np.arange(4.0)})
    whole = path.read_bytes()
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused(path, "Expected a whole capsule")
    data = bytearray(whole)
    data[data.find(np.arange(4.0).tobytes()) + 9] ^= 1
    path.write_bytes(data)
    refused(path, "BadZipFile|checksum")


def test_no_file_and_other_files(tmp_path):
    refused(tmp_path / "none.mpk", "which does not exist")
    (tmp_path / "text.mpk").write_text("no zip")
    refused(tmp_path / "text.mpk", "BadZipFile")
    refused(tmp_path, "IsADirectoryError|PermissionError")
    refused(rewritten(tmp_path / "other.mpk", {"config.json": b"{}"}), "without `capsule.json`")


def changed_index(tmp_path, change):
    path = written(tmp_path, {"a": np.arange(4.0)})
    entries = entries_of(path)
    index = json.loads(entries["capsule.json"])
    entries["capsule.json"] = json.dumps(change(index) or index).encode()
    return rewritten(path, entries)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(lambda index: index.update(format=2), "format 2.*reads up to 1.*Install", id="too new"),
        pytest.param(lambda index: index.update(format=True), "without a format number", id="no number"),
        pytest.param(lambda index: [1], "without a format number", id="a list"),
        pytest.param(lambda index: index.update(arrays=[]), "without content and arrays", id="no arrays"),
        pytest.param(
            lambda index: index["arrays"].update(b={"file": "../../x"}), "no entry for the array 'b'", id="path"
        ),
        pytest.param(lambda index: index["arrays"].update(b="a"), "no entry for the array 'b'", id="no entry"),
        pytest.param(lambda index: index["arrays"]["a"].update(file="capsule.json"), "no entry", id="the index itself"),
        pytest.param(lambda index: index["arrays"]["a"].update(sha256="0"), "checksum", id="checksum"),
        pytest.param(lambda index: index["arrays"]["a"].update(shape=[10**12]), "not what the index says", id="shape"),
        pytest.param(lambda index: index["arrays"]["a"].update(dtype="float32"), "not what the index says", id="dtype"),
        pytest.param(lambda index: index["arrays"]["a"].update(dtype="object"), "not what the index says", id="object"),
        pytest.param(lambda index: index["arrays"]["a"].update(dtype="finfo"), "array 'a'", id="no dtype"),
        pytest.param(lambda index: index["content"].update(kind="pickle"), "description of a step", id="kind"),
    ],
)
def test_an_index_that_is_not_ours(tmp_path, change, expected):
    refused(changed_index(tmp_path, change), expected)


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        *(("capsule.json", text, "JSON that cannot be read") for text in (b"{", b"\xff\xfe", b'{"format": NaN}')),
        pytest.param("capsule.json", b"[" * 100_000, "JSON that cannot be read", id="deep JSON"),
        ("../../evil.npy", b"x", "an entry named"),
        ("/etc/x.npy", b"x", "an entry named"),
        ("arrays/../x.npy", b"x", "an entry named"),
        ("arrays/1.pkl", b"x", "an entry named"),
        ("arrays\\1.npy", b"x", "an entry named"),
    ],
)
def test_entries_that_are_not_ours(tmp_path, name, data, expected):
    path = written(tmp_path)
    refused(rewritten(path, {**entries_of(path), name: data}), expected)
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.mpk"]


def test_bombs_are_refused_before_they_are_unpacked(tmp_path):
    path = written(tmp_path)
    entries = {**entries_of(path), "arrays/99.npy": bytes(50 * 2**20)}
    refused(rewritten(path, entries, zipfile.ZIP_DEFLATED), "a compressed or encrypted entry")


def test_entries_that_overlap_are_refused(tmp_path):
    path = written(tmp_path, {"a": np.zeros(1000), "b": np.zeros(1000)})
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        first, second = archive.infolist()[:2]
    # The central directory is told that both begin where the first does.
    place = data.rfind(second.filename.encode())
    data = data[: place - 4] + first.header_offset.to_bytes(4, "little") + data[place:]
    path.write_bytes(data)
    refused(path, "Expected a whole capsule")


def test_pickled_arrays_are_refused(tmp_path):
    stream = io.BytesIO()
    np.save(stream, np.array([{"a": 1}], object), allow_pickle=True)
    path = written(tmp_path, {"a": np.arange(4.0)})
    entries = entries_of(path)
    index = json.loads(entries["capsule.json"])
    index["arrays"]["a"] |= {"sha256": hashlib.sha256(stream.getvalue()).hexdigest(), "shape": [1], "dtype": "object"}
    entries |= {"arrays/0.npy": stream.getvalue(), "capsule.json": json.dumps(index).encode()}
    refused(rewritten(path, entries), "not what the index says")


def test_a_name_that_is_there_twice(tmp_path):
    path = written(tmp_path)
    with pytest.warns(UserWarning, match="Duplicate name"), zipfile.ZipFile(path, "a") as archive:
        archive.writestr("arrays/0.npy", b"x")
    refused(path, "there twice")
