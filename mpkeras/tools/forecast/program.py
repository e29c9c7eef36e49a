"""What a compiler said of a program, against a device: the room it leaves, its least time, a picture of its bytes."""

import numpy as np

from mpkeras.tools.shared.report import Figure, decimals, make_figure

# The bytes of a program, by the keys under which reports have them.
BYTES = ("persistent_bytes", "temporary_bytes", "peak_bytes")
_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def room(said: dict, usable_bytes: int) -> int:
    """Returns the bytes that a program leaves of `usable_bytes`; negative where it does not fit."""
    if "too_large" in said:
        return min(-1, usable_bytes - said["too_large"])
    return usable_bytes - said["peak_bytes"]


def unit_of(rows: list) -> tuple[str, int]:
    """Returns the name of the unit in which the bytes of all `rows` are shown, which have `BYTES`, and its bytes."""
    largest = max((row[key] or 0 for row in rows for key in BYTES), default=0)
    # With two decimal places, of 0.1 and more they tell programs apart.
    return next((unit for unit in _UNITS if largest >= unit[1] / 10), _UNITS[-1])


def columns_of_bytes(rows: list) -> tuple[list[str], list[list[str]]]:
    """Returns the headers of the columns for `BYTES`, and their cells in each of `rows`: empty where nobody knows."""
    unit, size = unit_of(rows)
    headers = [f"{name}\n{unit}" for name in ("state", "temporary", "peak")]
    return headers, [["" if row[key] is None else decimals(row[key] / size) for key in BYTES] for row in rows]


def own_methods_text(model_name: str, own_methods) -> list[str]:
    """Returns the line that says that the step which is compiled is not the one that `fit` runs; none where it is."""
    if not own_methods:
        return []
    names = " and ".join(f"`{name}`" for name in own_methods)
    return [
        f"Model '{model_name}' has {names} of its own, not compiled here: the figures are of mpkeras' own step, which "
        "calls the model once and takes the loss of `loss` or `compile`, or the mean squared error. `fit` runs another "
        "step, which may take more."
    ]


def bound_ms(said: dict, target) -> float | None:
    """Returns the time that a program takes at the least: its products at full rate, or each byte moved once.

    `None` where the rates of `target` are not known, or the compiler made no program.
    """
    if not target.bandwidth or "matrix_flops" not in said:
        return None
    # A dtype whose rate no data sheet tells takes some time, too: the bound holds without.
    rates = target.matrix_rates
    products_s = sum(flops / rates[dtype] for dtype, flops in said["matrix_flops"].items() if dtype in rates)
    return 1e3 * max(products_s, said["moved_bytes"] / target.bandwidth)


def picture(labels: list, rows: list, usable_bytes: int, *, title: str, where: str, width: float, limit: str) -> Figure:
    """Returns a figure of the bytes of programs, beside what there is.

    Args:
        labels, rows: Of each program what it is called and a dictionary with `BYTES`, from top to bottom.
        usable_bytes: The bytes that a program can have.
        title: Above the figure.
        where: Behind the unit under its axis.
        width: Of the figure, in inches.
        limit: The name of the line at `usable_bytes`; it is left out where all programs are far below.
    """
    figure = make_figure(figsize=(width, 2.0 + 0.5 * len(rows)))
    axes = figure.subplots()
    name, size = unit_of(rows)
    state, temporary, peak = (np.array([(row[key] or 0) / size for row in rows]) for key in BYTES)
    height = state + temporary
    places = np.arange(len(rows))
    axes.barh(places, state, label="weights and optimizer", color="#4c72b0")
    axes.barh(places, temporary, left=state, label="temporary", color="#dd8452")
    axes.barh(places, np.maximum(peak - height, 0), left=height, label="batch, outputs, program", color="#8c8c8c")
    usable = usable_bytes / size
    if max(np.maximum(peak, height), default=0.0) > usable / 8:
        axes.axvline(usable, color="black", linestyle="--", label=limit)
    axes.set_yticks(places, labels, fontsize="small")
    axes.invert_yaxis()
    axes.set_xlabel(f"{name}{where}")
    axes.set_title(title, fontsize="medium")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small", frameon=False)
    return figure
