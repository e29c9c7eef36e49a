"""The two data sets of the demo: real data that is on the machine already; whole files or images are held out."""

import hashlib
import pathlib
import sys
import sysconfig
from typing import NamedTuple

import numpy as np

# The split is part of the task, so it has a seed of its own: the seeds of the runs drive only
# initialization and shuffling, and every run is judged on the same held-out data.
SPLIT_SEED = 20180201

# A file gives at most this many bytes, or one long module (`_pydecimal.py`, 228 kB) would be all that
# is held out.
MAX_FILE_BYTES = 16_384


class DataSet(NamedTuple):
    """Training and held-out arrays of one task, and a `source` that says where they come from."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_held_out: np.ndarray
    y_held_out: np.ndarray
    source: dict


def load_digits() -> DataSet:
    """Returns scikit-learn's 1797 handwritten digits, a quarter of each class held out.

    Images are float32 of shape `(examples, 8, 8, 1)` in [0, 1]; labels are int32 of shape `(examples,)`.

    References:
        E. Alpaydin and C. Kaynak, 1998, Optical Recognition of Handwritten Digits,
        https://doi.org/10.24432/C50P49, as shipped in `sklearn.datasets.load_digits`.
    """
    from sklearn.datasets import load_digits as load_sklearn_digits

    images, labels = load_sklearn_digits(return_X_y=True)
    images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)  # pixels are counts 0..16
    labels = labels.astype("int32")
    held_out = stratified_choice(labels, fraction=0.25, seed=SPLIT_SEED)
    train = np.setdiff1d(np.arange(len(labels)), held_out)
    source = {
        "name": "scikit-learn handwritten digits",
        "train_examples": len(train),
        "held_out_examples": len(held_out),
        "sha256": _digest(images.tobytes() + labels.tobytes()),
    }
    return DataSet(images[train], labels[train], images[held_out], labels[held_out], source)


def stratified_choice(labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Returns sorted indices of `fraction` of each class, rounded down, drawn with `seed`."""
    rng = np.random.default_rng(seed)
    chosen = []
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        chosen.append(members[: int(len(members) * fraction)])
    return np.sort(np.concatenate(chosen))


def load_text(context: int, train_bytes: int, held_out_bytes: int) -> DataSet:
    """Returns windows of the source of Python's standard library, whole files held out.

    `x` holds `context` bytes as int32, shape `(windows, context)`; `y` the byte after each of them, so
    `y[:, :-1]` equals `x[:, 1:]`. Windows do not overlap: an epoch predicts each byte once. A window starts
    without memory of the one before it, so its bits per byte are higher than a sliding window's.

    Args:
        context: Bytes that a window reads. At least 1.
        train_bytes, held_out_bytes: Bytes of each part; what does not fill a window is dropped.
    """
    held_out_files, train_files = split_files(standard_library_files(), train_bytes, held_out_bytes)
    held_out = read_bytes(held_out_files, held_out_bytes)
    train = read_bytes(train_files, train_bytes)
    source = {
        "name": f"standard library of Python {sys.version.split()[0]}",
        "train_files": [path.name for path in train_files],
        "held_out_files": [path.name for path in held_out_files],
        "train_bytes": len(train),
        "held_out_bytes": len(held_out),
        "sha256": _digest(held_out + train),
    }
    x_train, y_train = byte_windows(train, context)
    x_held_out, y_held_out = byte_windows(held_out, context)
    return DataSet(x_train, y_train, x_held_out, y_held_out, source)


def standard_library_files() -> list:
    """Returns the paths of the standard library's top-level modules, sorted by name.

    Only names in `sys.stdlib_module_names`: what an installation adds to that directory
    (`sitecustomize.py`, the build settings in `_sysconfigdata_*.py`) differs from machine to machine.
    """
    directory = pathlib.Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in directory.glob("*.py") if path.stem in sys.stdlib_module_names)
    if not paths:
        raise FileNotFoundError(
            "Expected the `.py` files of Python's standard library. Received: none in "
            f"{str(directory)!r}. Run `--task digits`, or use a Python that ships its source."
        )
    return paths


def split_files(paths: list, train_bytes: int, held_out_bytes: int, seed: int = SPLIT_SEED) -> tuple:
    """Returns `(held_out, train)`: lists of whole files, drawn with `seed`, of at least so many bytes."""
    remaining = [paths[index] for index in np.random.default_rng(seed).permutation(len(paths))]
    parts = []
    for wanted in (held_out_bytes, train_bytes):
        part, size = [], 0
        while size < wanted:
            if not remaining:
                raise ValueError(
                    f"Expected {held_out_bytes + train_bytes} bytes in files that count for at most "
                    f"{MAX_FILE_BYTES} each. Received: {len(paths)} files that hold fewer. "
                    "Ask for fewer bytes."
                )
            part.append(remaining.pop(0))
            size += min(part[-1].stat().st_size, MAX_FILE_BYTES)
        parts.append(part)
    return tuple(parts)


def read_bytes(paths: list, limit: int) -> bytes:
    """Returns the first `MAX_FILE_BYTES` of each file, joined, and of that the first `limit` bytes."""
    return b"".join(path.read_bytes()[:MAX_FILE_BYTES] for path in paths)[:limit]


def byte_windows(text: bytes, context: int) -> tuple:
    """Returns `(x, y)`: int32 arrays of shape `(windows, context)`, `y` one byte ahead of `x`."""
    windows = (len(text) - 1) // context
    codes = np.frombuffer(text, dtype="uint8").astype("int32")
    x = codes[: windows * context].reshape(windows, context)
    y = codes[1 : windows * context + 1].reshape(windows, context)
    return x, y


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
