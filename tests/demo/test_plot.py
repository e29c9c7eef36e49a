import struct

import pytest

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")

pytest.importorskip("matplotlib")

from mpkeras.demo import plot  # noqa: E402


def row(task, policy, **changes):
    return {
        "task": task,
        "policy": policy,
        "quality_name": "held-out accuracy",
        "higher_is_better": True,
        "seeds": 2,
        "error": None,
        "speed_up": 1.5,
        "speed_up_low": 1.4,
        "speed_up_high": 1.7,
        "layer_output_ratio": 0.6,
        **changes,
    }


def record(task, policy, *quality):
    return {"task": task, "policy": policy, "error": None, "history": {"quality": list(quality)}}


def failed_row(task, policy):
    return {
        "task": task,
        "policy": policy,
        "quality_name": "held-out accuracy",
        "higher_is_better": True,
        "seeds": 0,
        "error": "no kernel",
    }


def png_size(path):
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", content[16:24])  # width and height in the header chunk


@pytest.mark.parametrize("tasks", [["digits"], ["digits", "text"]])
def test_picture_is_1600_pixels_wide(tmp_path, tasks):
    rows = [row(task, policy) for task in tasks for policy in ("float32", "mixed_bfloat16", "another")]
    records = [record(r["task"], r["policy"], 0.5, 0.75 + seed / 10) for r in rows for seed in range(2)]
    plot.save(tmp_path / "demo.png", rows, records, dict.fromkeys(tasks, "title"), "heading")
    assert png_size(tmp_path / "demo.png") == (1600, 1150)


def test_cases_that_did_not_run_and_single_seeds_are_drawn(tmp_path):
    rows = [row("digits", "float32", seeds=1), failed_row("digits", "mixed_float16")]
    records = [
        record("digits", "float32", 0.5),
        {"task": "digits", "policy": "mixed_float16", "error": "no kernel"},
    ]
    plot.save(tmp_path / "demo.png", rows, records, {"digits": "title"}, "heading")
    assert png_size(tmp_path / "demo.png") == (1600, 1150)


def test_what_was_left_out_is_drawn_with_its_first_step(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path: figures.append(figure))
    left_out = {**failed_row("digits", "mixed_float16"), "error": None, "shortened": "left out: ..."}
    rows = [row("digits", "float32"), row("digits", "mixed_bfloat16", seeds=1, shortened="1 of 2"), left_out]
    left_out["first_step_ratio"] = 0.038
    records = [
        record("digits", "float32", 0.5),
        record("digits", "float32", 0.6),
        record("digits", "mixed_bfloat16", 0.5),
    ]
    plot.save(tmp_path / "demo.png", rows, records, {"digits": "title"}, "heading")
    curves, _, speed, memory = figures[0].axes
    assert "mixed_float16 (left out)" in curves.get_legend_handles_labels()[1]
    assert "of 1 to 2 seeds" in curves.get_title()
    assert "0.038x (left out)" in [text.get_text() for text in speed.texts]
    assert speed.patches[-1].get_height() == 0.038
    assert "left out" in [text.get_text() for text in memory.texts]


def test_a_baseline_that_did_not_run_is_drawn(tmp_path):
    rows = [failed_row("digits", "float32"), row("digits", "mixed_float16", speed_up=None)]
    del rows[1]["layer_output_ratio"]
    records = [record("digits", "mixed_float16", 0.5, 0.6)]
    plot.save(tmp_path / "demo.png", rows, records, {"digits": "title"}, "heading")
    assert png_size(tmp_path / "demo.png") == (1600, 1150)
