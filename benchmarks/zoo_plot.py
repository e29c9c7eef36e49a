"""The picture of the layer zoo: one dot per layer, dtype and mode, the worst of the backends."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

_LEFT, _RIGHT = 0.02, 4e3
# Where what is inf, NaN or raises is drawn.
_BEYOND = 2e4
_COLORS = {"float16": "tab:red", "bfloat16": "tab:blue"}


def worst_error(results: Sequence[Mapping[str, object]]) -> float | None:
    """Returns the largest error on typical inputs, infinity for what is inf, NaN or raises, `None` for no error."""
    if any("raises" in result or result["nonfinite"] for result in results):
        return float("inf")
    errors = [error for result in results for error in result["errors"].get("typical", {}).values()]
    return max(errors, default=None)


def write_plot(path: str | os.PathLike, results: Sequence[Mapping[str, object]]) -> None:
    """Writes the errors of all cases as dots in two columns."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Dropout and the like have no error, only a range.
    names = list(dict.fromkeys(result["case"] for result in results if result["family"] != "random"))
    half = (len(names) + 1) // 2
    figure, columns = plt.subplots(1, 2, figsize=(15, 3 + 0.17 * half), layout="constrained")
    for axes, shown in zip(columns, (names[:half], names[half:]), strict=True):
        _draw(axes, shown, results)
    handles, labels = columns[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=10)
    figure.suptitle("Error of each Keras layer in 16 bits, worst of all backends", fontsize=13)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)
    plt.close(figure)


def _draw(axes, names, results):
    for dtype, offset in (("float16", -0.17), ("bfloat16", 0.17)):
        for mode, filled in (("bare", False), ("rules", True)):
            places, errors = [], []
            for place, name in enumerate(names):
                key = (name, dtype, mode)
                found = [result for result in results if (result["case"], result["dtype"], result["mode"]) == key]
                error = worst_error(found) if found else None
                if error is not None:
                    places.append(place + offset)
                    errors.append(_BEYOND if error == float("inf") else min(max(error, _LEFT), _RIGHT))
            color = _COLORS[dtype]
            axes.scatter(
                errors,
                places,
                s=16 if filled else 34,
                facecolors=color if filled else "none",
                edgecolors=color,
                linewidths=0.9,
                label=f"{dtype}, {'default rules' if filled else 'without rules'}",
                zorder=3,
            )
    for place in range(len(names)):
        axes.axhline(place + 0.5, color="0.9", linewidth=0.5, zorder=0)
    axes.axvline(0.5, color="0.5", linewidth=0.8, linestyle="dashed", zorder=1)
    axes.axvspan(_RIGHT * 1.5, _BEYOND * 2, color="0.93", zorder=0)
    axes.set_xscale("log")
    axes.set_xlim(_LEFT / 1.5, _BEYOND * 2)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_yticks(range(len(names)), [name.replace("ContrastLimitedAdaptiveHistogram", "CLA") for name in names])
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xticks([0.02, 0.1, 0.5, 1, 10, 100, 1000, _BEYOND])
    axes.set_xticklabels(["≤ 0.02", "0.1", "0.5", "1", "10", "100", "1000", "inf, NaN\nor raises"], fontsize=8)
    axes.minorticks_off()
    axes.set_xlabel("largest error of output and gradients, in epsilons of the dtype (one rounding: 0.5)", fontsize=9)
