"""What of the demo is run: what one step of each policy took says how long all of it would."""

import dataclasses
import math

# Of the time of a training step, for as many held-out examples: one pass forward instead of one there and one back.
_FORWARD = 1 / 3


@dataclasses.dataclass(frozen=True)
class FirstSteps:
    """What the first two training steps of a model took, in seconds: one with compiling, one without."""

    compile_s: float
    step_s: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much of a task is run under one policy.

    Attributes:
        asked_seeds: Runs that were asked for.
        seeds: Runs that there will be; 0 leaves the policy out.
        run_s: Seconds that one of them is estimated to take; `None` where nothing could be timed.
        step_ms: Milliseconds of the step that this rests on; `None` likewise.
        limit_s: Seconds that all runs may take.
    """

    asked_seeds: int
    seeds: int
    run_s: float | None = None
    step_ms: float | None = None
    limit_s: float | None = None

    @property
    def shortened(self) -> str | None:
        """Why there are fewer runs than were asked for, in words; `None` if there are not."""
        if self.run_s is None or self.seeds == self.asked_seeds:
            return None
        asked_s = self.asked_seeds * self.run_s
        runs = counted(self.asked_seeds)
        left = "left out" if not self.seeds else f"{self.seeds} of {self.asked_seeds} runs"
        return (
            f"{left}: at {self.step_ms:.0f} ms a step {runs} would take about {duration(asked_s)}. "
            f"`--minutes {math.ceil(asked_s / 60)}` runs all."
        )

    def to_dict(self) -> dict:
        """Returns what JSON can hold, the reason included."""
        return {**dataclasses.asdict(self), "shortened": self.shortened}


def estimated_run_s(first: FirstSteps, steps: int, batch_size: int, held_out_examples: int) -> float:
    """Returns the seconds of one run: compiling, training, and looking at the held-out data.

    Args:
        first: What the first steps took.
        steps: Optimizer steps of a run.
        batch_size: Examples a step.
        held_out_examples: Examples of the held-out data that are looked at in a run, all epochs together.
    """
    return first.compile_s + first.step_s * (steps + _FORWARD * held_out_examples / batch_size)


def plan_case(seeds: int, run_s: float | None, step_s: float | None, limit_s: float, *, is_baseline: bool) -> Plan:
    """Returns as many runs as fit into the limit. The baseline is run at least once: all else is measured against it.

    Args:
        seeds: Runs that were asked for.
        run_s, step_s: Seconds of a run and of a step, estimated; `None` where nothing could be timed, which leaves the
            plan as it was asked for.
        limit_s: Seconds that all runs of this policy on this task may take.
        is_baseline: Whether it is the policy that the others are measured against.
    """
    if run_s is None or step_s is None:
        return Plan(seeds, seeds)
    fitting = min(seeds, int(limit_s // run_s)) if run_s > 0 else seeds
    return Plan(seeds, max(fitting, 1) if is_baseline else fitting, run_s, 1e3 * step_s, limit_s)


def rounds_within(step_times_s, limit_s: float, rounds: int) -> int:
    """Returns how many rounds, of one step each, fit into the limit: `rounds` at most, 3 at least.

    Args:
        step_times_s: Seconds of a step of each model.
        limit_s: Seconds for all rounds.
        rounds: As many as one would like.
    """
    one_round_s = sum(step_times_s)
    return max(3, min(rounds, int(limit_s // one_round_s))) if one_round_s > 0 else rounds


def counted(runs: int) -> str:
    """Returns a number of runs in words."""
    return "1 run" if runs == 1 else f"{runs} runs"


def duration(seconds: float) -> str:
    """Returns seconds in words: "40 s" up to a minute and a half, minutes beyond it."""
    return f"{max(seconds, 1):.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"
