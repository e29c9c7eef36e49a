"""`decide`: which of the measured cells to choose, by how much it is faster, and how sure that is."""

import dataclasses
import statistics

from mpkeras.insight.report import quartiles
from mpkeras.insight.timing import Cell

# A 16-bit policy has to be so many times as fast as float32 to be worth it: 4 %, as the choice is to be within 5 % of
# the best cell, and what is measured has an error.
WORTH = 1.04
# Or to need so much less memory, at nearly the speed of float32.
MEMORY_WORTH = 0.2
_NEARLY = 0.97
# Of two cells as near as this the one is chosen that asks for less: the present `jit_compile`, no loss scaling.
_TIE = 1.02


@dataclasses.dataclass
class Decision:
    """The cell to choose and the numbers behind it.

    Attributes:
        chosen: The `Cell`.
        reference: The fastest float32 cell; `None` if none was measured.
        rival: The fastest cell beside `chosen`; `None` if there is none.
        best_16_bit: The fastest 16-bit cell; `None` if none was measured.
        speedup: How many times as fast as `reference` the best 16-bit cell is: `(q1, median, q3)` over the rounds,
            or `None`.
        memory_saving: Share of the memory of `reference` that it saves, or `None` if not measured.
        bother: Whether a 16-bit policy is chosen.
        because: `"speed"`, `"memory"` or `"none"`.
        agreeing: Share of the rounds that agree, between 0 and 1: of those in which the 16-bit cell was faster than
            float32, if it is chosen for speed; otherwise of those in which it was no more than `WORTH` times as fast.
        rounds: Number of rounds that compare the two.
    """

    chosen: Cell
    reference: Cell | None
    rival: Cell | None
    best_16_bit: Cell | None
    speedup: tuple | None
    memory_saving: float | None
    bother: bool
    because: str
    agreeing: float
    rounds: int

    def sureness(self) -> str:
        """Returns `"sure"`, `"fairly sure"` or `"not sure"`."""
        if self.reference is None or self.best_16_bit is None:
            return "sure"  # nothing to compare
        if self.rounds >= 5 and self.agreeing >= 0.95:
            return "sure"
        return "fairly sure" if self.rounds >= 3 and self.agreeing >= 0.75 else "not sure"


def decide(cells, present_jit: bool, memory_counts: bool = True) -> Decision | None:
    """Returns the `Decision` over the measured among `cells`; `None` if there are none."""
    measured = [cell for cell in cells if cell.is_measured]
    if not measured:
        return None
    reference = _fastest([cell for cell in measured if cell.policy == "float32"], present_jit)
    best = _fastest([cell for cell in measured if cell.policy != "float32"], present_jit)
    speedup, saving, agreeing, rounds, because = None, None, 1.0, 0, "none"
    if reference is None:
        because = "speed"
    elif best is not None:
        ratios = paired_ratios(reference, best)
        rounds, speedup = len(ratios), quartiles(ratios)
        if memory_counts and reference.memory_bytes and best.memory_bytes is not None:
            saving = (reference.memory_bytes - best.memory_bytes) / reference.memory_bytes
        if speedup[1] >= WORTH:
            because = "speed"
        elif saving is not None and saving >= MEMORY_WORTH and speedup[1] >= _NEARLY:
            because = "memory"
        if because == "speed":
            agreeing = _share(ratio > 1.0 for ratio in ratios)
        elif because == "memory":
            agreeing = _share(ratio >= _NEARLY for ratio in ratios)
        else:
            agreeing = _share(ratio < WORTH for ratio in ratios)
    chosen = reference if because == "none" else best
    rival = min((cell for cell in measured if cell is not chosen), key=lambda cell: cell.median_ms, default=None)
    return Decision(chosen, reference, rival, best, speedup, saving, because != "none", because, agreeing, rounds)


def paired_ratios(of, to) -> list:
    """Returns the ratio of the times of two cells in each of the rounds that both took part in."""
    return [first / second for first, second in zip(of.times_ms, to.times_ms, strict=False)]


def rounds_won(cell, against) -> tuple:
    """Returns `(rounds in which cell was faster, rounds)`."""
    ratios = paired_ratios(against, cell)
    return sum(ratio > 1.0 for ratio in ratios), len(ratios)


def _fastest(cells, present_jit: bool):
    if not cells:
        return None
    fastest = min(cells, key=lambda cell: cell.median_ms)
    near = [cell for cell in cells if statistics.median(paired_ratios(cell, fastest)) <= _TIE]
    return min(near, key=lambda cell: (cell.jit_compile != present_jit, cell.policy == "mixed_float16", cell.median_ms))


def _share(flags) -> float:
    flags = list(flags)
    return sum(flags) / len(flags)
