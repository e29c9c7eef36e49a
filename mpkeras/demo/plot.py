"""The demo's result as a picture: held-out quality over the epochs, speed and memory against float32."""

import statistics

from mpkeras.insight.report import make_figure

# Okabe and Ito's colours, told apart by colour-blind readers too. The policies should lie on top of each
# other: the baseline is a broad pale line, so that the others stay visible on it.
_BASELINE_STYLE = {"color": "#999999", "linestyle": "-", "linewidth": 6, "alpha": 0.6}
_STYLES = {
    "float32": _BASELINE_STYLE,
    "mixed_bfloat16": {"color": "#0072B2", "linestyle": "--", "linewidth": 2, "marker": "s", "markersize": 7},
    "mixed_float16": {"color": "#D55E00", "linestyle": ":", "linewidth": 2, "marker": "o", "markersize": 4},
}
_OTHER_COLOURS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def save(path, rows: list, records: list, titles: dict, heading: str):
    """Writes the picture to `path` as PNG, 1600 pixels wide."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    policies = list(dict.fromkeys(row["policy"] for row in rows))
    styles = {policy: _style(policy, policies) for policy in policies}
    figure = make_figure(figsize=(12.8, 9.2), dpi=125)
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.12)
    figure.suptitle(heading, fontsize=14)
    axes = figure.subplots(2, 2)
    for axis in axes[0][len(tasks) :]:
        axis.set_axis_off()
    for axis, task in zip(axes[0], tasks, strict=False):
        _draw_curves(axis, [row for row in rows if row["task"] == task], records, styles, titles[task])
    speed, memory = axes[1]
    _draw_bars(speed, rows, "speed_up", styles)
    speed.set_title("Speed of a training step\n(policies in turn; whiskers: the middle half of all rounds)")
    speed.set_ylabel("times as fast as float32")
    _draw_bars(memory, rows, "layer_output_ratio", styles)
    memory.set_title("Memory of all layer outputs, one training batch\n(counted by dtype, not peak memory)")
    memory.set_ylabel("bytes / bytes in float32")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=13)
    figure.savefig(path)


def _style(policy: str, policies: list) -> dict:
    if policy in _STYLES:
        return _STYLES[policy]
    others = [name for name in policies if name not in _STYLES]
    color = _OTHER_COLOURS[others.index(policy) % len(_OTHER_COLOURS)]
    return {"color": color, "linestyle": "-.", "linewidth": 2, "marker": "D", "markersize": 5}


def _draw_curves(axis, rows, records, styles, title):
    seeds = max(row["seeds"] for row in rows)
    fewest = min((row["seeds"] for row in rows if row["seeds"]), default=seeds)
    for row in rows:
        curves = [
            record["history"]["quality"]
            for record in records
            if (record["task"], record["policy"], record["error"]) == (row["task"], row["policy"], None)
        ]
        style = styles[row["policy"]]
        if not curves:
            axis.plot([], [], label=f"{row['policy']} ({_why_missing(row)})", **style)
            continue
        epochs = range(1, len(curves[0]) + 1)
        values = list(zip(*curves, strict=True))
        means = [statistics.fmean(at_epoch) for at_epoch in values]
        axis.plot(epochs, means, label=row["policy"], **style)
        if len(curves) > 1:
            stds = [statistics.stdev(at_epoch) for at_epoch in values]
            low = [mean - std for mean, std in zip(means, stds, strict=True)]
            high = [mean + std for mean, std in zip(means, stds, strict=True)]
            axis.fill_between(epochs, low, high, color=style["color"], alpha=0.15, linewidth=0)
    number = f"{seeds} seeds" if fewest == seeds else f"{fewest} to {seeds} seeds"
    spread = f"mean and standard deviation of {number}" if seeds > 1 else "one seed"
    axis.set_title(f"{title[0].upper()}{title[1:]}\n({spread})")
    axis.set_xlabel("epoch")
    direction = "higher" if rows[0]["higher_is_better"] else "lower"
    axis.set_ylabel(f"{rows[0]['quality_name']} ({direction} is better)")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)


def _why_missing(row) -> str:
    return "left out" if row["error"] is None else "not run"


def _draw_bars(axis, rows, value_name, styles):
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    policies = list(styles)
    bar_width = 0.8 / len(policies)
    for row in rows:
        offset = policies.index(row["policy"]) - (len(policies) - 1) / 2
        place = tasks.index(row["task"]) + offset * bar_width
        value = row.get(value_name)
        if value is None:
            # What was left out has taken a step.
            if value_name == "speed_up" and row.get("first_step_ratio") and row.get("shortened"):
                value = row["first_step_ratio"]
                axis.bar(place, value, 0.9 * bar_width, color=styles[row["policy"]]["color"], alpha=0.5)
                text = f"{value:.2g}x (left out)"
                axis.annotate(text, (place, value + 0.02), rotation=90, ha="center", va="bottom")
            else:
                axis.annotate(_why_missing(row), (place, 0.02), rotation=90, ha="center", va="bottom")
            continue
        axis.bar(place, value, 0.9 * bar_width, color=styles[row["policy"]]["color"])
        if row["policy"] == "float32":  # 1 by definition
            continue
        top = value
        if value_name == "speed_up":
            low, high = min(value, row["speed_up_low"]), max(value, row["speed_up_high"])
            axis.errorbar(place, value, [[value - low], [high - value]], color="black", capsize=4)
            top = high
        axis.annotate(f"{value:.2f}x", (place, top), (0, 3), textcoords="offset points", ha="center")
    axis.axhline(1.0, color="#444444", linewidth=1, zorder=0.5)
    axis.set_xticks(range(len(tasks)), tasks)
    axis.set_xlim(-0.6, len(tasks) - 0.4)
    axis.margins(y=0.1)
    axis.grid(axis="y", alpha=0.3)
    axis.set_axisbelow(True)
