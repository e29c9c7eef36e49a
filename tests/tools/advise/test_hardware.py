"""P2, P34: what each device does natively, and what is made of it; with devices that are not here."""

import json
import sys

import keras
import pytest

import mpkeras
from _mpkeras_cli import main
from mpkeras.devices.native import Device, native_dtypes
from mpkeras.tools.advise import hardware
from mpkeras.tools.advise.hardware import HardwareReport
from mpkeras.tools.shared.report import text_table

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")

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
    native = [device["native_dtypes"] for device in found["devices"]]
    assert native == [["float32", "float16"], ["float32", "bfloat16", "float16"]]
    assert (found["policy"], found["backend"]) == ("mixed_float16", "tensorflow")
    pytest.importorskip("matplotlib")
    (axes,) = HardwareReport("jax", [EPYC, A100]).plot().axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["CPU", "A100"]
    assert [text.get_text() for text in axes.texts] == ["native", "native", "-", "native", "native", "native"]


XEON = Device("cpu", "CPU", instruction_sets=frozenset({"amx_bf16", "avx512_fp16"}))


def test_what_the_probe_finds_slower_is_not_called_native():
    report = HardwareReport("tensorflow", [XEON, A100], speeds={"bfloat16": 1.0, "float16": 0.99})
    found = [device["native_dtypes"] for device in report.to_dict()["devices"]]
    # The probe says nothing about a GPU.
    assert found == [["float32", "bfloat16"], ["float32", "bfloat16", "float16"]]
    text = str(report)
    assert "is 1.00 times as fast in bfloat16, 0.99 times as fast in float16." in text
    assert "instructions for float16, which tensorflow gains nothing from: not called native." in text
    assert report.to_dict()["probed_speeds"] == {"bfloat16": 1.0, "float16": 0.99}
    assert "The probe did not find that faster" not in text
    slow = HardwareReport("tensorflow", [XEON], speeds={"bfloat16": 0.99, "float16": 0.99})
    assert "the CPU has amx_bf16, which TensorFlow uses. The probe did not find that faster: `mpkeras.adv" in str(slow)
    unprobed = HardwareReport("tensorflow", [XEON])
    assert unprobed.to_dict()["devices"][0]["native_dtypes"] == ["float32", "bfloat16", "float16"]
    assert "Probed" not in str(unprobed)
    pytest.importorskip("matplotlib")
    assert [text.get_text() for text in report.plot().axes[0].texts][:3] == ["native", "native", "-"]


def test_the_probe_takes_the_fastest_round_but_for_the_first_once_in_a_process(monkeypatch):
    clock, products = [0.0], []
    # Seconds of each round; the first compiles.
    seconds = {"float32": [9, 3, 2, 3, 3, 3], "bfloat16": [0.1, 1, 1, 1, 1, 8], "float16": [9, 8, 8, 8, 8, 4]}

    def matmul(a, b):
        dtype = keras.backend.standardize_dtype(a.dtype)
        clock[0] += seconds[dtype][products.count(dtype)]
        products.append(dtype)
        return a

    monkeypatch.setattr(hardware.ops, "matmul", matmul)
    monkeypatch.setattr(hardware.time, "perf_counter", lambda: clock[0])
    hardware.probed_speeds.cache_clear()
    try:
        for _ in range(2):
            assert hardware.probed_speeds(("bfloat16", "float16")) == {"bfloat16": 2.0, "float16": 0.5}
    finally:
        hardware.probed_speeds.cache_clear()
    assert len(products) == 18 and products[:3] == ["float32", "bfloat16", "float16"]


def test_of_this_process_what_is_native_is_what_was_probed(monkeypatch, backend):
    """On a CPU with all instructions, whichever this is; what is native there depends on the probe alone."""
    monkeypatch.setattr(hardware.native, "probe", lambda name: [XEON] if name == backend else [])
    monkeypatch.setattr(hardware, "probed_speeds", lambda dtypes: {"bfloat16": 0.5, "float16": 2.0} if dtypes else None)
    report = mpkeras.hardware()
    assert report.devices == [XEON] and report.backend == backend
    assert report.to_dict()["devices"][0]["native_dtypes"] == ["float32", "float16"]
    assert report.to_dict()["versions"]["keras"] == keras.version()
    # Nothing to probe on a GPU, or on a CPU without such instructions.
    monkeypatch.setattr(hardware, "probed_speeds", lambda dtypes: pytest.fail(f"probed {dtypes}"))
    for device in (A100, Device("cpu", "CPU")):
        monkeypatch.setattr(hardware.native, "probe", lambda name, device=device: [device])
        assert mpkeras.hardware().speeds == {}


def test_the_command(capsys, backend):
    assert main(["hardware", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["backend"] == backend
    assert main(["hardware"]) == 0
    printed = capsys.readouterr().out
    assert f" on the {backend} backend: " in printed and printed.startswith("Devices and what they multiply")


def test_tables():
    header, rows = ["Name", "Value"], [["a", "[1]"], ["longer", "22"]]
    drawn = text_table(header, rows, "Title", left_columns=1)
    assert drawn.splitlines() == ["Title", "", "Name    Value", "──────  ─────", "a         [1]", "longer     22"]
    drawn = text_table(["Step\nms"], [["1"]], "Title")
    assert drawn.splitlines() == ["Title", "", "Step", "ms", "────", "1"]


def test_a_figure_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match="Run `pip install matplotlib`"):
        mpkeras.hardware().plot()
