"""The devices that a program can be compiled for: names, and what the compiler is told."""

import os

import pytest

from mpkeras.tools.forecast.targets import NAMES, TARGETS, find_target

# Knows no backend.
pytestmark = pytest.mark.backends("tensorflow")


@pytest.mark.parametrize(
    ("name", "found"), [("H100", "h100"), ("tpu-v5e", "v5e"), ("TPU_v6e", "v6e"), ("tpu v5p", "v5p"), ("cpu", "cpu")]
)
def test_a_name_is_found_however_it_is_written(name, found):
    assert find_target(name).name == found


def test_the_cpu_has_the_memory_of_this_machine(monkeypatch):
    assert find_target("cpu").memory_bytes > 2**28
    sizes = {"SC_PAGE_SIZE": 2**12, "SC_PHYS_PAGES": 2**21}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    assert find_target("cpu").memory_bytes == 2**33

    def unknown(name):
        raise ValueError("unrecognized configuration name")

    monkeypatch.setattr(os, "sysconf", unknown)
    assert find_target("cpu").memory_bytes == 0


@pytest.mark.parametrize(("name", "nearest"), [("h10", "'h100'"), ("a10", "'a100'"), ("tpu-v5", "'v5p'|'v5e'")])
def test_a_name_that_is_unknown_names_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=f"Received: '{name}'. Did you mean ({nearest})[?] Pass one of t4, a100"):
        find_target(name)


def test_what_is_no_device():
    with pytest.raises(TypeError, match="Expected `device` to be the name of a device. Received: 100 of type int"):
        find_target(100)
    with pytest.raises(ValueError, match="Expected at most 256 devices of TPU v6e. Received: 257"):
        TARGETS["v6e"].topology(257)


def test_16_bits_are_faster_where_there_are_units_for_them():
    for target in TARGETS.values():
        rates = target.matrix_rates
        if target.platform == "cuda":
            assert rates["float16"] >= 2 * rates["float32"] * 0.99
            # Turing has no units for bfloat16, https://docs.nvidia.com/cuda/cuda-c-programming-guide table 23.
            assert (rates["bfloat16"] == rates["float16"]) == (target.multiprocessors.capability >= (8, 0))
            assert ("float8" in rates) == (target.multiprocessors.capability >= (8, 9))
        assert 10e9 < target.memory_bytes < 200e9 and 0.2e12 < target.bandwidth <= 8e12


def test_the_description_of_a_gpu():
    text = TARGETS["l4"].description()
    for line in ("core_count: 58", "memory_bandwidth: 300000000000", "clock_rate_ghz: 2.04", "major: 8 minor: 9"):
        assert line in text
    assert "feature_extension: NONE" in text
    assert "feature_extension: ACCELERATED_FEATURES" in TARGETS["h200"].description()


@pytest.mark.parametrize(
    ("device", "devices", "topology"),
    [("a100", 8, "1x1x8"), ("v5e", 1, "v5e:2x2"), ("v5e", 8, "v5e:2x4"), ("v5p", 5, "v5p:2x2x2")],
)
def test_the_smallest_arrangement_of_so_many_devices(device, devices, topology):
    assert TARGETS[device].topology(devices) == topology


def test_the_names():
    assert NAMES == ("t4", "a100", "l4", "h100", "h200", "b200", "v5e", "v5p", "v6e", "cpu")
