"""benchmarks/peers.py: all libraries that are installed here do the same arithmetic, and others are named."""

import json
import warnings

import keras
import numpy as np
import pytest

import peers as benchmark
from peers_keras import Sizes

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")

BACKEND = keras.backend.backend()
SMALL = Sizes(hidden=1, width=16, classes=10, batch_size=8)
HERE, _ = benchmark.find_peers(BACKEND, benchmark.NAMES)


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        # What jmp, flax and tf_keras use of their own dependencies is their affair.
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize(
    ("part", "name", "baseline"),
    [
        pytest.param("optimizer", "jmp + optax.adam", "optax.adam", id="its own Adam"),
        pytest.param("optimizer", "optax.adam", "optax.adam", id="that Adam itself"),
        pytest.param("training", "jmp + optax.adam", "mpkeras loop", id="a loop"),
        pytest.param("training", "keras train_on_batch", "mpkeras train_on_batch", id="train_on_batch"),
    ],
)
def test_baseline(part, name, baseline):
    assert benchmark.baseline_of(part, name) == baseline


@pytest.mark.slow
def test_losses_of_all_libraries_agree():
    for mode, steps, _ in benchmark.training_cases(BACKEND, HERE, SMALL):
        losses = {name: [step() for _ in range(3)] for name, step in steps.items()}
        expected = losses["mpkeras loop"]
        assert expected[2] < expected[0]
        for name, found in losses.items():
            # bfloat16 has 8 significant bits, and each library rounds in other places.
            assert found == pytest.approx(expected, rel=1e-2), (mode, name)


@pytest.mark.backends("jax")  # The other backends' steps keep their weights to themselves.
def test_optimizers_do_the_same_update():
    ((_, steps, _),) = benchmark.optimizer_cases(BACKEND, HERE, params=400)
    weights = {name: [np.asarray(array) for array in step()[0]] for name, step in steps.items()}
    for name, found in weights.items():
        # Where epsilon is added, 1e-7 beside 1, differs.
        np.testing.assert_allclose(found, weights["keras Adam"], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_the_optimizer_of_every_library_is_measured():
    content = json.loads(json.dumps(benchmark.measure(BACKEND, ["optimizer"], benchmark.NAMES, params=400, rounds=1)))
    measured = [entry for entry in content["results"] if "absent" not in entry]
    assert {entry["mode"] for entry in measured} == {mode for mode, _ in benchmark.MODES[BACKEND]}
    for entry in measured:
        assert entry["time_ms"]["median"] > 0
        assert entry["variant"] in benchmark.BARE or entry["ratio"]["median"] == 1.0
    assert {"keras LossScaleOptimizer", "mpkeras LossScaleOptimizer"} < {entry["variant"] for entry in measured}
    assert content["environment"]["versions"].keys() >= {"keras", "mpkeras"}


@pytest.mark.parametrize(
    ("library", "said"),
    [("no_such_library", "not installed"), ("broken_library", "not usable (ModuleNotFoundError: No module named")],
)
def test_a_library_that_is_not_there_or_broken_is_named_and_stops_no_other(library, said, monkeypatch, tmp_path):
    (tmp_path / "broken_library.py").write_text("import a_name_it_needs_in_vain")
    monkeypatch.syspath_prepend(tmp_path)
    peer = benchmark.PEERS[BACKEND][-1]
    monkeypatch.setitem(benchmark.peer_module(BACKEND).REQUIRES, peer, (library,))
    content = benchmark.measure(BACKEND, [], ["keras", peer], params=400, rounds=1)
    assert content["environment"]["versions"][library].startswith(said.partition(" (")[0])
    (row,) = benchmark.table_rows(content["results"])
    assert row["library"] == peer and row["median ms"].startswith(said) and row["ratio"] == ""


def test_only_the_peers_asked_for_run():
    for cases in (benchmark.optimizer_cases(BACKEND, [], 400), benchmark.training_cases(BACKEND, [], SMALL)):
        for _, steps, _ in cases:
            assert {name.partition(" ")[0] for name in steps} <= {"mpkeras", "keras"}
            assert "keras LossScaleOptimizer" not in steps and "keras train_on_batch" not in steps


def test_plot_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    summary = {"median": 1.5, "q1": 1.25, "q3": 2.0}
    result = {"part": "optimizer", "mode": "jax jit", "variant": "jmp", "baseline": "optax", "ratio": summary}
    path = tmp_path / "plot.png"
    benchmark.write_plot(path, [result, {"mode": "jax", "variant": "flax", "absent": "not installed"}])
    assert path.read_bytes().startswith(b"\x89PNG")
