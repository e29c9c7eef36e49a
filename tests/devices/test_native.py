import logging
import types

import pytest

from mpkeras.devices import native
from mpkeras.devices.native import Device, choose, cpu_instruction_sets, parse_capability
from mpkeras.policies import registry


def nvidia(major, minor, name="NVIDIA"):
    return Device("gpu", name, compute_capability=(major, minor))


def amd(architecture):
    return Device("gpu", "AMD", architecture=architecture)


def cpu(*flags):
    return Device("cpu", "CPU", instruction_sets=frozenset(flags))


@pytest.mark.parametrize(
    ("devices", "backend", "expected"),
    [
        pytest.param([Device("tpu", "TPU v4")], "jax", "mixed_bfloat16", id="TPU"),
        pytest.param([nvidia(8, 0, "A100")], "tensorflow", "mixed_bfloat16", id="A100"),
        pytest.param([nvidia(9, 0, "H100")], "torch", "mixed_bfloat16", id="H100"),
        pytest.param([nvidia(7, 5, "T4")], "jax", "mixed_float16", id="T4"),
        pytest.param([nvidia(7, 0, "V100")], "torch", "mixed_float16", id="V100"),
        pytest.param([nvidia(6, 1, "GTX 1080")], "tensorflow", "float32", id="Pascal"),
        pytest.param([nvidia(8, 0), nvidia(7, 5)], "jax", "mixed_float16", id="the least able GPU decides"),
        pytest.param([nvidia(8, 0), nvidia(6, 1)], "jax", "float32", id="one GPU without 16 bits"),
        pytest.param([amd("gfx90a:sramecc+:xnack-")], "torch", "mixed_bfloat16", id="MI250"),
        pytest.param([amd("gfx908")], "jax", "mixed_bfloat16", id="MI100"),
        pytest.param([amd("gfx942")], "torch", "mixed_bfloat16", id="MI300"),
        pytest.param([amd("gfx1100")], "torch", "mixed_bfloat16", id="RDNA3"),
        pytest.param([amd("gfx906")], "torch", "mixed_float16", id="MI50"),
        pytest.param([amd("gfx803")], "torch", "float32", id="older AMD"),
        pytest.param([Device("gpu", "Apple GPU")], "torch", "float32", id="unknown GPU"),
        pytest.param([nvidia(7, 5), cpu("avx512_bf16")], "tensorflow", "mixed_float16", id="GPU before CPU"),
        pytest.param([cpu("avx2", "avx512_bf16")], "tensorflow", "mixed_bfloat16", id="CPU with AVX512-BF16"),
        pytest.param([cpu("amx_bf16")], "tensorflow", "mixed_bfloat16", id="CPU with AMX"),
        pytest.param([cpu("avx2", "avx512f")], "tensorflow", "float32", id="CPU without bfloat16"),
        pytest.param([cpu("avx512_bf16")], "jax", "float32", id="JAX on CPU"),
        pytest.param([cpu("avx512_bf16")], "torch", "float32", id="torch on CPU"),
        pytest.param([cpu("amx_bf16"), cpu("avx2")], "tensorflow", "float32", id="one CPU of two"),
        pytest.param([], "tensorflow", "float32", id="nothing known"),
        pytest.param([], "tensorflow", "float32", id="nothing known"),
    ],
)
def test_choice(devices, backend, expected):
    name, reason = choose(devices, backend)
    assert name == expected
    assert reason


def test_reason_names_the_device_and_its_capability():
    assert "T4 (compute capability 7.5)" in choose([nvidia(7, 5, "T4")], "jax")[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("model: x\nflags\t\t: fpu amx_bf16\nflags\t\t: fpu\n", {"fpu", "amx_bf16"}, id="x86"),
        pytest.param("Features\t: fp bf16\n", {"fp", "bf16"}, id="ARM"),
        pytest.param("nothing here\n", set(), id="no flags"),
    ],
)
def test_cpu_instruction_sets(tmp_path, text, expected):
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_instruction_sets(str(tmp_path / "cpuinfo")) == expected


def test_cpu_instruction_sets_where_there_is_no_such_file(tmp_path):
    assert cpu_instruction_sets(str(tmp_path / "missing")) == frozenset()


@pytest.mark.parametrize(("text", "expected"), [("8.0", (8, 0)), ("12.1", (12, 1)), ("gfx90a", None), ("", None)])
def test_parse_capability(text, expected):
    assert parse_capability(text) == expected


def test_devices_of_this_machine(backend):
    devices = native.probe(backend)
    assert devices
    assert {device.kind for device in devices} <= {"tpu", "gpu", "cpu"}


def test_resolved_once_when_first_asked_for_and_logged(monkeypatch, caplog):
    calls = []
    monkeypatch.setattr(native, "probe", lambda backend: calls.append(backend) or [nvidia(7, 5, "T4")])
    registry.REGISTERED["mixed_auto"] = registry._resolve_mixed_auto
    assert registry.registered_policies()[-1] == "mixed_auto" and not calls
    with caplog.at_level(logging.INFO, logger="mpkeras"):
        policies = [registry.get_policy("mixed_auto") for _ in range(2)]
    assert len(calls) == 1
    assert policies[0] == policies[1]
    assert (policies[0].name, policies[0].compute_dtype) == ("mixed_auto", "float16")
    assert policies[0].loss_scale is not None
    assert "T4" in policies[0].reason
    assert ["mixed_auto is mixed_float16" in record.getMessage() for record in caplog.records] == [True]


A100 = Device("gpu", "A100", compute_capability=(8, 0))


@pytest.mark.backends("tensorflow")
@pytest.mark.parametrize(
    ("visible", "details", "expected"),
    [
        pytest.param({"TPU": ["t"]}, {}, [Device("tpu", "TPU")], id="TPU"),
        pytest.param({"GPU": ["g"]}, {"device_name": "A100", "compute_capability": (8, 0)}, [A100], id="NVIDIA GPU"),
        pytest.param({"GPU": ["g"]}, {}, [Device("gpu", "GPU")], id="GPU that says nothing"),
        pytest.param({}, {}, [], id="none"),
    ],
)
def test_accelerators_of_tensorflow(monkeypatch, visible, details, expected):
    import tensorflow as tf

    from mpkeras.devices import _tensorflow

    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: visible.get(kind, []))
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda device: details)
    assert _tensorflow.accelerators() == expected


@pytest.mark.backends("jax")
@pytest.mark.parametrize(
    ("device", "expected"),
    [
        pytest.param({"platform": "tpu", "device_kind": "TPU v4"}, [Device("tpu", "TPU v4")], id="TPU"),
        pytest.param({"platform": "gpu", "device_kind": "A100", "compute_capability": "8.0"}, [A100], id="NVIDIA GPU"),
        pytest.param(
            {"platform": "gpu", "device_kind": "AMD", "compute_capability": "gfx90a"},
            [amd("gfx90a")],
            id="AMD GPU",
        ),
        pytest.param({"platform": "cpu", "device_kind": "cpu"}, [], id="CPU"),
    ],
)
def test_accelerators_of_jax(monkeypatch, device, expected):
    import jax

    from mpkeras.devices import _jax

    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(**device)])
    assert _jax.accelerators() == expected


@pytest.mark.backends("torch")
@pytest.mark.parametrize(
    ("hip", "properties", "expected"),
    [
        pytest.param(None, {"name": "A100", "major": 8, "minor": 0}, [A100], id="NVIDIA GPU"),
        pytest.param("6.0", {"name": "AMD", "gcnArchName": "gfx90a"}, [amd("gfx90a")], id="AMD GPU"),
        pytest.param(None, None, [], id="CPU"),
    ],
)
def test_accelerators_of_torch(monkeypatch, hip, properties, expected):
    import torch

    from mpkeras.devices import _torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: properties is not None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(**properties))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert _torch.accelerators() == expected
