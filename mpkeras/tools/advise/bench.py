"""Times the training steps of one model in several settings, in turn; the model stays as it was."""

import contextlib
import dataclasses
import math
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence

import keras

from mpkeras.policies.registry import get_policy
from mpkeras.seams import ModelView, all_generators_put_back, devices, dtypes, layer_converter, number, recorded
from mpkeras.tools.shared.report import shortened
from mpkeras.training.state import load_state_dict, state_dict
from mpkeras.training.step import make_train_step

ROUNDS = 60
# Compiling leaves time for so many rounds of the cells that are ready, or this share of the budget if that is less.
_ROUNDS_KEPT = 20
_SHARE_KEPT = 0.4
# A setting of `jit_compile` that no cell has tried may take so many times as long to prepare as the slowest so far:
# JAX op by op compiles each operation on its own.
_UNTRIED = 2.0
#: Of a cell that the budget left no time for.
NO_TIME = "not measured: time"
# Cells so many times slower than the fastest are no longer timed: after the first steps, after 3 and after 12 rounds.
_HOPELESS = {0: 10.0, 3: 3.0, 12: 1.5}
# A reading of the clock covers about this time: in a shorter one, noise of timer and thread wake-ups would be compared.
_READING_MS = 20.0
_MOST_STEPS = 20
_RAISED_IN_CALL = re.compile(
    r"Exception encountered when calling ([\w.]+)\(\)\.\s*(.*?)\s*(?:Arguments received|$)", re.DOTALL
)
# What Keras puts before what a layer raised that it ran for the shapes of a graph.
_WHILE_SYMBOLIC = "Error encountered:"
# float16 begins at a loss scale of 2^15: so many steps are skipped at most until it is down at 1.
_WARM_UP_STEPS = 16
TEMPORARY = "XLA's temporary buffers of the compiled step, beside weights, optimizer and batch"
PEAK = "the device memory that a step takes at its peak, beside what is held between steps"
#: An estimate compares policies; it decides nothing.
ESTIMATE = "an estimate: the layers' outputs for this batch, in the dtypes they compute in"


@dataclasses.dataclass
class Cell:
    """One setting and what was found about it."""

    policy: str
    jit_compile: bool  # by XLA, on torch by `torch.compile`
    # One for each round that the cell took part in; all begin with the first round.
    times_ms: list = dataclasses.field(default_factory=list)
    first_ms: float = math.inf  # of a warm step
    preparation_s: float = 0.0  # until the step was compiled and warm
    failure: str | None = None  # why there are no times
    memory_bytes: int | None = None
    error: Exception | None = None  # that the failure was

    @property
    def name(self) -> str:
        return f"{self.policy}, jit_compile={self.jit_compile}"

    @property
    def is_measured(self) -> bool:
        return bool(self.times_ms)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_ms)


class NotTrainable(Exception):
    """A cell whose step runs and does not train; the message says why."""


def measure_grid(
    cells,
    bench,
    *,
    budget_s: float,
    rounds: int = ROUNDS,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int], None] = lambda done: None,
):
    """Fills in the times of `cells`, the most important first: a budget may end before the last.

    The first is always begun. A step that is being compiled cannot be interrupted, so that `budget_s` and one
    compilation may pass. `bench.begin(cell)` makes the cell's step, warms it up and returns the milliseconds of a warm
    one; `bench.measure(cell, steps)` returns the mean milliseconds of so many steps in a row. `progress` is told how
    many of the cells and rounds are done.
    """
    started = clock()

    def left_s():
        return budget_s - (clock() - started)

    ready: list = []
    for i, cell in enumerate(cells):
        kept_s = min(_SHARE_KEPT * budget_s, _rounds_s(ready))
        cell.failure = _reason_to_leave_out(cell, ready, left_s() - kept_s)
        if cell.failure is None:
            begun = clock()
            try:
                cell.first_ms = bench.begin(cell)
                ready.append(cell)
            except NotTrainable as reason:
                cell.failure = str(reason)
            except Exception as error:  # of any layer, loss or compiler
                cell.error = error
                cell.failure = shortened(failure_text(error), 90)
            cell.preparation_s = clock() - begun
        progress(i + 1)
    if ready:
        _rounds(ready, bench, rounds, left_s, lambda done: progress(len(cells) + done))
    progress(len(cells) + rounds)


def _reason_to_leave_out(cell, ready, left_s: float) -> str | None:
    if not ready:
        return None
    alike = [other for other in ready if other.jit_compile == cell.jit_compile]
    if not alike:
        return NO_TIME if _UNTRIED * max(other.preparation_s for other in ready) > left_s else None
    # The last one: the very first also pays for what the backend makes once.
    if alike[-1].preparation_s > left_s:
        return NO_TIME
    slowness = _fastest_ms(alike) / _fastest_ms(ready)
    return f"not measured: {slowness:.0f} times slower in {alike[0].policy}" if slowness > _HOPELESS[0] else None


def failure_text(error: Exception) -> str:
    """Returns in words that a step raises `error`, with its whole message."""
    return f"raises: {type(error).__name__}: {_innermost(str(error))}"


def _innermost(message: str) -> str:
    """Returns the message of the layer that raised, without the text that Keras and TensorFlow put around it."""
    message = re.sub("\x1b\\[[0-9]*m", "", message)
    errors = _RAISED_IN_CALL.findall(message)
    if errors:
        return ": ".join(errors[-1])
    if _WHILE_SYMBOLIC in message:
        return message.rpartition(_WHILE_SYMBOLIC)[2]
    return message.rpartition("\n\n    ")[2] if message.startswith("in user code:") else message


def _fastest_ms(ready) -> float:
    return min(cell.first_ms for cell in ready)


def _rounds_s(ready) -> float:
    """Returns about how many seconds the rounds take for which time is kept."""
    if not ready:
        return 0.0
    near = [cell.first_ms for cell in ready if cell.first_ms <= _HOPELESS[3] * _fastest_ms(ready)]
    return 1e-3 * _ROUNDS_KEPT * _steps(ready) * sum(near)


def _steps(ready) -> int:
    """Returns how many steps one reading of the clock covers."""
    return max(1, min(_MOST_STEPS, math.ceil(_READING_MS / max(_fastest_ms(ready), 1e-3))))


def _rounds(ready, bench, rounds, left_s, progress):
    steps = _steps(ready)
    limit = _HOPELESS[0] * _fastest_ms(ready)
    live = [cell for cell in ready if cell.first_ms <= limit]
    for cell in ready:
        if cell.first_ms > limit:
            cell.times_ms.append(cell.first_ms)
    orders: list = []
    last_s = 0.0
    for done in range(rounds):
        if done:
            if last_s > left_s():
                break
            progress(done)
        before_s = left_s()
        orders = orders or orders_in_turn(live, rounds - done, seed=done)
        for cell in orders.pop(0):
            cell.times_ms.append(bench.measure(cell, steps))
        last_s = before_s - left_s()
        if done + 1 in _HOPELESS:
            limit = _HOPELESS[done + 1] * min(cell.median_ms for cell in live)
            live = [cell for cell in live if cell.median_ms <= limit]
            orders = []


def orders_in_turn(names: Sequence, rounds: int, seed: int = 0) -> list[list]:
    """Returns one order of `names` for each of `rounds` rounds.

    Every block of `len(names)` rounds holds the rotations of one random order, so that each name comes first, second,
    ... equally often: the first of a round may pay for what the last one left in the caches.
    """
    shuffle = random.Random(seed).shuffle
    orders: list = []
    while names and len(orders) < rounds:
        order = list(names)
        shuffle(order)
        orders += [order[start:] + order[:start] for start in range(len(order))]
    return orders[:rounds]


class Bench:
    """The steps of all cells, which train the same model in turn, on one batch.

    Weights and optimizer are shared, so that the grid needs the memory of one model and two optimizers (of float16,
    and of the others). Compiled steps keep the dtypes that they were compiled with; for those that run op by op the
    layers change between the readings of the clock.
    """

    def __init__(self, model, x, y, make_optimizer, loss_fn):
        self._model = model
        # Tensors of the backend: what is measured is the step, not the way of a batch to the device.
        self._batch = ModelView.tensors((x, y))
        self._make_optimizer, self._loss_fn = make_optimizer, loss_fn
        self._as_it_was = recorded(model)
        self._policies: dict = {None: self._as_it_was}
        self._policy: str | None = None
        self._optimizers, self._steps = {}, {}
        #: The kind of `memory_bytes` of the cells; `None` before the first.
        self.memory_kind: str | None = None

    def begin(self, cell) -> float:
        """Makes the step of `cell`, warms it up and returns the milliseconds of a warm one."""
        self._change_to(cell.policy)
        scales = ModelView(self._model).computes_in(("float16",))
        step = make_train_step(
            self._model,
            self._optimizers.get(scales) or self._make_optimizer(),
            self._loss_fn,
            jit_compile=cell.jit_compile,
        )
        result = step(*self._batch)
        # Behind the first step, which stores weights in the dtype of the policy: small ones are float32 from then on.
        self._policies.setdefault(cell.policy, recorded(self._model))
        self._optimizers[scales] = step.optimizer
        left = _WARM_UP_STEPS
        while bool(number(result["skipped"])):
            loss = float(number(result["loss"]))
            if not math.isfinite(loss):
                raise NotTrainable(f"loss not finite: {loss}")
            left -= 1
            if not left:
                raise NotTrainable("gradients not finite at every loss scale")
            result = self._run(step, 1)
        self._steps[cell.name] = step
        milliseconds = self.measure(cell, 1)
        peak, kind = self._memory(step)
        if peak is not None:
            self.memory_kind = self.memory_kind or kind
            # Bytes of another kind cannot be compared.
            cell.memory_bytes = peak if kind == self.memory_kind else None
        return milliseconds

    def _memory(self, step) -> tuple:
        """Returns `(bytes, what they are)` of a warm step; `None` bytes where compiler and device tell nothing."""
        peak = step.temporary_bytes(*self._batch)
        if peak is not None:
            return peak, TEMPORARY
        peak = devices.backend_module().peak_bytes_of(lambda: self._run(step, 1))
        if peak is not None:
            return peak, PEAK
        return estimated_output_bytes(self._model, self._batch[0]), ESTIMATE

    def measure(self, cell, steps: int) -> float:
        """Returns the mean milliseconds of `steps` steps in a row, the device waited for at the end."""
        step = self._steps[cell.name]
        backend = keras.backend.backend()
        # These steps read the layers' policies in every call, and not only in the first. One of TensorFlow is a graph
        # at least; what `torch.compile` made is chosen by the state of the layers, too.
        if backend == "torch" or (backend == "jax" and not cell.jit_compile):
            self._change_to(cell.policy)
        started = time.perf_counter()
        self._run(step, steps)
        return 1e3 * (time.perf_counter() - started) / steps

    def _run(self, step, steps: int) -> dict:
        for _ in range(steps):
            result = step.run_as_made(*self._batch)
        devices.backend_module().wait(self._model, result)
        return result

    def _change_to(self, policy: str):
        if policy == self._policy:
            return
        if policy in self._policies:
            self._policies[policy](refresh=False)
        else:
            # From what it was, not from another policy: which layers follow depends on their author's choice.
            self._as_it_was()
            layer_converter(self._model, get_policy(policy))()
        self._policy = policy


def estimated_output_bytes(model, x) -> int | None:
    """Returns the bytes that the layers of a Functional or Sequential model return; otherwise `None`."""
    graph = ModelView(model).graph
    if graph is None:
        return None
    rows = next((value.shape[0] for value in keras.tree.flatten(x) if len(value.shape)), 1)
    total = 0
    for operation in graph.operations:
        if isinstance(operation, keras.layers.InputLayer):
            continue
        compute_dtype = operation.compute_dtype if isinstance(operation, keras.layers.Layer) else "float32"
        for tensor in keras.tree.flatten(operation.output):
            if None in tensor.shape[1:]:
                return None
            dtype = compute_dtype if "float" in tensor.dtype else tensor.dtype
            total += rows * dtypes.bytes_of(tensor.shape[1:], dtype)
    return total


@contextlib.contextmanager
def trainable_copy(model, x):
    """Yields `(model to train, whether it is a copy)`; afterwards `model` is as it was before, bit for bit.

    A copy where Keras can make one: of Functional and Sequential models by `keras.models.clone_model`, of others by
    their `get_config`. Otherwise the model itself, and afterwards all its variables, random generators and dtype
    policies are put back. In both cases so are Python's, NumPy's, torch's and Keras' own random generators: layers
    that are made, and batches that are drawn, take numbers from them.
    """
    with all_generators_put_back(), ModelView(model).variable_scope():
        copy = _copy(model, x)
        if copy is not None:
            yield copy, True
            return
        if not ModelView(model).is_built:
            model(x)
        state = state_dict(model, optimizers=[])
        policies, grads = recorded(model), _torch_grads(model)
        try:
            yield model, False
        finally:
            policies()
            load_state_dict(model, state, optimizers=[])
            for tensor, grad in grads:
                tensor.grad = grad


def _copy(model, x):
    """Returns a model of the same configuration and weights, built; `None` where Keras can make none."""
    try:
        if ModelView(model).graph is not None or isinstance(model, keras.Sequential):
            copy = keras.models.clone_model(model)
        else:
            copy = type(model).from_config(model.get_config())
        if not ModelView(copy).is_built:
            copy(x)
        if ModelView(model).is_built:
            if _picture(copy) != _picture(model):
                return None  # The configuration did not say all.
            copy.set_weights(model.get_weights())
            # Not every configuration says how `prepare` or `apply_policy` changed the layers.
            recorded(model, on=copy)()
        return copy
    except Exception:  # What `get_config`, `from_config` and the layers of the user's own raise.
        return None


def _picture(model) -> tuple:
    weights = [(tuple(weight.shape), weight.dtype, weight.trainable) for weight in model.weights]
    return weights, [type(layer) for layer in ModelView(model).layers]


def _torch_grads(model) -> list:
    if keras.backend.backend() != "torch":
        return []
    return [(variable.value, variable.value.grad) for variable in model.trainable_variables]
