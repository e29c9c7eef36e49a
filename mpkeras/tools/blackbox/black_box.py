"""`BlackBox`: a file for each skipped step, from which it can be run again elsewhere."""

import itertools
import re
from pathlib import Path

from mpkeras.seams import ModelInFit, capsule_file, checked_count, checked_path, number
from mpkeras.tools.shared.skipped_steps import SkippedSteps


class BlackBox(SkippedSteps):
    """Writes a capsule of every skipped step: batch, all state before it, and how to make the model anew.

    `mpkeras.load_capsule(path)` runs the step again, and `mpkeras replay FILE` names the first operation that is not
    finite. At most `keep` files of one `fit` are kept, the first ones, as what comes after a failure often follows from
    it; but a step whose loss was finite, as when a dynamic loss scale settles, gives way to one whose loss was not.

    A capsule is as large as the batch, the weights and the optimizer's state together. It holds your data: see
    docs/black_box.md before you send one. The file is there whole or not at all. Where it cannot be written, a warning
    says why and training goes on.

    Nothing is copied of a step but a handful of single numbers: all else is still there after a skipped step. Each step
    is looked at when it has run, so the device is waited for. Steps of one execution (`steps_per_execution`) run one by
    one.

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
        TypeError: If `folder` is no path.

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
        super().__init__()
        self.capsules: list[Path] = []
        self._folder = checked_path("folder", folder, "Pass the folder that the files go into.")
        self._keep = checked_count("keep", keep, "Leave it out for 3 files.")
        # Whether the loss of a capsule's step was not finite.
        self._lost_its_loss: dict[Path, bool] = {}
        self._numbers: _MovingNumbers | None = None

    def on_train_begin(self, logs=None):
        super().on_train_begin(logs)
        present = ModelInFit(self.model).guard
        if present is not None and not present.rollback:
            raise ValueError(
                "Expected a guard that undoes skipped steps: what it leaves is the state before them. Received: "
                "rollback=False. Leave `rollback` out of `prepare` or `MixedPrecision`."
            )
        if ModelInFit(self.model).replicas > 1:
            raise ValueError(
                "Expected a model that trains on one replica, whose batch can be kept. Received: "
                f"{ModelInFit(self.model).replicas} replicas. Find the batch on one of them, or use "
                "`NumericsMonitor`."
            )
        self.capsules, self._lost_its_loss, self._numbers = [], {}, None

    def _leave(self):
        self._numbers = None
        super()._leave()

    def _run_step(self, run, step, batch, *state):
        if self._numbers is None or not self._numbers.are_all():
            self._numbers = _MovingNumbers(self._trained)
        numbers, step_state = self._numbers, self._in_fit.held_state(state)
        numbers_before = numbers.read(step_state)
        result = run(*state)
        logs, step_state = step_state.after(result)
        if numbers.skipped(numbers_before, step_state):
            with self._in_fit.held_by_variables(*step_state.arguments()):
                self._write(step, batch, logs, numbers_before)
        return result

    def _write(self, step, batch, logs, numbers_before):
        optimizers = self._in_fit.optimizers
        lost = any(number(o.nonfinite_losses) > numbers_before[id(o.nonfinite_losses)] for o in optimizers)
        given_way = [path for path in self.capsules if not self._lost_its_loss[path]]
        if len(self.capsules) >= self._keep and not (lost and given_way):
            return
        path = self._new_path(step)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            options = {"batch": batch, "logs": logs, "number": step, "epoch": self._epoch}
            capsule_file.capsule_of_fit(path, self._trained, optimizers, numbers_before, **options)
        except Exception as error:  # of a folder, a batch, or a layer of the user's
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
    """The numbers that a skipped step changes: read before each step, and written of a skipped one alone."""

    def __init__(self, model):
        self._model, self._optimizers = model, ModelInFit(model).optimizers
        self._variables = ModelInFit(model).moving_variables(self._optimizers)
        self._are_built = all(optimizer.built for optimizer in self._optimizers)
        self._metrics = len(model.metrics)

    def are_all(self) -> bool:
        """Whether optimizers and metrics are those that there are now: some come into being in the first step."""
        return self._are_built and self._metrics == len(self._model.metrics)

    def read(self, step_state) -> dict:
        """Returns the numbers in `step_state`, a `HeldState`, as arrays by `id` of the variable; waits for them."""
        return {id(variable): step_state.read(variable)[0] for variable in self._variables}

    def skipped(self, numbers_before: dict, step_state) -> bool:
        """Whether the step after which `step_state` is the state was skipped; waits for it."""
        counts = [optimizer.skipped_steps for optimizer in self._optimizers]
        return any(step_state.number(count) > numbers_before[id(count)] for count in counts)
