"""The tasks of `small_state_quality.py`: what is trained, by which optimizers, at which learning rates."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import keras
import numpy as np

from mpkeras.demo import tasks

PATCH = 16  # the side of a patch, in pixels
SIDE = 32  # of an image as MobileNet takes it, which takes none smaller
# The split belongs to the task, not to the seed of a run.
SPLIT_SEED = 20180201


@dataclass(frozen=True)
class Task:
    """One task, ready to be trained by any optimizer.

    Attributes:
        title: What is trained on what.
        quality_name: What is measured on held-out data.
        higher_is_better: Direction of the quality.
        tolerance: A difference of quality too small to matter, whatever the spread of the seeds.
        load: Returns `(x_train, y_train, x_held_out, y_held_out)`.
        build: Returns a fresh model, not compiled.
        loss: Returns the loss of `compile`.
        quality: Turns what `evaluate` returns into the quality.
        batch_size: Examples a step.
        epochs: Parts of a run, each with a learning rate of its own.
        steps_per_epoch: Steps of a part; `None` for a pass over the training data.
    """

    title: str
    quality_name: str
    higher_is_better: bool
    tolerance: float
    load: Callable
    build: Callable
    loss: Callable
    quality: Callable
    batch_size: int
    epochs: int
    steps_per_epoch: int | None = None

    def steps(self, examples: int) -> int:
        """Returns the optimizer steps of a run."""
        return self.epochs * (self.steps_per_epoch or math.ceil(examples / self.batch_size))


def _accuracy(logs: dict) -> float:
    return logs["accuracy"]


def _load_digits():
    return tasks.load_digits()[:4]


def _load_text():
    context, train_windows, held_out_windows = 32, 32 * 160, 32 * 32
    return tasks.load_text(context, context * train_windows + 1, context * held_out_windows + 1)[:4]


def load_patches():
    """Returns patches of scikit-learn's two photographs: which one, and which quarter of it, 8 classes.

    Patches do not overlap. A quarter of each class is held out. Images are float32, shape `(n, 32, 32, 3)`, in [-1, 1]:
    each pixel of a patch is four of an image. Training sees mirror images, too.
    """
    from sklearn.datasets import load_sample_images

    images, labels = [], []
    for photograph, picture in enumerate(load_sample_images().images):
        height, width = picture.shape[0] // 2, picture.shape[1] // 2
        for quarter in range(4):
            top, left = quarter // 2 * height, quarter % 2 * width
            for y in range(top, top + height - PATCH + 1, PATCH):
                for x in range(left, left + width - PATCH + 1, PATCH):
                    images.append(picture[y : y + PATCH, x : x + PATCH])
                    labels.append(4 * photograph + quarter)
    images, labels = (np.stack(images) / 127.5 - 1.0).astype("float32"), np.array(labels, "int32")
    images = images.repeat(SIDE // PATCH, axis=1).repeat(SIDE // PATCH, axis=2)
    held_out = tasks.stratified_choice(labels, fraction=0.25, seed=SPLIT_SEED)
    train = np.setdiff1d(np.arange(len(labels)), held_out)
    x_train = np.concatenate([images[train], images[train][:, :, ::-1]])
    return x_train, np.tile(labels[train], 2), images[held_out], labels[held_out]


def _mobile_net():
    # The smallest model of `keras.applications`, an eighth as wide: hundreds of runs have to fit in hours of a CPU.
    # Without dropout, whose masks would make the seeds spread more.
    model = keras.applications.MobileNet(
        input_shape=(SIDE, SIDE, 3), alpha=0.125, dropout=0.0, weights=None, classes=8, name="mobilenet"
    )
    for layer in model.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            # Moving statistics with momentum 0.99 lag behind a training of some hundred steps.
            layer.momentum = 0.9
    return model


TASKS = {
    "digits": Task(
        title="BatchNorm CNN on handwritten digits",
        quality_name="held-out accuracy",
        higher_is_better=True,
        tolerance=0.005,  # two of the 445 held-out images
        load=_load_digits,
        build=lambda: tasks.digits_model(width=16, hidden=256),
        loss=keras.losses.SparseCategoricalCrossentropy,
        quality=_accuracy,
        batch_size=64,
        epochs=8,
    ),
    "text": Task(
        title="byte-level transformer on Python's source",
        quality_name="held-out bits per byte",
        higher_is_better=False,
        tolerance=0.01,
        load=_load_text,
        build=lambda: tasks.text_model(32, width=64, heads=4, hidden=256),
        loss=lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        quality=lambda logs: logs["loss"] / math.log(2.0),  # nats to bits
        batch_size=32,
        epochs=8,
        steps_per_epoch=20,  # each byte is read once
    ),
    "patches": Task(
        title="MobileNet of keras.applications, alpha 0.125, on patches of two photographs",
        quality_name="held-out accuracy",
        higher_is_better=True,
        tolerance=0.01,  # five of the 520 held-out patches
        load=load_patches,
        build=_mobile_net,
        loss=keras.losses.SparseCategoricalCrossentropy,
        quality=_accuracy,
        batch_size=16,
        epochs=8,
        steps_per_epoch=24,  # each patch, and its mirror image, is seen once
    ),
}

# The largest of a run, by optimizer and task: the best of `--sweep`, in float32, chosen before any 16-bit run.
LEARNING_RATES = {
    "adam": {"digits": 3e-3, "text": 1e-2, "patches": 3e-3},
    "sgd": {"digits": 3e-2, "text": 3e-1, "patches": 1e-1},
    "adafactor": {"digits": 1e-1, "text": 1e-1, "patches": 1e-1},
    "lion": {"digits": 1e-3, "text": 1e-2, "patches": 1e-3},
    "rmsprop": {"digits": 3e-3, "text": 1e-2, "patches": 3e-3},
    "adagrad": {"digits": 1e-1, "text": 1.0, "patches": 1e-1},
    "lamb": {"digits": 1e-2, "text": 3e-2, "patches": 1e-2},
    "adamw": {"digits": 3e-3, "text": 1e-2, "patches": 3e-3},
    "nadam": {"digits": 3e-3, "text": 3e-2, "patches": 3e-3},
    "muon": {"digits": 3e-3, "text": 3e-2, "patches": 1e-2},
}
SWEEP = {
    "adam": (1e-3, 3e-3, 1e-2),
    "adamw": (1e-3, 3e-3, 1e-2),
    "sgd": (3e-2, 1e-1, 3e-1),
    "rmsprop": (3e-4, 1e-3, 3e-3),
    "adagrad": (1e-2, 3e-2, 1e-1),
    "adafactor": (1e-2, 3e-2, 1e-1),
    "lion": (1e-4, 3e-4, 1e-3),
    "lamb": (3e-3, 1e-2, 3e-2),
    "nadam": (1e-3, 3e-3, 1e-2),
    "muon": (1e-3, 3e-3, 1e-2),
}
# Of one pass over its bytes the best is found higher up.
SWEEP_FACTOR = {"digits": 1.0, "text": 10.0, "patches": 1.0}
# Their learning rates are set later.
OPTIMIZERS: dict[str, Callable] = {
    "adam": keras.optimizers.Adam,
    "adamw": lambda: keras.optimizers.AdamW(weight_decay=0.01),
    "sgd": lambda: keras.optimizers.SGD(momentum=0.9),
    "rmsprop": keras.optimizers.RMSprop,
    "adagrad": keras.optimizers.Adagrad,
    "adafactor": keras.optimizers.Adafactor,
    "lion": lambda: keras.optimizers.Lion(weight_decay=0.01),
    "lamb": keras.optimizers.Lamb,
    "nadam": keras.optimizers.Nadam,
    "muon": lambda: keras.optimizers.Muon(exclude_layers=["logits", "probabilities", "predictions"]),
}


def learning_rate(peak: float, epoch: int, epochs: int) -> float:
    """Returns the learning rate of part `epoch` of a run: half the peak first, then down from it to a tenth."""
    fall = 0.1 + 0.9 * (1.0 + math.cos(math.pi * epoch / max(epochs - 1, 1))) / 2
    return peak * (0.5 if epoch == 0 else fall)
