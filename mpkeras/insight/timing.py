"""Timing in turns, so that a machine that is slow for a moment slows everything that is compared."""

import dataclasses
import math
import random
import re
import statistics
import time
from collections.abc import Callable, Sequence

from mpkeras.insight.report import shortened

ROUNDS = 60
# Compiling leaves time for so many rounds of the cells that are ready, or this share of the budget if that is less.
_ROUNDS_KEPT = 20
_SHARE_KEPT = 0.4
# A setting of `jit_compile` that no cell has tried may take so many times as long to prepare as the slowest so far:
# JAX op by op compiles each operation on its own.
_UNTRIED = 2.0
# Cells so many times slower than the fastest are no longer timed: after the first steps, after 3 and after 12 rounds.
_HOPELESS = {0: 10.0, 3: 3.0, 12: 1.5}
# One reading of the clock covers about this time, or noise of the timer and of thread wake-ups is what is compared.
_READING_MS = 20.0
_MOST_STEPS = 20
_RAISED_IN_CALL = re.compile(
    r"Exception encountered when calling ([\w.]+)\(\)\.\s*(.*?)\s*(?:Arguments received|$)", re.DOTALL
)


@dataclasses.dataclass
class Cell:
    """One setting and what was found about it.

    Attributes:
        policy: Name of a policy.
        jit_compile: Whether the step is compiled: by XLA, on torch by `torch.compile`.
        times_ms: Milliseconds a step, one for each round that the cell took part in; all begin with the first round.
        preparation_s: Seconds until the step was compiled and warm.
        failure: Why there are no times; `None` if there are.
        memory_bytes: What `Bench.memory` says, or `None`.
        error: The exception that the failure was.
    """

    policy: str
    jit_compile: bool
    times_ms: list = dataclasses.field(default_factory=list)
    preparation_s: float = 0.0
    failure: str | None = None
    memory_bytes: int | None = None
    error: Exception | None = None

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
    progress: Callable[[int, int], None] = lambda done, total: None,
):
    """Fills in the times of `cells`, the most important first: a budget may end before the last.

    The first is always begun. A step that is being compiled cannot be interrupted, so that `budget_s` and one
    compilation may pass. `bench.begin(cell)` makes the cell's step, warms it up and returns the milliseconds of a warm
    one; `bench.measure(cell, steps)` returns the mean milliseconds of so many steps in a row.
    """
    started = clock()

    def elapsed():
        return clock() - started

    first_ms: dict = {}
    for i, cell in enumerate(cells):
        kept_s = min(_SHARE_KEPT * budget_s, _rounds_s(first_ms))
        cell.failure = _reason_to_leave_out(cell, cells[:i], first_ms, budget_s - elapsed() - kept_s)
        if cell.failure is None:
            begun = clock()
            try:
                first_ms[i] = bench.begin(cell)
            except NotTrainable as reason:
                cell.failure = str(reason)
            except Exception as error:  # of any layer, loss or compiler
                cell.error = error
                cell.failure = shortened(f"raises: {type(error).__name__}: {_innermost(str(error))}", 90)
            cell.preparation_s = clock() - begun
        progress(i + 1, len(cells) + rounds)
    if first_ms:
        _rounds(cells, bench, first_ms, rounds, budget_s, elapsed, progress)
    progress(len(cells) + rounds, len(cells) + rounds)


def _reason_to_leave_out(cell, earlier, first_ms, left_s: float) -> str | None:
    if not first_ms:
        return None
    alike = [i for i in first_ms if earlier[i].jit_compile == cell.jit_compile]
    if alike:
        # The last one: the very first also pays for what the backend makes once.
        expected_s = earlier[alike[-1]].preparation_s
    else:
        expected_s = _UNTRIED * max(earlier[i].preparation_s for i in first_ms)
    if expected_s > left_s:
        return "not measured: time"
    if alike:
        slowness = min(first_ms[i] for i in alike) / min(first_ms.values())
        if slowness > _HOPELESS[0]:
            return f"not measured: {slowness:.0f} times slower in {earlier[alike[0]].policy}"
    return None


def _innermost(message: str) -> str:
    """Returns the message of the layer that raised, without the text that Keras and TensorFlow put around it."""
    message = re.sub("\x1b\\[[0-9]*m", "", message)
    found = _RAISED_IN_CALL.findall(message)
    if found:
        return ": ".join(found[-1])
    return message.rpartition("\n\n    ")[2] if message.startswith("in user code:") else message


def _rounds_s(first_ms) -> float:
    """Returns about how many seconds the rounds take for which time is kept."""
    if not first_ms:
        return 0.0
    near = [ms for ms in first_ms.values() if ms <= _HOPELESS[3] * min(first_ms.values())]
    return 1e-3 * _ROUNDS_KEPT * _steps(first_ms) * sum(near)


def _steps(first_ms) -> int:
    """Returns how many steps one reading of the clock covers."""
    return max(1, min(_MOST_STEPS, math.ceil(_READING_MS / max(min(first_ms.values()), 1e-3))))


def _rounds(cells, bench, first_ms, rounds, budget_s, elapsed, progress):
    fastest = min(first_ms.values())
    steps = _steps(first_ms)
    live = []
    for i, milliseconds in first_ms.items():
        if milliseconds > _HOPELESS[0] * fastest:
            cells[i].times_ms.append(milliseconds)
        else:
            live.append(cells[i])
    orders: list = []
    last_s = 0.0
    for number in range(rounds):
        if number and elapsed() + last_s > budget_s:
            break
        begun = elapsed()
        orders = orders or orders_in_turn(live, rounds - number, seed=number)
        for cell in orders.pop(0):
            cell.times_ms.append(bench.measure(cell, steps))
        last_s = elapsed() - begun
        limit = _HOPELESS.get(number + 1)
        if limit is not None:
            fastest = min(cell.median_ms for cell in live)
            live = [cell for cell in live if cell.median_ms <= limit * fastest]
            orders = []
        progress(len(cells) + number + 1, len(cells) + rounds)


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
