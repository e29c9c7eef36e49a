"""The tasks of the demo: what data, what model, how long it trains, and how it is judged."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import keras
from keras import layers, ops

from mpkeras.demo import data

VOCABULARY_SIZE = 256  # bytes


@dataclass(frozen=True)
class Task:
    """One task, ready to be trained under any policy.

    Attributes:
        name: As the command line calls it.
        title: What is trained on what.
        quality_name: What is measured on held-out data, with its unit.
        higher_is_better: Direction of the quality.
        tolerance: A difference of quality too small to matter, whatever the spread of the seeds.
        load: Returns the `DataSet`.
        build: Returns a fresh model, not compiled.
        loss, metrics: Return what `compile` takes, fresh for each model.
        quality: Turns one epoch's logs into the quality.
        learning_rate: Peak of the schedule: it rises for a tenth of the steps, then falls to a tenth.
        batch_size: Examples a step.
        epochs: Epochs unless the user says otherwise.
        steps_per_epoch: Steps between two looks at the held-out data; `None` for a pass over the data.
    """

    name: str
    title: str
    quality_name: str
    higher_is_better: bool
    tolerance: float
    load: Callable
    build: Callable
    loss: Callable
    metrics: Callable
    quality: Callable
    learning_rate: float
    batch_size: int
    epochs: int
    steps_per_epoch: int | None = None

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
        load=data.load_digits,
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
        load=lambda: data.load_text(context, train_bytes, held_out_bytes),
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
    """Returns a BatchNorm CNN with a softmax head for images of shape `(8, 8, 1)`.

    Most of its arithmetic is in the dense product: no CPU has a fast float16 convolution (ten times slower
    than float32 in TensorFlow), and a demo that waits for one shows little else.

    Args:
        width: Filters of the first convolution; the second has twice as many.
        hidden: Units of the dense layer.
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
    """Returns a causal transformer over bytes.

    It takes int32 `(batch, context)` and returns logits of shape `(batch, context, 256)`.

    Args:
        context: Bytes it reads at once.
        width: Numbers per position between the blocks; a multiple of `heads`.
        heads: Attention heads.
        hidden: Units of each block's first dense layer.
        blocks: Pairs of attention and dense layers.
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
