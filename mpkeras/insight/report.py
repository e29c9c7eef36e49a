"""What all reports have in common: a table as text, the same as a dictionary, and a figure."""

import abc
import io


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

    #: What the table is about, in one line.
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
    def plot(self):
        """Returns a `matplotlib.figure.Figure`."""

    def __str__(self) -> str:
        header, rows = self.table()
        try:
            text = self.title if not rows else rich_text(header, rows, self.title)
        except ImportError:
            text = plain_text(header, rows, self.title, left_columns=len(header))
        return "\n".join([text, "", *self.notes()]).rstrip()


def rich_text(header: list, rows: list, title: str) -> str:
    """Returns the table as rich draws it, as wide as its cells. Raises `ImportError` without rich."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(*header, box=box.SIMPLE_HEAD, header_style="", pad_edge=False)
    for row in rows:
        table.add_row(*row)
    cells = [header, *rows]
    width = sum(max(len(row[i]) for row in cells) + 3 for i in range(len(header)))
    # In a notebook rich would show the table by itself, wherever the text goes.
    console = Console(file=io.StringIO(), width=width, force_jupyter=False)
    console.print(table, markup=False)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    return "\n".join([title, *lines]).rstrip()


def plain_text(header: list, rows: list, title: str, left_columns: int) -> str:
    """Returns the table in aligned columns under a title; the first `left_columns` to the left, numbers right."""
    widths = [max(len(cells[i]) for cells in [header, *rows]) for i in range(len(header))]

    def aligned(cells):
        padded = [
            cell.ljust(width) if i < left_columns else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([title, "", aligned(header), rule, *(aligned(cells) for cells in rows)])
