import importlib.util
import struct
from types import SimpleNamespace

import pytest

from mpkeras.demo import summary
from mpkeras.demo.runs import Plan

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")

NEEDS_MATPLOTLIB = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="no matplotlib")

DIGITS = SimpleNamespace(name="digits", quality_name="held-out accuracy", higher_is_better=True, tolerance=0.005)
TEXT = SimpleNamespace(name="text", quality_name="held-out bits per byte", higher_is_better=False, tolerance=0.01)


def record(task, policy, seed, quality, **changes):
    return {
        "task": task.name,
        "policy": policy,
        "seed": seed,
        "error": None,
        "quality": quality,
        "skipped_steps": 0,
        "steps": 100,
        "loss_scale": 1.0,
        "layer_output_bytes": 4000 if policy == "float32" else 2400,
        "xla_temporary_bytes": None,
        "missing_kernels": [],
        **changes,
    }


def failed(task, policy):
    return {"task": task.name, "policy": policy, "seed": 0, "error": "NotImplementedError: no kernel"}


def row(policy="mixed_bfloat16", task=TEXT, **changes):
    """A row as `summarize` makes it, of a policy that pays off."""
    return {
        "task": task.name,
        "policy": policy,
        "quality_name": task.quality_name,
        "higher_is_better": task.higher_is_better,
        "seeds": 3,
        "error": None,
        "shortened": None,
        "quality_mean": 3.00449,
        "quality_std": 0.0151,
        "same_quality": True,
        "step_time_ms": 40.25,
        "speed_up": 1.496,
        "speed_up_low": 1.4,
        "speed_up_high": 1.6,
        "skipped_steps": 2,
        "loss_scale_min": 8192.0,
        "loss_scale_max": 32768.0,
        "layer_output_bytes": 9 * 2**20 + 2**19,
        "layer_output_ratio": 0.6,
        "xla_temporary_bytes": None,
        "missing_kernels": [],
        **changes,
    }


def without_numbers(policy="mixed_float16", **changes):
    """A row of a policy that did not run."""
    numbers = dict.fromkeys(("speed_up", "speed_up_low", "speed_up_high", "layer_output_ratio"))
    return row(policy, **{**numbers, "seeds": 0, "error": "NotImplementedError: no kernel", **changes})


LEFT_OUT = without_numbers(error=None, shortened="left out: ...", first_step_ms=993.4, first_step_ratio=0.038)


def summarized(tasks, policies, records, times, **plans):
    plans = {policy: Plan(3, 3) for policy in policies} | plans
    return summary.summarize(tasks, policies, records, times, {task.name: plans for task in tasks})


def test_mean_and_std():
    # n - 1 in the denominator; one value has no spread, and neither has a run that diverged.
    assert summary.mean_and_std([1.0, 2.0, 3.0]) == (2.0, 1.0) and summary.mean_and_std([4.0]) == (4.0, None)
    assert summary.mean_and_std([1.0, float("nan")]) == (pytest.approx(float("nan"), nan_ok=True), None)


def test_summary_of_a_task():
    records = [
        record(DIGITS, "float32", 0, 0.97),
        record(DIGITS, "float32", 1, 0.99),
        record(DIGITS, "float32", 2, 0.98),
        record(DIGITS, "mixed_float16", 0, 0.96, skipped_steps=2, loss_scale=8192.0),
        record(DIGITS, "mixed_float16", 1, 0.98),
        record(DIGITS, "mixed_float16", 2, 0.97, skipped_steps=1),
        record(TEXT, "float32", 0, 3.0),
        failed(TEXT, "mixed_float16"),
    ]
    # The machine was busy in the second round.
    times = {"float32": [10.0, 80.0, 12.0, 14.0, 8.0], "mixed_float16": [20.0, 100.0, 30.0, 20.0, 16.0]}
    of_tasks = {"digits": times, "text": {"float32": [10.0, 11.0]}}
    rows = summarized([DIGITS, TEXT], ["float32", "mixed_float16"], records, of_tasks)
    assert [row["task"] for row in rows] == ["digits", "digits", "text", "text"]
    baseline, other, _, not_run = rows
    assert (baseline["policy"], baseline["speed_up"], baseline["step_time_ms"]) == ("float32", 1.0, 12.0)
    assert other["quality_mean"] == pytest.approx(0.97)
    assert other["quality_std"] == pytest.approx(0.01)
    assert other["step_time_ms"] == 20.0
    assert other["speed_up"] == 0.6  # 12 / 20
    # Round by round 0.5, 0.8, 0.4, 0.7 and 0.5: the quartiles are the second and the fourth in order.
    assert (other["speed_up_low"], other["speed_up_high"]) == (0.5, 0.7)
    assert (other["skipped_steps"], other["steps"]) == (3, 300)
    assert (other["loss_scale_min"], other["loss_scale_max"]) == (1.0, 8192.0)
    assert (other["layer_output_ratio"], other["xla_temporary_ratio"]) == (0.6, None)
    assert other["seeds"] == 3
    assert not_run["error"] == "NotImplementedError: no kernel" and not_run["same_quality"] is None
    assert "quality_mean" not in not_run
    # Without a baseline there is no speed-up.
    records = [failed(TEXT, "float32"), record(TEXT, "mixed_float16", 0, 3.0)]
    _, other = summarized([TEXT], ["float32", "mixed_float16"], records, {"text": {"mixed_float16": [10.0, 12.0]}})
    assert (other["speed_up"], other["step_time_ms"]) == (None, 11.0)


def test_a_case_that_was_left_out_has_the_speed_of_its_first_step():
    records = [record(TEXT, "float32", 0, 3.0)]
    plans = {"float32": Plan(3, 3, 4.0, 38.0, 120.0), "mixed_float16": Plan(3, 0, 440.0, 950.0, 120.0)}
    times = {"text": {"float32": [10.0, 11.0]}}
    baseline, other = summarized([TEXT], ["float32", "mixed_float16"], records, times, **plans)
    assert (baseline["shortened"], baseline["seeds"], other["seeds"]) == (None, 1, 0)
    assert other["shortened"].startswith("left out: at 950 ms a step") and other["error"] is None
    assert other["first_step_ratio"] == 0.04 and other["first_step_ms"] == 950.0
    assert "quality_mean" not in other and not summary.pays_off(other)
    left_out = "mixed_float16 was left out on text: its first step ran at 0.04x the speed."
    assert summary.verdict([baseline, other]) == (
        f"Nothing could be compared with float32 here; the table says why. {left_out}"
    )
    assert summary.verdict([baseline, row(), other]).endswith(f"of 3 seeds. {left_out}")


@pytest.mark.parametrize(
    ("task", "baseline", "other", "expected"),
    [
        pytest.param(DIGITS, (0.98, 0.010), (0.961, 0.010), True, id="just within twice the spread"),
        pytest.param(DIGITS, (0.98, 0.010), (0.959, 0.010), False, id="just beyond twice the spread"),
        pytest.param(DIGITS, (0.98, 0.010), (0.999, 0.000), True, id="better is never held against it"),
        # The root mean square of 0.03 and 0.04 is 0.03536, twice of it 0.0707.
        pytest.param(TEXT, (3.00, 0.030), (3.070, 0.040), True, id="both spreads count, within"),
        pytest.param(TEXT, (3.00, 0.030), (3.071, 0.040), False, id="both spreads count, beyond"),
        pytest.param(TEXT, (3.00, None), (3.009, None), True, id="one seed, within the tolerance"),
        pytest.param(TEXT, (3.00, None), (3.011, None), False, id="one seed, beyond the tolerance"),
        pytest.param(TEXT, (3.00, 0.010), (float("nan"), None), False, id="NaN is worse"),
    ],
)
def test_same_quality(task, baseline, other, expected):
    def as_row(mean, std):
        return {"quality_mean": mean, "quality_std": std}

    assert summary.same_quality(task, as_row(*baseline), as_row(*other)) is expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param({}, True, id="faster at the same quality"),
        pytest.param({"speed_up": 1.10, "speed_up_low": 1.01}, True, id="just fast enough"),
        pytest.param({"speed_up": 1.09, "speed_up_low": 1.08}, False, id="not fast enough"),
        pytest.param({"speed_up_low": 1.0}, False, id="not faster in a quarter of the rounds"),
        pytest.param({"same_quality": False}, False, id="worse"),
        pytest.param({"policy": "float32"}, False, id="the baseline itself"),
        pytest.param({"speed_up": None}, False, id="no baseline"),
    ],
)
def test_pays_off(changes, expected):
    assert summary.pays_off(row(**changes)) is expected


SLOW = {"speed_up": 0.95, "speed_up_low": 0.9}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        pytest.param(
            [row("float32"), row(task=DIGITS, speed_up=1.26), row(task=TEXT, speed_up=1.52)],
            "mixed_bfloat16 pays off on this machine: its steps are 1.26x faster on digits and 1.52x faster on "
            "text than in float32, with the same held-out quality within the spread of 3 seeds.",
            id="on two tasks",
        ),
        pytest.param(
            [row(task=DIGITS, speed_up=0.97, speed_up_low=0.9), row(task=TEXT)],
            "the same held-out quality within the spread of 3 seeds; it runs at 0.97x the speed on digits.",
            id="on one task",
        ),
        pytest.param(
            [row("float32"), row(**SLOW), row("mixed_float16", speed_up=0.5)],
            "No policy pays off on this machine, so stay with float32 unless memory matters: the best other one, "
            "mixed_bfloat16, runs at 0.95x the speed on text, with layer outputs 0.60x the size.",
            id="nowhere",
        ),
        pytest.param([row("float32")], "Only float32 was trained, so there is nothing to compare.", id="float32 alone"),
        pytest.param(
            [
                row("mixed_float16", DIGITS, speed_up=5.0),
                row("mixed_float16", TEXT, speed_up=0.9, speed_up_low=0.8),
                row("mixed_bfloat16", DIGITS, speed_up=1.2),
                row("mixed_bfloat16", TEXT, speed_up=1.2),
            ],
            "mixed_bfloat16 pays off on this machine: its steps are 1.20x",
            id="the policy that pays off on more tasks",
        ),
        pytest.param(
            [row("mixed_float16", speed_up=1.6), row("mixed_bfloat16", speed_up=1.5)],
            "mixed_float16 pays off on this machine: its steps are 1.60x",
            id="the faster of two",
        ),
        pytest.param([row(**SLOW, xla_temporary_ratio=1.2)], "so stay with float32: the best", id="XLA reserves more"),
        pytest.param([row(**SLOW, xla_temporary_ratio=0.7)], ", with XLA temporaries 0.70x the size.", id="XLA saves"),
        pytest.param(
            [row(same_quality=False, quality_mean=3.25)],
            "runs at 1.50x the speed on text with a worse held-out bits per byte (3.250)",
            id="a loss of quality",
        ),
        pytest.param(
            [row(speed_up=1.3, speed_up_low=0.8, speed_up_high=1.4)],
            "1.30x the speed on text but not steadily (0.80x to 1.40x)",
            id="a gain that is not steady",
        ),
        pytest.param([row(seeds=1, quality_std=None)], "of one seed, so the spread is unknown", id="one seed"),
        pytest.param([row("float32"), row(speed_up=None)], "Nothing could be compared", id="no baseline"),
    ],
)
def test_verdict(rows, expected):
    assert expected in summary.verdict(rows)


def test_cells():
    header, (cells,), footnotes = summary.columns([row("mixed_bfloat16")])
    assert dict(zip(header, cells, strict=True)) == {
        "Task": "text (bits/byte)",
        "Policy": "mixed_bfloat16",
        "Quality": "3.004 ± 0.015",
        "Step ms": "40.2",
        "Speed": "1.50x",
        "Skipped": "2",
        "Loss scale": "8192 to 32768",
        "Layer outputs": "9.5 MiB",
    }
    assert footnotes == []


@pytest.mark.parametrize(
    ("changes", "column", "expected"),
    [
        pytest.param({"quality_mean": float("nan"), "quality_std": None}, "Quality", "nan", id="diverged"),
        pytest.param({"speed_up": None}, "Speed", "-", id="no baseline"),
        pytest.param({"loss_scale_max": 8192.0}, "Loss scale", "8192", id="one loss scale"),
        pytest.param({"xla_temporary_bytes": 2**20}, "XLA temporaries", "1.0 MiB", id="XLA tells"),
    ],
)
def test_cells_of_special_cases(changes, column, expected):
    header, (cells,), _ = summary.columns([row("mixed_bfloat16", **changes)])
    assert dict(zip(header, cells, strict=True))[column] == expected


def test_what_did_not_run_was_shortened_or_left_out_gets_a_footnote():
    fewer = row("mixed_bfloat16", seeds=1, shortened="1 of 3 runs: at 400 ms")
    # Its layers without a kernel get a footnote and no mark.
    kept = row("mixed_float16", missing_kernels=[["MultiHeadAttention", "raises in float16 here"]])
    header, lines, footnotes = summary.columns([fewer, LEFT_OUT, kept, without_numbers()])
    assert [cells[2] for cells in lines] == ["3.004 ± 0.015 (1)", "left out (2)", "3.004 ± 0.015", "not run (3)"]
    assert lines[1] == ["text (bits/byte)", "mixed_float16", "left out (2)", "993", "0.04x", "-", "-", "-"]
    assert lines[3] == ["text (bits/byte)", "mixed_float16", "not run (3)", "-", "-", "-", "-", "-"]
    assert {len(cells) for cells in lines} == {len(header)}
    assert footnotes == [
        "(1) text, mixed_bfloat16: 1 of 3 runs: at 400 ms",
        "(2) text, mixed_float16: left out: ...",
        "text, mixed_float16: MultiHeadAttention stays in float32, as it raises in float16 here",
        "(3) text, mixed_float16: NotImplementedError: no kernel",
    ]


def test_the_table_its_footnotes_and_notes_are_shown():
    text = summary.render([row("float32"), row("mixed_bfloat16"), without_numbers()], "On this machine", "3")
    for wanted in (
        "On this machine",
        "float32",
        "mixed_bfloat16",
        "not run (1)",
        "(1) text, mixed_float16: NotImplementedError: no kernel",
        "median of 3 training steps,",
    ):
        assert wanted in text
    assert "left out: the" not in text
    text = summary.render([row("float32"), LEFT_OUT], "On this machine", "3")
    assert "left out: the second training step" in " ".join(text.split())


def test_nothing_is_cut_off_where_the_terminal_is_narrow():
    policy = "mixed_bfloat16_as_we_use_it_here"
    text = summary.render([row(policy, loss_scale_max=8192.0, step_time_ms=234.5)], "On this machine", "3", width=80)
    (line,) = [line for line in text.splitlines() if "MiB" in line]
    wanted = ["text (bits/byte)", policy, "3.004 ± 0.015", "234.5", "1.50x", "2", "8192", "9.5 MiB"]
    assert " ".join(line.split()).startswith(" ".join(wanted))
    assert max(len(line) for line in text.splitlines()) <= 105


def curve(policy, *quality, task=TEXT):
    return {"task": task.name, "policy": policy, "error": None, "history": {"quality": list(quality)}}


@NEEDS_MATPLOTLIB
@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(
            [row(policy, task) for task in (DIGITS, TEXT) for policy in ("float32", "mixed_bfloat16", "another")],
            id="two tasks",
        ),
        pytest.param([without_numbers("float32"), row(speed_up=None, layer_output_ratio=None)], id="no baseline"),
    ],
)
@pytest.mark.slow
def test_picture_is_1600_pixels_wide(tmp_path, rows):
    tasks = {task.name: task for task in (DIGITS, TEXT)}
    records = [
        curve(row["policy"], 0.5, 0.75 + seed / 10, task=tasks[row["task"]])
        for row in rows
        for seed in range(row["seeds"])
    ]
    summary.save_picture(tmp_path / "demo.png", rows, records, dict.fromkeys(tasks, "title"), "heading")
    content = (tmp_path / "demo.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (1600, 1150)  # width and height in the header chunk


@NEEDS_MATPLOTLIB
def test_what_was_left_out_is_drawn_with_its_first_step(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    rows = [row("float32", seeds=2), row("mixed_bfloat16", seeds=1, shortened="1 of 2"), LEFT_OUT]
    records = [curve("float32", 0.5), curve("float32", 0.6), curve("mixed_bfloat16", 0.5)]
    summary.save_picture(tmp_path / "demo.png", rows, records, {"text": "title"}, "heading")
    curves, _, speed, memory = figures[0].axes
    assert "mixed_float16 (left out)" in curves.get_legend_handles_labels()[1]
    assert "of 1 to 2 seeds" in curves.get_title()
    assert "0.038x (left out)" in [text.get_text() for text in speed.texts]
    assert speed.patches[-1].get_height() == 0.038
    assert "left out" in [text.get_text() for text in memory.texts]
