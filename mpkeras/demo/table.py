"""The demo's result as a table in text: with rich where it is installed, in aligned columns without it."""

import io
import textwrap

from mpkeras.insight.report import plain_text

_NOTES = (
    "Quality: at the end of training, mean ± standard deviation over the seeds. Step: median of {rounds} "
    "training steps, the policies in turn, after tracing and compiling. Speed: float32's step time / this "
    "one's. Skipped: steps left out because a gradient was not finite, in all seeds. Layer outputs: bytes "
    "that all layers return for one training batch, in the dtypes they really return."
)
_LEFT_OUT_NOTE = " Of what was left out: the second training step, the first one without compiling."
_XLA_NOTE = " XLA temporaries: what XLA reserves for the train step beside weights, optimizer state and batch."
_TEXT_COLUMNS = 2  # task and policy: to the left; numbers go to the right


def columns(rows: list) -> tuple:
    """Returns `(header, lines, footnotes)`: strings, and one list of cells for each row."""
    with_xla = any(row.get("xla_temporary_bytes") is not None for row in rows)
    header = ["Task", "Policy", "Quality", "Step ms", "Speed", "Skipped", "Loss scale", "Layer outputs"]
    if with_xla:
        header.append("XLA temporaries")
    lines, footnotes, marks = [], [], 0
    for row in rows:
        task = f"{row['task']} ({row['quality_name'].removeprefix('held-out ').replace(' per ', '/')})"
        reason = row["error"] or row["shortened"]
        marks += reason is not None
        mark = "" if reason is None else f" ({marks})"
        if reason is not None:
            footnotes.append(f"({marks}) {row['task']}, {row['policy']}: {reason}")
        if not row["seeds"]:
            cells = [f"{'left out' if row['error'] is None else 'not run'}{mark}"]
            cells += ["-"] * (len(header) - _TEXT_COLUMNS - 1)
            if row["error"] is None:
                cells[1:3] = [f"{row['first_step_ms']:.0f}", f"{row['first_step_ratio']:.2f}x"]
        else:
            cells = [
                _quality_text(row) + mark,
                f"{row['step_time_ms']:.1f}",
                "-" if row["speed_up"] is None else f"{row['speed_up']:.2f}x",
                str(row["skipped_steps"]),
                _range_text(row["loss_scale_min"], row["loss_scale_max"]),
                _bytes_text(row["layer_output_bytes"]),
            ]
            if with_xla:
                cells.append(_bytes_text(row["xla_temporary_bytes"]))
            for layer, reason in row["missing_kernels"]:
                footnotes.append(f"{row['task']}, {row['policy']}: {layer} stays in float32, as it {reason}")
        lines.append([task, row["policy"], *cells])
    return header, lines, footnotes


def render(rows: list, title: str, rounds: str, width: int = 110) -> str:
    """Returns the table, what did not run or not in 16 bits and why, and what the columns mean.

    Args:
        rows: As `summary.summarize` returns them.
        title: Goes on top.
        rounds: Timed steps of each policy, in words.
        width: Characters in a line; without rich the table may be wider.
    """
    header, lines, footnotes = columns(rows)
    try:
        body = _rich_text(header, lines, title, width)
    except ImportError:
        body = plain_text(header, lines, title, _TEXT_COLUMNS)
    notes = _NOTES.format(rounds=rounds)
    if "XLA temporaries" in header:
        notes += _XLA_NOTE
    if any(row["error"] is None and not row["seeds"] for row in rows):
        notes += _LEFT_OUT_NOTE
    paragraphs = [*footnotes, notes]
    return "\n\n".join([body, *(textwrap.fill(paragraph, width) for paragraph in paragraphs)])


def _rich_text(header, lines, title, width) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    gap = 1 if width >= 100 else 0  # on top of the one that the box has
    table = Table(box=box.SIMPLE_HEAD, header_style="", padding=(0, gap, 0, 0), pad_edge=False)
    for number, name in enumerate(header):
        # In a narrow terminal the task folds into two lines.
        table.add_column(
            name.replace(" ", "\n"),
            justify="left" if number < _TEXT_COLUMNS else "right",
            no_wrap=number > 0,
            min_width=None if number > 0 else len("(bits/byte)"),
            vertical="top",
        )
    for number, cells in enumerate(lines):
        is_last_of_task = number + 1 < len(lines) and lines[number + 1][0] != cells[0]
        table.add_row(*cells, end_section=is_last_of_task)
    # Where the terminal is too narrow rich would cut cells off; the terminal itself only breaks the lines.
    needed = sum(max(map(len, column)) for column in _narrowest(header, lines)) + len(header) * (1 + gap) + 1
    console = Console(file=io.StringIO(), width=max(width, needed))
    console.print(table)
    drawn = [line.rstrip() for line in console.file.getvalue().splitlines()]
    return "\n".join([title, *drawn]).rstrip()


def _narrowest(header, lines):
    """Yields for each column the strings that must fit: words of the header and of the task, whole cells."""
    for number, name in enumerate(header):
        cells = [cells[number] for cells in lines]
        yield name.split() + (" ".join(cells).split() if number == 0 else cells)


def _quality_text(row: dict) -> str:
    if row["quality_std"] is None:
        return f"{row['quality_mean']:.3f}"
    return f"{row['quality_mean']:.3f} ± {row['quality_std']:.3f}"


def _range_text(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _bytes_text(number) -> str:
    return "-" if number is None else f"{number / 2**20:.1f} MiB"
