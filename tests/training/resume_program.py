"""Trains a run whole, in halves, or until it is killed. `test_resume.py` compares the halves with the whole.

`kill DIRECTORY`: trains with backups until the process is killed in the middle of an epoch.
`resume DIRECTORY`: goes on from every file there, under other global policies, and writes what comes out.
"""

import os
import signal
import sys
import warnings
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras  # noqa: E402
import numpy as np  # noqa: E402

import mpkeras  # noqa: E402
from mpkeras.callbacks import MixedPrecision  # noqa: E402
from mpkeras.training.state import load_state_dict, state_dict  # noqa: E402

BATCH, BATCHES, EPOCHS, HALF = 8, 6, 4, 2
KILLED_IN = (2, 4)  # epoch, batch
TRAINING = {
    "policy": "mixed_float16",
    # Scale and counters are away from their defaults wherever a file is written. The very first batch overflows as
    # well, and with this floor it is skipped: no smaller scale is tried.
    "loss_scale": mpkeras.DynamicLossScale(
        1024.0, min_scale=1024.0, growth_factor=4.0, dynamic_growth_steps=2, hysteresis=2
    ),
}


def data():
    """In every epoch the second step is skipped for its loss, the first and the last for their gradients.

    With a hysteresis of 2 the scale backs off between two epochs: only if the counters have been restored.
    """
    generator = np.random.default_rng(3)
    x = generator.normal(size=(BATCH * BATCHES, 6)).astype("float32")
    y = generator.normal(size=(BATCH * BATCHES, 3)).astype("float32")
    x[BATCH] = np.inf
    y[:BATCH] = y[-BATCH:] = 1e6
    return x, y


def compiled(seed: int, dropout: bool = False):
    keras.utils.set_random_seed(seed)
    layers = [keras.Input((6,)), keras.layers.Dense(16, activation="relu"), keras.layers.BatchNormalization()]
    layers += [keras.layers.Dropout(0.3)] if dropout else []
    model = keras.Sequential([*layers, keras.layers.Dense(3)])
    schedule = keras.optimizers.schedules.ExponentialDecay(0.01, 5, 0.7)
    model.compile(keras.optimizers.Adam(schedule, clipnorm=1.0), "mse", metrics=["mae"])
    return model


def prepared(seed: int, dropout: bool = False):
    return mpkeras.prepare(compiled(seed, dropout), **TRAINING)


def fit(model, *callbacks, first_batch: int = 0, epochs: int = EPOCHS, initial_epoch: int = 0):
    x, y = data()
    first = first_batch * BATCH
    start = StartOfSecondHalf()
    with warnings.catch_warnings():
        # One loss of each epoch is NaN on purpose, and is said.
        warnings.filterwarnings("ignore", ".* steps skipped in epoch", UserWarning)
        # What is left of an epoch may be that one step.
        warnings.filterwarnings("ignore", "All 1 steps of epoch", UserWarning)
        history = model.fit(
            x[first:],
            y[first:],
            batch_size=BATCH,
            epochs=epochs,
            initial_epoch=initial_epoch,
            shuffle=False,
            verbose=0,
            callbacks=[*callbacks, start],
        )
    return {**history.history, "start": start.values}


class StartOfSecondHalf(keras.callbacks.Callback):
    """Keeps the state with which the first step of the second half begins."""

    values = ()

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_begin(self, batch, logs=None):
        if (self.epoch, batch) == (HALF, 0):
            self.values = arrays(self.model.variables + self.model.optimizer.variables)


def arrays(variables) -> list:
    return [np.array(keras.ops.convert_to_numpy(variable.value)) for variable in variables]


def outcome(model, history) -> dict:
    """All that must be equal: weights, statistics, random generators, optimizers, metrics of each epoch."""
    end = arrays(model.variables + model.metrics_variables + model.optimizer.variables)
    metrics = {name: np.array(history[name][-(EPOCHS - HALF) :]) for name in ("loss", "mae")}
    start = {f"start {i}": array for i, array in enumerate(history["start"])}
    return {**start, **{f"end {i}": array for i, array in enumerate(end)}, **metrics}


def whole_run(dropout: bool) -> dict:
    model = prepared(1, dropout)
    return outcome(model, fit(model))


class StateWriter(keras.callbacks.Callback):
    """Writes the whole state after every batch, so that a reader never sees half a file."""

    def __init__(self, path, only=None):
        super().__init__()
        self.path, self.only = path, only

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if self.only in (None, (self.epoch, batch)):
            partial = self.path.with_suffix(".partial.npz")
            np.savez(partial, **state_dict(self.model))
            os.replace(partial, self.path)


class Kill(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == KILLED_IN:
            os.kill(os.getpid(), signal.SIGKILL)


def first_half(directory: Path):
    """Writes every format that is written without being killed."""
    model = compiled(1)
    fit(
        model,
        keras.callbacks.ModelCheckpoint(str(directory / "checkpoint.keras")),
        keras.callbacks.ModelCheckpoint(str(directory / "checkpoint.weights.h5"), save_weights_only=True),
        keras.callbacks.BackupAndRestore(str(directory / "backup"), delete_checkpoint=False),
        MixedPrecision(**TRAINING),
        epochs=HALF,
    )
    model = prepared(1)
    fit(model, epochs=HALF)
    model.save(directory / "model.keras")
    model.save_weights(directory / "model.weights.h5")
    model = prepared(1, dropout=True)
    middle = StateWriter(directory / "middle.npz", only=KILLED_IN)
    fit(model, epochs=HALF)
    np.savez(directory / "state.npz", **state_dict(model))
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(str(directory / "tf"))
    fit(model, middle, initial_epoch=HALF)
    return model


def kill(directory: Path):
    callbacks = [
        MixedPrecision(**TRAINING),
        Kill(),
        keras.callbacks.BackupAndRestore(str(directory / "killed"), save_freq=1),
        keras.callbacks.ModelCheckpoint(str(directory / "killed.keras"), save_freq=1),
        StateWriter(directory / "killed.npz"),
    ]
    fit(compiled(1), *callbacks)


# ------------------------------------------------------------------------------------------- going on


def from_model_file(path):
    model = keras.saving.load_model(path)
    return model, fit(model, MixedPrecision(), initial_epoch=HALF)


def from_prepared_model_file(path):
    model = mpkeras.prepare(keras.saving.load_model(path))
    return model, fit(model, initial_epoch=HALF)


def from_weights(path):
    model = prepared(2)
    model.optimizer.build(model.trainable_variables)
    model.load_weights(path)
    return model, fit(model, initial_epoch=HALF)


def from_backup(path):
    model = compiled(2)
    backup = keras.callbacks.BackupAndRestore(str(path), delete_checkpoint=False)
    return model, fit(model, backup, MixedPrecision(**TRAINING))


def from_state(path):
    model = prepared(2, dropout=True)
    model.test_on_batch(*data())
    load_state_dict(model, np.load(path))
    return model, fit(model, initial_epoch=HALF)


def from_middle_state(path, dropout: bool = True):
    model = prepared(2, dropout)
    model.test_on_batch(*data())
    load_state_dict(model, np.load(path))
    return model, _rest(model, StateReader(path))


def from_killed_state(path):
    return from_middle_state(path, dropout=False)


class StateReader(keras.callbacks.Callback):
    """Loads once the epoch has begun: `fit` has then reset the metrics, and torch's loader has drawn its seed."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_train_batch_begin(self, batch, logs=None):
        if self.path is not None:
            load_state_dict(self.model, np.load(self.path))
            self.path = None


def from_killed_backup(path):
    # Not by `fit`, which would start the broken epoch over: Keras stores the batch but does not go to it.
    model = prepared(2)
    model.optimizer.build(model.trainable_variables)
    model.load_weights(path / "latest.weights.h5")
    return model, _rest(model)


def from_killed_model_file(path):
    model = mpkeras.prepare(keras.saving.load_model(path))
    return model, _rest(model)


def _rest(model, *callbacks):
    """Goes on in the middle of an epoch: the optimizer knows how many batches it has seen."""
    seen = int(model.optimizer.iterations) + int(model.optimizer.skipped_steps)
    epoch, batch = divmod(seen, BATCHES)
    history = fit(model, *callbacks, first_batch=batch, initial_epoch=epoch, epochs=epoch + 1)
    rest = fit(model, initial_epoch=epoch + 1)
    return {**{name: history[name] + rest[name] for name in ("loss", "mae")}, "start": ()}


def from_tf_checkpoint(path, builds: bool = True):
    import tensorflow as tf

    model = prepared(2, dropout=True)
    if builds:
        model.optimizer.build(model.trainable_variables)
    status = tf.train.Checkpoint(model=model, optimizer=model.optimizer).read(str(path))
    if builds:
        status.assert_consumed()
    return model, fit(model, initial_epoch=HALF)


def from_tf_checkpoint_before_building(path):
    return from_tf_checkpoint(path, builds=False)


FORMATS = {
    "model.keras": from_prepared_model_file,
    "checkpoint.keras": from_model_file,
    "model.weights.h5": from_weights,
    "checkpoint.weights.h5": from_weights,
    "backup": from_backup,
    "state.npz": from_state,
    "middle.npz": from_middle_state,
    "killed.npz": from_killed_state,
    "killed": from_killed_backup,
    "killed.keras": from_killed_model_file,
}
TF_FORMATS = {"tf": from_tf_checkpoint, "tf unbuilt": from_tf_checkpoint_before_building}
WITH_DROPOUT = ("state.npz", "middle.npz", *TF_FORMATS)
# These go on from elsewhere, or have no optimizer state yet when the half begins.
WITHOUT_START = ("middle.npz", "killed.npz", "killed", "killed.keras", "tf unbuilt")
# Every format under one global policy that is not the model's, each kind of reader under a second.
CASES = [(name, "mixed_bfloat16") for name in (*FORMATS, *TF_FORMATS)]
CASES += [(name, "float32") for name in ("model.keras", "model.weights.h5", "state.npz", "tf")]


def resume(directory: Path):
    for name, policy in CASES:
        if name in FORMATS or keras.backend.backend() == "tensorflow":
            keras.config.set_dtype_policy(policy)
            go_on = {**FORMATS, **TF_FORMATS}[name]
            np.savez(directory / f"{name} {policy}.npz", **outcome(*go_on(directory / name.split()[0])))


if __name__ == "__main__":
    {"kill": kill, "resume": resume}[sys.argv[1]](Path(sys.argv[2]))
