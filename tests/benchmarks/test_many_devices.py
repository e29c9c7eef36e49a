"""benchmarks/many_devices.py: what exists and what is usual, the table, and what is kept of an earlier run."""

import json

import pytest

import many_devices as benchmark

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")


def program(**others):
    collectives = [
        {"kind": "all-gather", "dtype": "bfloat16", "bytes": 3 * 2**20, "tensors": {}},
        {"kind": "all-reduce", "dtype": "float32", "bytes": 2**20, "tensors": {}},
        {"kind": "reduce-scatter", "dtype": "float32", "bytes": 2**20, "tensors": {}},
        {"kind": "all-reduce", "dtype": "int32", "bytes": 4, "tensors": {}},
        {"kind": "all-to-all", "dtype": "bfloat16", "bytes": 2**19, "tensors": {}},
    ]
    sizes = {"persistent_bytes": 2**30, "temporary_bytes": 2**31, "peak_bytes": 3 * 2**30}
    return {**sizes, "collectives": collectives, "travels_otherwise": [{}], **others}


def test_collectives_are_summed_by_what_they_do():
    place = {"model": "gpt2_small", "device": "t4", "devices": 8, "layout": "weights", "policy": "float32"}
    ours = benchmark.with_fits({**place, "who": "mpkeras", **program()})
    stock = benchmark.with_fits({**place, "who": "stock", **program(peak_bytes=2**34, travels_otherwise=None)})
    first, second = benchmark.rows_of([ours, stock])
    assert first["gathered MiB"] == "3.0 bfloat16"
    assert first["reduced MiB"] == "2.0 float32"
    assert first["otherwise MiB"] == "0.5 bfloat16"
    assert [row["not as the policy says"] for row in (first, second)] == ["1", ""]
    assert [row["fits"] for row in (first, second)] == ["yes", "no"]


def test_what_is_there_is_kept_and_what_is_missing_is_compiled(tmp_path, monkeypatch, capsys):
    def compiles(who):
        def compile_steps(case, device, count, layout, policies):
            asked.append((who, device, case.batch_size * count, layout, tuple(policies)))
            return {policy: program() for policy in policies}

        return compile_steps

    asked = []
    monkeypatch.setattr(benchmark, "compile_ours", compiles("mpkeras"))
    monkeypatch.setattr(benchmark, "compile_stock", compiles("stock"))
    options = ["--model", "gpt2_small", "--json", str(tmp_path / "found.json")]
    benchmark.main([*options, "--devices", "8", "--layout", "weights", "--policy", "float32"])
    benchmark.main([*options, "--devices", "8"])
    benchmark.main([*options, "--devices", "1", "--all", "--device", "l4"])
    mixed, every = ("mixed_bfloat16",), benchmark.POLICIES
    assert asked == [
        ("mpkeras", "h100", 16, "weights", ("float32",)),
        ("mpkeras", "h100", 16, "data", mixed),
        ("stock", "h100", 16, "data", mixed),
        ("mpkeras", "h100", 16, "weights", ("mixed_bfloat16", "bfloat16")),
        ("stock", "h100", 16, "weights", mixed),
        ("mpkeras", "h100", 16, "state", mixed),
        ("mpkeras", "l4", 2, "data", every),
        ("stock", "l4", 2, "data", every),
    ]
    results = json.loads((tmp_path / "found.json").read_text())["results"]
    assert [result["devices"] for result in results] == [8] * 7 + [1] * 6
    # A table at the end of each run, of all that is known.
    assert capsys.readouterr().out.count("gpt2_small") == 1 + 7 + 13


@pytest.mark.slow
@pytest.mark.backends("jax")
def test_tiny_steps_are_compiled_for_this_cpu():
    """A part in four of the state, and on stock Keras the same layout of the same weights, without the loss scale."""
    found = {}
    for who, compile_steps in (("mpkeras", benchmark.compile_ours), ("stock", benchmark.compile_stock)):
        for count, layout in ((1, "data"), (4, "weights")):
            steps = compile_steps(benchmark.TINY, "cpu", count, layout, ["mixed_bfloat16"])
            found[who, count] = steps["mixed_bfloat16"]
    whole, split, stock_whole, stock_split = (said["persistent_bytes"] for said in found.values())
    assert 0.25 < split / whole < 0.3
    assert 0 <= whole - stock_whole < 256 and 0 <= split - stock_split < 256
    assert all(bool(said["collectives"]) == (count > 1) for (_, count), said in found.items())
