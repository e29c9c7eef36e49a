"""What callbacks that look at skipped steps share: a guarded train step, and the batches of its last calls."""

import collections
import dataclasses
import functools
import importlib
import itertools
import warnings
from collections.abc import Callable

import keras

from mpkeras.seams import MixedPrecision, ModelInFit, ModelView, dtypes


class SkippedSteps(keras.callbacks.Callback):
    """Guards the train step of a model for this `fit`, unless somebody else does, and keeps its last batches."""

    # A method that runs each step, where a subclass has one: see `KeptBatches.attach`.
    _run_step: Callable | None = None

    def __init__(self):
        super().__init__()
        # Guards the train step where nobody else does; otherwise a callback that does nothing.
        self._precision = keras.callbacks.Callback()
        self._own_guard: object = None
        self._is_in_training = False
        self._kept = KeptBatches()
        self._warned: set = set()
        self._epoch = 0

    def set_model(self, model):
        super().set_model(model)
        # `Callback.model` brings the variables up to date on JAX, at every reading.
        self._trained, self._in_fit = model, ModelInFit(model)
        self._precision = keras.callbacks.Callback()
        present = self._in_fit.guard
        # A guard of its own is left over from a `fit` that raised.
        if present is None or present is self._own_guard:
            # Under the global policy a float32 model would be converted, which nobody asked for.
            self._precision = MixedPrecision(
                None if ModelView(model).computes_in(dtypes.SIXTEEN_BIT_DTYPES) else "float32"
            )
            self._precision.set_model(model)
            self._own_guard = self._in_fit.guard
        self._in_fit.begin(self._leave)

    def _leave(self):
        """Takes away what stands in front of the model's functions, and forgets what was kept of its steps."""
        self._is_in_training = False
        self._in_fit.ended(self._leave)
        self._kept.detach(self._trained)

    def on_train_begin(self, logs=None):
        present = ModelInFit(self.model).guard
        if present is None:
            raise ValueError(
                f"Expected a model whose train step is guarded. Received: model '{self.model.name}', whose guard was "
                f"taken away. Put `{type(self).__name__}` behind the callback that replaces the model's `train_step` "
                "or compiles it."
            )
        if present is not self._own_guard:
            # A callback behind this one has prepared the model, and looks after it.
            self._precision = keras.callbacks.Callback()
        self._precision.on_train_begin(logs)
        self._is_in_training = True

    def on_train_batch_begin(self, batch, logs=None):
        # Methods of this very object, which may be a copy of another.
        self._kept.attach(self._trained, batch, self._run_step, self._leave)

    def on_train_end(self, logs=None):
        self._leave()
        self._precision.on_train_end(logs)

    def on_test_end(self, logs=None):
        self._precision.on_test_end(logs)
        if not self._is_in_training:
            self._leave()

    def on_predict_end(self, logs=None):
        self._precision.on_predict_end(logs)
        if not self._is_in_training:
            self._leave()

    def on_epoch_begin(self, epoch, logs=None):
        self._epoch = epoch
        self._precision.on_epoch_begin(epoch, logs)

    def on_epoch_end(self, epoch, logs=None):
        self._precision.on_epoch_end(epoch, logs)

    def _warn(self, key, step: int, message: str, first: int | None = None):
        """Warns of a skipped step, once for each `key`; of one from `first` to `step`, where it is not known which."""
        which = f"Step {step}" if first in (None, step) else f"A step from {first} to {step}"
        self._warn_once(key, f"{which} of epoch {self._epoch + 1} was skipped{message}".strip())

    def _warn_once(self, key, message: str):
        """Warns once for each `key`."""
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(message, stacklevel=4)


@dataclasses.dataclass(frozen=True)
class Execution:
    """One call of a train function.

    Attributes:
        step: Of its last batch in the epoch, counted from 0.
        logs: The logs that it returned, as tensors that may still be computed.
        read: Returns the batches.
    """

    step: int
    logs: dict
    read: Callable[[], list]

    @functools.cached_property
    def batches(self) -> list:
        """The batches that it trained on; empty under a `tf.distribute` strategy with several replicas."""
        return self.read()

    @property
    def first(self) -> int:
        """The step of its first batch: another one than `step` with `steps_per_execution`."""
        return self.step + 1 - max(len(self.batches), 1)


class KeptBatches:
    """Keeps what `fit` trains on, a few executions long: references, no copies.

    `fit` asks `model.train_function` anew on every step; there a function stands that reads ahead the batches of one
    execution and hands them on. It does so once for each call of `attach`. An execution without one is not of
    this training: a callback trains on something else, or an exception has ended the `fit`.

    Args:
        name: Of the attribute that holds the function: `"train_function"`, or `"test_function"` of a validation.

    Attributes:
        executions: The ones that nobody has taken from here yet, the oldest first; no more than two.
    """

    def __init__(self, name: str = "train_function"):
        self._name = name
        self.executions: collections.deque[Execution] = collections.deque(maxlen=2)
        self._run_step: Callable | None = None
        self._leave: Callable | None = None
        # The step with which the next execution begins; `None` where nobody has announced one.
        self._begin: int | None = None

    def attach(self, model, begin: int, run_step: Callable | None = None, leave: Callable | None = None):
        """Stands in front of the train function that `model` has now, whose next step is `begin`.

        Args:
            run_step: Where given, the steps of an execution run one by one, each by this function, which returns what
                the step returns. It is given a function that runs the step; the number of the step; the batch; and, on
                JAX, the state that the step is to be given.
            leave: Called where the function is found to have stayed there after its training.
        """
        self._begin, self._run_step, self._leave = begin, run_step, leave
        function = getattr(model, self._name)
        attached = [below.mpkeras_kept_batches for below in _attached(function)]
        if function is None or self in attached:
            return
        steps = model.steps_per_execution
        backend = keras.backend.backend()

        one_by_one = any(other._run_step is not None for other in (self, *attached))
        runs_several = backend == "tensorflow" and steps > 1 and not model.run_eagerly and not one_by_one

        # Of the function that is there now: what is traced holds the one that it was made of.
        @functools.lru_cache(1)
        def several_of(function):
            return importlib.import_module("mpkeras.tools.shared._tensorflow").SeveralSteps(function, steps)

        @functools.wraps(function)
        def train_function(*args):
            function = vars(train_function)["mpkeras_own_function"]
            begin, self._begin = self._begin, None
            if begin is None:
                if self._leave is not None and not ModelInFit(model).is_in_fit:
                    self._leave()
                return function(*args)
            *state, data = args
            batches: list = []
            # What a `tf.distribute` strategy hands on stays where it is.
            is_read_by_next = not type(data).__name__.startswith("Distributed")
            # Another `KeptBatches` in front of this one has read them already: Keras would call a graph for each.
            is_of_python = type(data).__name__ == "list_iterator"
            if backend == "torch":
                # A list of one batch, already read.
                batches = list(data)
            elif runs_several and is_read_by_next and not is_of_python and not ModelInFit.takes_batches_again(function):
                logs, number, read = several_of(function)(data)
                self._add(begin + number - 1, logs, read)
                return logs
            elif is_read_by_next:
                batches = list(itertools.islice(data, steps))
                if not batches:
                    # As Keras' own functions do at the end of the data.
                    raise StopIteration
                data = iter(batches)
            keeping = [self]
            if self._run_step is not None and batches:
                # The functions behind this one keep nothing of single steps: to them each would be an execution.
                keeping += [below.mpkeras_kept_batches for below in _attached(function)]
                for kept in keeping:
                    kept._begin = None
                result = self._one_by_one(self._run_step, function, begin, state, batches)
            else:
                result = function(*state, data)
            # On JAX the new state comes back, too.
            logs = result[0] if isinstance(result, tuple) else result
            for kept in keeping:
                kept._add(begin + max(len(batches), 1) - 1, logs, lambda: batches)
            return result

        vars(train_function).update(mpkeras_kept_batches=self, mpkeras_own_function=function)
        setattr(model, self._name, train_function)

    def _one_by_one(self, run_step, function, begin, state, batches):
        for i, batch in enumerate(batches):

            def run(*state, batch=batch):
                # On torch a list of one batch, as Keras hands it over.
                return function(*state, [batch] if keras.backend.backend() == "torch" else iter([batch]))

            result = run_step(run, begin + i, batch, *state)
            state = list(result[1:]) if isinstance(result, tuple) else state
        return result

    def _add(self, step: int, logs, read):
        self.executions.append(Execution(step, logs, read))

    def detach(self, model):
        """Takes this one away from in front of the model's train function, and forgets the batches."""
        functions = _attached(getattr(model, self._name))
        for front, function in zip((None, *functions), functions, strict=False):
            if function.mpkeras_kept_batches is self:
                if front is None:
                    setattr(model, self._name, function.mpkeras_own_function)
                else:
                    vars(front)["mpkeras_own_function"] = function.mpkeras_own_function
        self.executions.clear()


def trace_again(model):
    """Lets the next step of a guarded model be traced anew; whoever keeps its batches goes on doing so."""
    functions = _attached(model.train_function)
    ModelInFit(model).trace_again()
    if functions:
        vars(functions[-1])["mpkeras_own_function"] = model.train_function
        model.train_function = functions[0]


def _attached(function) -> list:
    """Returns the functions of `KeptBatches` that stand in front of a train function, the outermost first."""
    functions = []
    while hasattr(function, "mpkeras_kept_batches"):
        functions.append(function)
        function = function.mpkeras_own_function
    return functions
