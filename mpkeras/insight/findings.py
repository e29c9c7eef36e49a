"""What an audit finds: how bad it is, where, what, and what helps."""

import dataclasses

SEVERITIES = ("error", "warning", "note")
_NAMES_SHOWN = 4


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that an audit found.

    Args:
        severity: `"error"`: training goes wrong. `"warning"`: it may, or speed is lost. `"note"`: good to know.
        layer: Path of the layer, or `None` where it is about the model or the machine.
        what: A sentence, with the numbers.
        remedy: A sentence.
    """

    severity: str
    layer: str | None
    what: str
    remedy: str

    def __str__(self) -> str:
        where = "" if self.layer is None else f"{self.layer}: "
        return f"{self.severity}: {where}{self.what} {self.remedy}"


def in_order(findings) -> list:
    """Returns the findings, the worst first."""
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def listed(names) -> str:
    """Returns the first names, and how many more there are."""
    names = list(names)
    more = len(names) - _NAMES_SHOWN
    return ", ".join(names[:_NAMES_SHOWN]) + (f" and {more} more" if more > 0 else "")
