"""`BlackBox`: a file for each skipped step, from which it can be run again elsewhere."""

import contextlib
import importlib
import itertools
import re
from pathlib import Path

import keras

from mpkeras import _keras
from mpkeras._arguments import checked_count
from mpkeras.callbacks.skipped_steps import SkippedSteps
from mpkeras.policies.loss_scaling import number
from mpkeras.training import guard, training_backend
from mpkeras.training.capsule_file import capsule_of_fit, moving_variables


class BlackBox(SkippedSteps):
    """Writes a capsule of every skipped step: batch, all state before it, and how to make the model anew.

    `mpkeras.load_capsule(path)` runs the step again, and `mpkeras replay FILE` names the first operation that is not
    finite. At most `keep` files of one `fit` are kept, the first ones, as what comes after a failure often follows from
    it; but a step whose loss was finite, as when a dynamic loss scale settles, gives way to one whose loss was not.

    A capsule is as large as the batch, the weights and the optimizer's state together. It holds your data: see
    docs/black_box.md before you send one. The file is there whole or not at all. Where it cannot be written, a warning
    says why and training goes on.

    Nothing is copied of a step but a handful of single numbers: all else is still there after a skipped step. Each step
    is looked at before the next one begins, so the device is waited for; steps of one execution
    (`steps_per_execution`) run one by one.

    A model whose train step is not guarded, by `MixedPrecision` or `mpkeras.prepare`, is guarded for this `fit` as
    `MixedPrecision()` does.

    Args:
        folder: Where the files go; it is made when there is one to write.
        keep: Files to keep, 1 or more.

    Attributes:
        capsules: List of the paths of the files that were kept, the oldest first.

    Raises:
        ValueError: If `keep` is out of range; or, when training begins, if the guard was taken away, does not undo
            skipped steps (`rollback=False`), or the model trains on several replicas.

    Example:

    >>> import tempfile
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    >>> model.compile("sgd", "mse")
    >>> box = mpkeras.callbacks.BlackBox(tempfile.mkdtemp())
    >>> history = model.fit(np.full((4, 2), 0.5), np.ones((4, 1)), verbose=0, callbacks=[box])
    >>> box.capsules
    []
    """

    # Keras would otherwise wait on JAX for what this callback looks at itself.
    async_safe = True

    def __init__(self, folder, keep: int = 3):
        super().__init__(self._around_step)
        self.capsules: list[Path] = []
        self._folder = Path(folder)
        self._keep = checked_count("keep", keep, "Leave it out for 3 files.")
        # Whether the loss of a capsule's step was not finite.
        self._lost_its_loss: dict[Path, bool] = {}
        self._numbers: _MovingNumbers | None = None
        # The last step, until it is looked at.
        self._unseen: tuple | None = None

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        present = guard.guard_of(self.model)
        if present is not None and not present.rollback:
            raise ValueError(
                "Expected a guard that undoes skipped steps: what it leaves is the state before them. Received: "
                "rollback=False. Leave `rollback` out of `prepare` or `MixedPrecision`."
            )
        if training_backend.replicas(self.model) > 1:
            raise ValueError(
                "Expected a model that trains on one replica, whose batch can be kept. Received: "
                f"{training_backend.replicas(self.model)} replicas. Find the batch on one of them, or use "
                "`NumericsMonitor`."
            )
        self.capsules, self._lost_its_loss, self._numbers, self._unseen = [], {}, None, None

    def on_epoch_end(self, epoch, logs=None):
        self._look()
        super().on_epoch_end(epoch, logs)

    def on_train_end(self, logs=None):
        self._look()
        super().on_train_end(logs)

    def on_test_begin(self, logs=None):
        # Validation in `fit` takes over the state that is still to be looked at.
        self._look()

    @contextlib.contextmanager
    def _around_step(self, step, batch, state):
        # Whatever takes time on the host comes before `_look`, which waits for the device: behind it the device idles.
        if self._numbers is None or not self._numbers.are_all():
            self._numbers = _MovingNumbers(self._trained)
        numbers = self._numbers
        self._look()
        before = numbers.copies.before_step(*state)

        def take(result):
            logs, *state = result if isinstance(result, tuple) else (result,)
            after = numbers.copies.after_step(before, *state)
            self._unseen = numbers, before, after, step, batch, logs, state
            # On JAX steps run on while `fit` gets the next batch, and the state is there until that step begins.
            if not state:
                self._look()

        yield take

    def _look(self):
        """Looks at the last step, unless that was done."""
        if self._unseen is not None:
            numbers, before, after, step, batch, logs, state = self._unseen
            self._unseen = None
            if numbers.copies.skipped(before, after):
                self._write(step, batch, logs, numbers.read(before), *state)

    def _write(self, step, batch, logs, before, state=None):
        with _keras.held_by_variables(self._trained, state):
            optimizers = guard.scaling_optimizers(self._trained)
            lost = any(number(o.nonfinite_losses) > before[id(o.nonfinite_losses)] for o in optimizers)
            given_way = [path for path in self.capsules if not self._lost_its_loss[path]]
            if len(self.capsules) >= self._keep and not (lost and given_way):
                return
            path = self._new_path(step)
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                options = {"data": batch, "logs": logs, "step": step, "epoch": self._epoch}
                capsule_of_fit(path, self._trained, optimizers, before, **options)
            except (OSError, ValueError, TypeError) as error:
                self._warn(type(error).__name__, step, f", and its capsule could not be written: {error}")
                return
        if len(self.capsules) >= self._keep:
            self.capsules.remove(given_way[-1])
            given_way[-1].unlink(missing_ok=True)
        self.capsules.append(path)
        self._lost_its_loss[path] = lost
        if lost:
            self._warn("loss", step, f", as its loss was not finite. To see it again: `mpkeras replay {path}`.")

    def _new_path(self, step) -> Path:
        name = re.sub(r"[^\w.-]", "_", self._trained.name)
        stem = f"{name}-epoch{self._epoch + 1}-step{step}"
        # Files of an earlier training stay.
        endings = itertools.chain([""], (f"-{i}" for i in itertools.count(2)))
        paths = (self._folder / f"{stem}{ending}.mpk" for ending in endings)
        return next(path for path in paths if not path.exists())


class _MovingNumbers:
    """The numbers that a skipped step changes: copied before each step, and written of a skipped one alone."""

    def __init__(self, model):
        self._model = model
        self._optimizers = guard.scaling_optimizers(model)
        self._variables = moving_variables(self._optimizers, model.metrics)
        self._are_built = all(optimizer.built for optimizer in self._optimizers)
        self._metrics = len(model.metrics)
        backend = importlib.import_module(f"mpkeras.callbacks._{keras.backend.backend()}")
        skip_counts = [optimizer.skipped_steps for optimizer in self._optimizers]
        self.copies = backend.NumberCopies(model, self._variables, skip_counts)

    def are_all(self) -> bool:
        """Whether optimizers and metrics are those that there are now: some come into being in the first step."""
        return self._are_built and self._metrics == len(self._model.metrics)

    def read(self, copies) -> dict:
        """Returns the numbers as arrays, by `id` of the variable."""
        ids = [id(variable) for variable in self._variables]
        return dict(zip(ids, self.copies.read(copies), strict=True))
