"""P2, P34: what each device does natively, and what is made of it; with devices that are not here."""

import json

import keras
import pytest

import mpkeras
from mpkeras.cli import main
from mpkeras.insight.hardware import HardwareReport, native_dtypes
from mpkeras.insight.report import plain_text, rich_text
from mpkeras.policies.auto import Device

A100 = Device("gpu", "A100", compute_capability=(8, 0))
V100 = Device("gpu", "V100", compute_capability=(7, 0))
P100 = Device("gpu", "P100", compute_capability=(6, 0))
EPYC = Device("cpu", "CPU", instruction_sets=frozenset({"avx2", "avx512_bf16"}))


@pytest.mark.parametrize(
    ("device", "dtypes"),
    [
        pytest.param(A100, {"float32", "bfloat16", "float16"}, id="NVIDIA 8.0"),
        pytest.param(V100, {"float32", "float16"}, id="NVIDIA 7.0"),
        pytest.param(P100, {"float32"}, id="NVIDIA 6.0"),
        pytest.param(Device("tpu", "TPU v4"), {"float32", "bfloat16"}, id="TPU"),
        pytest.param(
            Device("gpu", "MI250", architecture="gfx90a:sramecc+"), {"float32", "bfloat16", "float16"}, id="MI250"
        ),
        pytest.param(Device("gpu", "Vega", architecture="gfx900"), {"float32", "float16"}, id="Vega"),
        pytest.param(Device("gpu", "Apple GPU"), {"float32"}, id="unknown"),
        pytest.param(EPYC, {"float32", "bfloat16"}, id="AVX512-BF16"),
        pytest.param(Device("cpu", instruction_sets=frozenset({"amx_fp16"})), {"float32", "float16"}, id="AMX-FP16"),
        pytest.param(
            Device("cpu", instruction_sets=frozenset({"bf16", "asimdhp"})), {"float32", "bfloat16", "float16"}, id="ARM"
        ),
        pytest.param(Device("cpu"), {"float32"}, id="plain CPU"),
    ],
)
def test_native_dtypes(device, dtypes):
    assert set(native_dtypes(device)) == dtypes


def test_the_report_says_what_it_chose_and_why():
    report = HardwareReport("tensorflow", [V100, A100])
    text = str(report)
    assert "compute capability 7.0" in text and "float32, float16" in text
    # all compute the same model: the least able one decides
    assert "mixed_auto is mixed_float16 on the tensorflow backend: V100 (compute capability 7.0)" in text
    found = json.loads(json.dumps(report.to_dict()))
    assert [device["native_dtypes"] for device in found["devices"]] == [
        ["float32", "float16"],
        ["float32", "bfloat16", "float16"],
    ]
    assert (found["policy"], found["backend"]) == ("mixed_float16", "tensorflow")


def test_the_figure_has_a_row_for_each_device():
    pytest.importorskip("matplotlib")
    (axes,) = HardwareReport("jax", [EPYC, A100]).plot().axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["CPU", "A100"]
    assert [text.get_text() for text in axes.texts] == ["native", "native", "-", "native", "native", "native"]


def test_of_this_process(backend):
    report = mpkeras.hardware()
    assert report.backend == backend
    assert report.devices and all("float32" in native_dtypes(device) for device in report.devices)
    assert report.to_dict()["versions"]["keras"] == keras.version()


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_the_command(capsys, flags, backend):
    assert main(["hardware", *flags]) == 0
    printed = capsys.readouterr().out
    assert (json.loads(printed)["backend"] if flags else printed.split(" on the ")[1].split(" backend")[0]) == backend


def test_tables_with_and_without_rich():
    header, rows = ["Name", "Value"], [["a", "[1]"], ["longer", "22"]]
    plain = plain_text(header, rows, "Title", left_columns=1)
    assert plain.splitlines() == ["Title", "", "Name    Value", "------  -----", "a         [1]", "longer     22"]
    pytest.importorskip("rich")
    drawn = rich_text(header, rows, "Title")
    assert drawn.splitlines()[0] == "Title"
    assert [line.split() for line in drawn.splitlines() if "a " in line or "longer" in line] == rows
