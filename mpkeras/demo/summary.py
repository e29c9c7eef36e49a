"""The result of the demo: a row for each task and policy, the sentence on what pays off, a table and a picture.

The picture shows held-out quality over the epochs, speed and memory against float32.
"""

import math
import statistics
import textwrap

from mpkeras.tools.shared.report import bytes_text, make_figure, quartiles, text_table

BASELINE = "float32"

# Below this a gain is not worth the trouble, and step times vary by some percent anyway.
WORTHWHILE_SPEED_UP = 1.1

_NOTES = (
    "Quality: at the end of training, mean ± standard deviation over the seeds. Step: median of {rounds} "
    "training steps, the policies in turn, after tracing and compiling. Speed: float32's step time / this "
    "one's. Skipped: steps left out because a gradient was not finite, in all seeds. Layer outputs: bytes "
    "that all layers return for one training batch, in the dtypes they really return."
)
_LEFT_OUT_NOTE = " Of what was left out: the second training step, the first one without compiling."
_XLA_NOTE = " XLA temporaries: what XLA reserves for the train step beside weights, optimizer state and batch."
_TEXT_COLUMNS = 2  # task and policy: to the left; numbers go to the right

# Okabe and Ito's colours, told apart by colour-blind readers too. The policies should lie on top of each
# other: the baseline is a broad pale line, so that the others stay visible on it.
_BASELINE_STYLE = {"color": "#999999", "linestyle": "-", "linewidth": 6, "alpha": 0.6}
_STYLES = {
    "float32": _BASELINE_STYLE,
    "mixed_bfloat16": {"color": "#0072B2", "linestyle": "--", "linewidth": 2, "marker": "s", "markersize": 7},
    "mixed_float16": {"color": "#D55E00", "linestyle": ":", "linewidth": 2, "marker": "o", "markersize": 4},
}
_OTHER_COLOURS = ("#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def summarize(tasks, policies, records, step_times_ms, plans) -> list:
    """Returns one row, a dictionary, for each task and policy, tasks outermost."""
    rows = []
    for task in tasks:
        by_policy: dict = {policy: [] for policy in policies}
        for record in records:
            if record["task"] == task.name:
                by_policy[record["policy"]].append(record)
        times = step_times_ms[task.name]
        of_task = plans[task.name]
        baseline = _row(task, BASELINE, by_policy[BASELINE], times, of_task[BASELINE])
        for policy in policies:
            row = _row(task, policy, by_policy[policy], times, of_task[policy])
            row["first_step_ratio"] = _ratio(of_task[BASELINE].step_ms, of_task[policy].step_ms)
            row["same_quality"] = same_quality(task, baseline, row)
            for name in ("layer_output", "xla_temporary"):
                row[f"{name}_ratio"] = _ratio(row.get(f"{name}_bytes"), baseline.get(f"{name}_bytes"))
            rows.append(row)
    return rows


def _row(task, policy: str, records: list, times: dict, plan) -> dict:
    errors = [record["error"] for record in records if record["error"] is not None]
    row = {
        "task": task.name,
        "policy": policy,
        "quality_name": task.quality_name,
        "higher_is_better": task.higher_is_better,
        "tolerance": task.tolerance,
        "seeds": 0 if errors else len(records),
        "error": errors[0] if errors else None,
        "shortened": plan.shortened,
        "first_step_ms": plan.step_ms,
    }
    if errors or not records:
        return row
    row["quality_mean"], row["quality_std"] = mean_and_std([record["quality"] for record in records])
    row["step_time_ms"] = statistics.median(times[policy])
    row.update(_speed_up(times.get(BASELINE), times[policy]))
    row["skipped_steps"] = sum(record["skipped_steps"] for record in records)
    row["steps"] = sum(record["steps"] for record in records)
    row["loss_scale_min"] = min(record["loss_scale"] for record in records)
    row["loss_scale_max"] = max(record["loss_scale"] for record in records)
    row["layer_output_bytes"] = records[0]["layer_output_bytes"]
    row["xla_temporary_bytes"] = records[0]["xla_temporary_bytes"]
    row["missing_kernels"] = records[0]["missing_kernels"]
    return row


def _speed_up(baseline_times, times: list) -> dict:
    """Returns float32's median step time over this one, and the quartiles of the same round by round."""
    if baseline_times is None:
        return dict.fromkeys(("speed_up", "speed_up_low", "speed_up_high"))
    rounds = [baseline / time for baseline, time in zip(baseline_times, times, strict=True)]
    low, _, high = quartiles(rounds)
    return {
        "speed_up": statistics.median(baseline_times) / statistics.median(times),
        "speed_up_low": low,
        "speed_up_high": high,
    }


def _ratio(value, baseline_value):
    return None if value is None or not baseline_value else value / baseline_value


def mean_and_std(values: list) -> tuple:
    """Returns the mean and the sample standard deviation (n - 1): `None` for one value, or if one is NaN."""
    if len(values) < 2 or not all(math.isfinite(value) for value in values):
        return sum(values) / len(values), None
    return statistics.mean(values), statistics.stdev(values)


def same_quality(task, baseline: dict, row: dict):
    """Whether the quality of `row` is not worse than the baseline's, as far as the seeds can tell.

    It may fall short by twice the spread of the runs (the root mean square of both standard deviations), or
    by the task's tolerance where that is more. Better is never held against a policy; NaN is always worse.
    """
    if "quality_mean" not in baseline or "quality_mean" not in row:
        return None
    shortfall = baseline["quality_mean"] - row["quality_mean"]
    if not task.higher_is_better:
        shortfall = -shortfall
    spreads = [std for std in (baseline["quality_std"], row["quality_std"]) if std is not None]
    spread = math.sqrt(sum(std**2 for std in spreads) / len(spreads)) if spreads else 0.0
    return shortfall <= max(2.0 * spread, task.tolerance)


def pays_off(row: dict) -> bool:
    """Whether the policy is worth it for the task: clearly and steadily faster, at the same quality."""
    if row["policy"] == BASELINE or row.get("speed_up") is None:
        return False
    return row["speed_up"] >= WORTHWHILE_SPEED_UP and row["speed_up_low"] > 1.0 and bool(row["same_quality"])


def verdict(rows: list) -> str:
    """Returns the one sentence: which policy pays off on this machine, with the numbers it rests on."""
    others = [row for row in rows if row["policy"] != BASELINE]
    if not others:
        return "Only float32 was trained, so there is nothing to compare."
    candidates: dict = {}
    for row in others:
        if row.get("speed_up") is not None:
            candidates.setdefault(row["policy"], []).append(row)
    left_out = _left_out(others)
    if not candidates:
        return f"Nothing could be compared with float32 here; the table says why.{left_out}"
    best = max(candidates, key=lambda policy: _merit(candidates[policy]))
    paying = [row for row in candidates[best] if pays_off(row)]
    not_paying = [row for row in candidates[best] if not pays_off(row)]
    if not paying:
        saving = _memory_saving(not_paying)
        advice = "stay with float32 unless memory matters" if saving else "stay with float32"
        return (
            f"No policy pays off on this machine, so {advice}: the best other one, {best}, "
            f"runs at {_listed([_finding(row) for row in not_paying])}{saving}.{left_out}"
        )
    gains = _listed([f"{row['speed_up']:.2f}x faster on {row['task']}" for row in paying])
    rest = f"; it runs at {_listed([_finding(row) for row in not_paying])}" if not_paying else ""
    return (
        f"{best} pays off on this machine: its steps are {gains} than in float32, "
        f"with {_same_quality_claim(paying)}{rest}.{left_out}"
    )


def _left_out(rows: list) -> str:
    """Returns a sentence on each policy that was too slow to be trained."""
    sentences = [
        f" {row['policy']} was left out on {row['task']}: its first step ran at {row['first_step_ratio']:.2g}x the "
        "speed."
        for row in rows
        if row.get("shortened") and not row["seeds"] and row.get("first_step_ratio")
    ]
    return "".join(sentences)


def _merit(rows: list) -> tuple:
    # First on how many tasks it pays off, then how fast it is over all of them.
    return sum(pays_off(row) for row in rows), statistics.geometric_mean([row["speed_up"] for row in rows])


def _same_quality_claim(rows: list) -> str:
    seeds = min(row["seeds"] for row in rows)
    if seeds > 1:
        return f"the same held-out quality within the spread of {seeds} seeds"
    return "the same held-out quality (of one seed, so the spread is unknown)"


def _finding(row: dict) -> str:
    text = f"{row['speed_up']:.2f}x the speed on {row['task']}"
    if row["speed_up"] >= WORTHWHILE_SPEED_UP and row["speed_up_low"] <= 1.0:
        text += f" but not steadily ({row['speed_up_low']:.2f}x to {row['speed_up_high']:.2f}x)"
    if not row["same_quality"]:
        text += f" with a worse {row['quality_name']} ({row['quality_mean']:.3f})"
    return text


def _memory_saving(rows: list) -> str:
    """Returns what the policy saves on every task: what XLA really reserves, where that is known."""
    for name, words in (("xla_temporary_ratio", "XLA temporaries"), ("layer_output_ratio", "layer outputs")):
        ratios = [row[name] for row in rows if row.get(name) is not None]
        if ratios:
            return f", with {words} {max(ratios):.2f}x the size" if max(ratios) < 1.0 else ""
    return ""


def _listed(texts: list) -> str:
    return texts[0] if len(texts) == 1 else ", ".join(texts[:-1]) + " and " + texts[-1]


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
    """Returns the table, what did not run or not in 16 bits and why, and what the columns mean."""
    header, lines, footnotes = columns(rows)
    body = text_table([name.replace(" ", "\n") for name in header], lines, title, _TEXT_COLUMNS)
    notes = _NOTES.format(rounds=rounds)
    if "XLA temporaries" in header:
        notes += _XLA_NOTE
    if any(row["error"] is None and not row["seeds"] for row in rows):
        notes += _LEFT_OUT_NOTE
    paragraphs = [*footnotes, notes]
    return "\n\n".join([body, *(textwrap.fill(paragraph, width) for paragraph in paragraphs)])


def _quality_text(row: dict) -> str:
    if row["quality_std"] is None:
        return f"{row['quality_mean']:.3f}"
    return f"{row['quality_mean']:.3f} ± {row['quality_std']:.3f}"


def _range_text(low: float, high: float) -> str:
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _bytes_text(number) -> str:
    return "-" if number is None else bytes_text(number)


def save_picture(path, rows: list, records: list, titles: dict, heading: str):
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
            # The runs that were left out have taken a step.
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
