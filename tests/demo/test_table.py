import sys

import pytest

from mpkeras.demo import table


def row(policy, **changes):
    return {
        "task": "text",
        "policy": policy,
        "quality_name": "held-out bits per byte",
        "error": None,
        "quality_mean": 3.00449,
        "quality_std": 0.0151,
        "step_time_ms": 40.25,
        "speed_up": 1.496,
        "skipped_steps": 2,
        "loss_scale_min": 8192.0,
        "loss_scale_max": 32768.0,
        "layer_output_bytes": 9 * 2**20 + 2**19,
        "xla_temporary_bytes": None,
        "missing_kernels": [],
        "seeds": 3,
        "shortened": None,
        **changes,
    }


FAILED = {
    "task": "text",
    "policy": "mixed_float16",
    "quality_name": "held-out bits per byte",
    "error": "NotImplementedError: no kernel",
    "seeds": 0,
    "shortened": None,
}
LEFT_OUT = {
    **FAILED,
    "error": None,
    "shortened": "left out: at 993 ms",
    "first_step_ms": 993.4,
    "first_step_ratio": 0.038,
}


def test_cells():
    header, (cells,), footnotes = table.columns([row("mixed_bfloat16")])
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
        pytest.param({"quality_std": None}, "Quality", "3.004", id="one seed"),
        pytest.param({"quality_mean": float("nan"), "quality_std": None}, "Quality", "nan", id="diverged"),
        pytest.param({"speed_up": None}, "Speed", "-", id="no baseline"),
        pytest.param({"loss_scale_max": 8192.0}, "Loss scale", "8192", id="one loss scale"),
        pytest.param({"xla_temporary_bytes": 2**20}, "XLA temporaries", "1.0 MiB", id="XLA tells"),
    ],
)
def test_cells_of_special_cases(changes, column, expected):
    header, (cells,), _ = table.columns([row("mixed_bfloat16", **changes)])
    assert dict(zip(header, cells, strict=True))[column] == expected


def test_what_did_not_run_gets_a_footnote_with_the_reason():
    header, lines, footnotes = table.columns([row("float32"), FAILED])
    assert lines[1] == ["text (bits/byte)", "mixed_float16", "not run (1)", "-", "-", "-", "-", "-"]
    assert len(lines[1]) == len(header)
    assert footnotes == ["(1) text, mixed_float16: NotImplementedError: no kernel"]


def test_what_was_shortened_or_left_out_gets_a_footnote_and_its_first_step():
    fewer = row("mixed_bfloat16", seeds=1, shortened="1 of 3 runs: at 400 ms")
    header, lines, footnotes = table.columns([fewer, LEFT_OUT])
    assert lines[0][2] == "3.004 ± 0.015 (1)"
    assert lines[1] == ["text (bits/byte)", "mixed_float16", "left out (2)", "993", "0.04x", "-", "-", "-"]
    assert len(lines[1]) == len(header)
    assert footnotes == [
        "(1) text, mixed_bfloat16: 1 of 3 runs: at 400 ms",
        "(2) text, mixed_float16: left out: at 993 ms",
    ]


def test_layers_without_a_kernel_get_a_footnote_and_no_mark():
    kept = row("mixed_float16", missing_kernels=[["MultiHeadAttention", "raises in float16 here"]])
    _, lines, footnotes = table.columns([kept, FAILED])
    assert footnotes == [
        "text, mixed_float16: MultiHeadAttention stays in float32, as it raises in float16 here",
        "(1) text, mixed_float16: NotImplementedError: no kernel",
    ]
    assert [cells[2] for cells in lines] == ["3.004 ± 0.015", "not run (1)"]


def test_plain_text():
    header = ["Task", "Policy", "Quality"]
    lines = [["text", "float32", "3.0"], ["text", "mixed_bfloat16", "12.25"]]
    assert table.plain_text(header, lines, "On this machine", left_columns=2).splitlines() == [
        "On this machine",
        "",
        "Task  Policy          Quality",
        "----  --------------  -------",
        "text  float32             3.0",
        "text  mixed_bfloat16    12.25",
    ]


@pytest.mark.parametrize("with_rich", [True, False])
def test_all_cells_reasons_and_notes_are_shown(monkeypatch, with_rich):
    if with_rich:
        pytest.importorskip("rich")
    else:
        monkeypatch.setitem(sys.modules, "rich", None)
    text = table.render([row("float32"), row("mixed_bfloat16"), FAILED], "On this machine", "3")
    for wanted in (
        "On this machine",
        "float32",
        "mixed_bfloat16",
        "3.004 ± 0.015",
        "1.50x",
        "8192 to 32768",
        "9.5 MiB",
        "not run (1)",
        "(1) text, mixed_float16: NotImplementedError: no kernel",
        "median of 3 training steps,",
    ):
        assert wanted in text
    assert ("─" in text) == with_rich
    assert "left out: the" not in text
    text = table.render([row("float32"), LEFT_OUT], "On this machine", "3")
    assert "left out: the second training step" in " ".join(text.split())


@pytest.mark.parametrize(
    ("policy", "temporary_bytes", "widest"),
    [
        pytest.param("mixed_bfloat16", None, 80, id="fits"),
        pytest.param("mixed_bfloat16", 2**20, 90, id="a column more"),
        pytest.param("mixed_bfloat16_as_we_use_it_here", None, 100, id="long name"),
    ],
)
def test_nothing_is_cut_off_in_a_narrow_terminal(policy, temporary_bytes, widest):
    pytest.importorskip("rich")
    rows = [row(policy, loss_scale_max=8192.0, step_time_ms=234.5, xla_temporary_bytes=temporary_bytes)]
    text = table.render(rows, "On this machine", "3", width=80)
    (line,) = [line for line in text.splitlines() if "MiB" in line]
    wanted = ["text", policy, "3.004 ± 0.015", "234.5", "1.50x", "2", "8192", "9.5 MiB"]
    assert " ".join(line.split()).startswith(" ".join(wanted))
    assert max(len(line) for line in text.splitlines()) <= widest
