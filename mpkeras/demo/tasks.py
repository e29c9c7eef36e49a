"""The tasks of the demo: what data, what model, how long it trains, and how it is judged.

The data is real, and on the machine already; whole files or images are held out.
"""

import hashlib
import math
import pathlib
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import keras
import numpy as np
from keras import layers, ops

# The split is part of the task, so it has a seed of its own: the seeds of the runs drive only
# initialization and shuffling, and every run is judged on the same held-out data.
SPLIT_SEED = 20180201

# A file gives at most this many bytes, or one long module (`_pydecimal.py`, 228 kB) would be all that
# is held out.
MAX_FILE_BYTES = 16_384
VOCABULARY_SIZE = 256  # bytes


class DataSet(NamedTuple):
    """Training and held-out arrays of one task, and a `source` that says where they come from."""

    x_train: np.ndarray
    y_train: np.ndarray
    x_held_out: np.ndarray
    y_held_out: np.ndarray
    source: dict


@dataclass(frozen=True)
class Task:
    """One task, ready to be trained under any policy."""

    name: str  # as the command line calls it
    title: str
    quality_name: str  # with its unit
    higher_is_better: bool
    tolerance: float  # a difference of quality too small to matter, whatever the spread of the seeds
    load: Callable  # returns the `DataSet`
    build: Callable  # returns a fresh model, not compiled
    loss: Callable  # this and `metrics` return what `compile` takes, fresh for each model
    metrics: Callable
    quality: Callable  # turns one epoch's logs into the quality
    learning_rate: float  # peak of the schedule: it rises for a tenth of the steps, then falls to a tenth
    batch_size: int
    epochs: int  # unless the user says otherwise
    steps_per_epoch: int | None = None  # between two looks at the held-out data; `None` for a pass over the data

    def steps(self, data_set, epochs: int) -> int:
        """Returns the optimizer steps of a whole run of `epochs` on `data_set`."""
        per_epoch = self.steps_per_epoch or math.ceil(len(data_set.x_train) / self.batch_size)
        return epochs * per_epoch


def digits_task(quick: bool = False) -> Task:
    """Returns the handwritten digits; `quick` shrinks the model and the training, not the data."""
    size = {"width": 4, "hidden": 32} if quick else {"width": 32, "hidden": 1024}
    return Task(
        name="digits",
        title="BatchNorm CNN on handwritten digits",
        quality_name="held-out accuracy",
        higher_is_better=True,
        tolerance=0.005,  # two of the 445 held-out images
        load=load_digits,
        build=lambda: digits_model(**size),
        loss=keras.losses.SparseCategoricalCrossentropy,
        metrics=lambda: ["accuracy"],
        quality=lambda logs: logs["val_accuracy"],
        learning_rate=2e-3,
        batch_size=128,
        epochs=2 if quick else 10,
    )


def text_task(quick: bool = False) -> Task:
    """Returns the bytes of Python's standard library; `quick` shrinks data, model and training."""
    context, batch_size, steps_per_epoch, epochs = (16, 8, 10, 2) if quick else (32, 32, 40, 6)
    size = {"width": 32, "heads": 2, "hidden": 64} if quick else {"width": 256, "heads": 4, "hidden": 1024}
    # Each byte is read once in so many epochs; further epochs go over the same bytes again. A whole number
    # of epochs, or `fit` would run out of data in the middle of one.
    train_bytes = context * batch_size * steps_per_epoch * epochs + 1
    held_out_bytes = context * batch_size * (4 if quick else 16) + 1
    return Task(
        name="text",
        title="byte-level transformer on Python's source",
        quality_name="held-out bits per byte",
        higher_is_better=False,
        tolerance=0.01,
        load=lambda: load_text(context, train_bytes, held_out_bytes),
        build=lambda: text_model(context, **size),
        loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=list,
        quality=lambda logs: logs["val_loss"] / math.log(2.0),  # nats to bits
        learning_rate=6e-3,
        batch_size=batch_size,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
    )


TASKS = {"digits": digits_task, "text": text_task}


def digits_model(width: int, hidden: int) -> keras.Model:
    """Returns a BatchNorm CNN with a softmax head for images of shape `(8, 8, 1)`; the first convolution has `width`.

    Most of its arithmetic is in the dense product: no CPU has a fast float16 convolution (ten times slower
    than float32 in TensorFlow), and a demo that waits for one shows little else.
    """
    images = layers.Input((8, 8, 1), name="images")
    x = images
    for filters, strides in ((width, 1), (2 * width, 2)):
        x = layers.Conv2D(filters, 3, strides=strides, padding="same", use_bias=False)(x)
        # Moving statistics with momentum 0.99, Keras' default, lag behind a training of 100 steps.
        x = layers.BatchNormalization(momentum=0.9)(x)
        x = layers.ReLU()(x)
    x = layers.Flatten()(x)
    x = layers.Dense(hidden, use_bias=False)(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    x = layers.ReLU()(x)
    probabilities = layers.Dense(10, activation="softmax", name="probabilities")(x)
    return keras.Model(images, probabilities, name="digits")


def text_model(context: int, width: int, heads: int, hidden: int, blocks: int = 1) -> keras.Model:
    """Returns a causal transformer from bytes, int32 `(batch, context)`, to logits of shape `(batch, context, 256)`.

    `width`, a multiple of `heads`, is the size of a position between the blocks, `hidden` that within one.
    """
    codes = layers.Input((context,), dtype="int32", name="codes")
    # Positions come out of the graph, not from a constant: an Embedding called on an array is evaluated
    # once, here, and never trained.
    positions = ops.zeros_like(codes) + ops.arange(context, dtype="int32")
    x = _embedding(VOCABULARY_SIZE, width)(codes) + _embedding(context, width)(positions)
    for _ in range(blocks):
        attended = layers.LayerNormalization()(x)
        attention = layers.MultiHeadAttention(heads, width // heads)
        x = x + attention(attended, attended, use_causal_mask=True)
        transformed = layers.LayerNormalization()(x)
        transformed = layers.Dense(hidden, activation="relu")(transformed)
        x = x + layers.Dense(width)(transformed)
    x = layers.LayerNormalization()(x)
    return keras.Model(codes, layers.Dense(VOCABULARY_SIZE, name="logits")(x), name="text")


def _embedding(rows: int, width: int) -> layers.Embedding:
    # As large as what a block adds to it (about 1). Keras' default, 0.03, drowns the byte in the first
    # block's output, and a short training spends its steps on digging it out.
    initializer = keras.initializers.RandomNormal(stddev=0.5)
    return layers.Embedding(rows, width, embeddings_initializer=initializer)


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
    """Returns windows of `context` bytes of the source of Python's standard library, whole files held out.

    `x` holds the bytes as int32, shape `(windows, context)`; `y` the byte after each of them, so `y[:, :-1]` equals
    `x[:, 1:]`. Windows do not overlap: an epoch predicts each byte once. A window starts without memory of the one
    before it, so its bits per byte are higher than a sliding window's. The rest, too short for a window, is dropped.
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
    """Returns the paths of the standard library's top-level modules, sorted by name."""
    directory = pathlib.Path(sysconfig.get_path("stdlib"))
    # What an installation adds to that directory (`sitecustomize.py`, the build settings in `_sysconfigdata_*.py`)
    # differs from machine to machine.
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
    texts = []
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
        texts.append(part)
    return tuple(texts)


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
