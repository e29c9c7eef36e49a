"""`replayed`: what `mpkeras replay` says of the step in a capsule."""

import dataclasses
import math

from mpkeras.insight.capsule import load_capsule
from mpkeras.insight.comparison import Comparison
from mpkeras.insight.origins import Operation


@dataclasses.dataclass(frozen=True)
class Replay:
    """What was found in one step; the fields are those of `Capsule`, of what its methods return, and of its file."""

    file: str
    model: str
    step: int
    epoch: int | None
    is_exact: bool
    loss_scale_before: float
    run: dict
    layer: str | None
    operation: Operation | None
    remedy: str
    comparison: Comparison | None = None

    def __str__(self) -> str:
        when = f"Step {self.step}" + ("" if self.epoch is None else f" of epoch {self.epoch + 1}")
        lines = [f"{when} of '{self.model}' was {'skipped' if self.run['skipped'] else 'not skipped this time'}."]
        loss = f"{self.run['loss']:.6g}" if math.isfinite(self.run["loss"]) else "not finite"
        lines.append(f"Loss {loss}, loss scale {self.loss_scale_before:g}, after it {self.run['loss_scale']:g}.")
        lines.append(self._bits())
        if self.layer is not None:
            lines.append(f"First layer: {self.layer}.")
        lines.append(f"First operation: {self._operation()}.")
        lines.append(f"What to do: {self.remedy}")
        return "\n".join([*lines, *([] if self.comparison is None else ["", str(self.comparison)])])

    def _bits(self) -> str:
        if self.run["same_bits"]:
            return "The same bits as when it happened."
        versions = ", ".join(f"{name} {then} then, {now} now" for name, (then, now) in self.run["versions"].items())
        why = f"different versions: {versions}" if versions else "the versions are the same"
        if not self.is_exact:
            why = "the step moved weights all the same, and the file has them after it"
        names = ", ".join(self.run["different"][:3])
        return f"Not the same bits as when it happened ({len(self.run['different'])} values: {names}): {why}."

    def _operation(self) -> str:
        found = self.operation
        if found is None:
            return "none, op by op everything is finite"
        if found.name is None:
            return f"none before the {found.side}: '{found.where}' {found.message}"
        place = f" in layer '{found.where}'" if found.where else ""
        line = f", {found.line}" if found.line else ""
        return f"'{found.name}', {found.side}{place}{line}: {found.message}"

    def to_dict(self) -> dict:
        content = dataclasses.asdict(dataclasses.replace(self, comparison=None))
        content["comparison"] = None if self.comparison is None else self.comparison.to_dict()
        if not math.isfinite(self.run["loss"]):
            content["run"]["loss"] = str(self.run["loss"])  # JSON has no word for inf and NaN.
        return content


def replayed(path, custom_objects=None, *, safe_mode: bool = True, compare: bool = False) -> Replay:
    """Runs the step in a capsule again and returns what there is to say of it; the arguments are `load_capsule`'s."""
    capsule = load_capsule(path, custom_objects=custom_objects, safe_mode=safe_mode)
    run = capsule.run()
    operation = capsule.first_operation()
    report = capsule.trace()
    return Replay(
        str(path),
        capsule.model.name,
        capsule.step,
        capsule.epoch,
        capsule.is_exact,
        capsule.loss_scale,
        run,
        None if report.culprit is None else report.culprit.message,
        operation,
        capsule.remedy(operation, report),
        capsule.compare() if compare else None,
    )
