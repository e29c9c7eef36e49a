"""`Report`, and its parts: text for tables, bytes, shares and messages, quartiles, and a figure."""

import abc
import statistics
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import matplotlib.figure

# What `plot` returns. As text: matplotlib is imported where something is drawn, and need not be installed.
Figure: TypeAlias = "matplotlib.figure.Figure"


class Report(abc.ABC):
    """A finding that prints as a table, converts to JSON and draws itself.

    A subclass implements `title`, `table`, `notes`, `to_dict` and `plot`.

    Example:

    >>> import json
    >>> report = mpkeras.hardware()
    >>> header, rows = report.table()
    >>> len(rows[0]) == len(header)
    True
    >>> print(report.notes()[0])
    mixed_auto is ... on the ... backend: ...
    >>> text = json.dumps(report.to_dict())
    >>> report.plot().savefig("report.png")
    """

    #: The subject of the table, in one line.
    title: str = ""

    @abc.abstractmethod
    def table(self) -> tuple[list, list]:
        """Returns `(header, rows)`: strings, and one list of strings for each row."""

    def notes(self) -> list:
        """Returns the lines under the table."""
        return []

    @abc.abstractmethod
    def to_dict(self) -> dict:
        """Returns all of it as what JSON can hold."""

    @abc.abstractmethod
    def plot(self) -> Figure:
        """Returns a `matplotlib.figure.Figure`."""

    def __str__(self) -> str:
        header, rows = self.table()
        text = text_table(header, rows, self.title) if rows else self.title
        return "\n".join([text, "", *self.notes()]).rstrip()


def text_table(header: list, rows: list, title: str, left_columns: int | None = None) -> str:
    """Returns a title and a table in aligned columns: the first `left_columns` (or all) to the left, the others right.

    A heading may have several lines.
    """
    headings = [name.split("\n") for name in header]
    depth = max(map(len, headings))
    above = [[lines[i] if i < len(lines) else "" for lines in headings] for i in range(depth)]
    widths = [max(len(cells[i]) for cells in [*above, *rows]) for i in range(len(header))]

    def aligned(cells):
        padded = [
            cell.ljust(width) if left_columns is None or i < left_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    rule = "  ".join("─" * width for width in widths)
    return "\n".join([title, "", *map(aligned, above), rule, *map(aligned, rows)])


def percent(share: float) -> str:
    """Returns a share of 1 in percent, with one decimal place below 10; 0 and 100 only where it is all or nothing."""
    value = 100 * share
    if 0 < value < 0.1:
        return "< 0.1 %"
    if 99.5 <= value < 100:
        return "> 99 %"
    return f"{value:.1f} %" if value < 10 else f"{value:.0f} %"


def decimals(value: float) -> str:
    """Returns a number with two decimal places, and below 0.1 with two significant digits: only 0 is shown as 0."""
    return f"{value:.2f}" if value >= 0.1 or not value else f"{value:#.2g}"


def bytes_text(n: int) -> str:
    """Returns a number of bytes in the unit that suits it, MiB at most."""
    if n < 2**10:
        return f"{n} bytes"
    return f"{n / 2**20:.1f} MiB" if n >= 2**20 else f"{n / 2**10:.1f} KiB"


def shortened(message: str, length: int = 300) -> str:
    """Returns `message` in one line of at most `length` characters."""
    line = " ".join(message.split())
    return line if len(line) <= length else line[: length - 3] + "..."


def listed(names) -> str:
    """Returns the first four of `names`, and how many more there are."""
    names = list(names)
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def computed_again_text(parts: list) -> list:
    """Returns a line that says what the backward pass computes again; none where `parts` is empty.

    `parts` has the paths of the first and the last layer of each.
    """
    if not parts:
        return []
    names = (first if first == last else f"{first} to {last}" for first, last in parts)
    return [f"Computed again in the backward pass: {len(parts)} part{'s' * (len(parts) > 1)}: {listed(names)}."]


def float8_text(reasons: list) -> list:
    """Returns lines that say which layers multiply in float8, and why the others do not.

    `reasons` has `(path, reason)` for each layer with a product that might be in float8; `None` where it is.
    """
    others: dict = {}
    for path, reason in reasons:
        if reason is not None:
            others.setdefault(reason, []).append(path)
    n = sum(reason is None for _, reason in reasons)
    lines = [f"Products in float8: those of {n} of {len(reasons)} layers."]
    return lines + [f"    not {listed(paths)}: {reason}" for reason, paths in others.items()]


def quartiles(values) -> tuple:
    """Returns `(q1, median, q3)`."""
    if len(values) == 1:
        return (values[0],) * 3
    return tuple(statistics.quantiles(values, n=4, method="inclusive"))


def make_figure(**options) -> Figure:
    """Returns a `matplotlib.figure.Figure`, not pyplot's: no window opens, and no setting of the user's changes."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "Expected matplotlib, which draws figures. Received: none that is installed. Run `pip install matplotlib`.",
            name="matplotlib",
        ) from error
    return Figure(layout="constrained", **options)
