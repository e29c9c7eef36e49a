"""What each task of the demo is: its data, its model, how long it trains, and how it is judged."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import keras

from mpkeras.demo import data, models


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
        build=lambda: models.digits_model(**size),
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
        build=lambda: models.text_model(context, **size),
        loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=list,
        quality=lambda logs: logs["val_loss"] / math.log(2.0),  # nats to bits
        learning_rate=6e-3,
        batch_size=batch_size,
        epochs=epochs,
        steps_per_epoch=steps_per_epoch,
    )


TASKS = {"digits": digits_task, "text": text_task}
