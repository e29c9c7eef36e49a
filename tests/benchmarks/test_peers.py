"""benchmarks/peers.py: all libraries that are installed here do the same arithmetic."""

import json
import warnings

import keras
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


@pytest.mark.slow
def test_losses_of_all_libraries_agree():
    for mode, steps, _ in benchmark.training_cases(BACKEND, HERE, SMALL):
        losses = {name: [step() for _ in range(3)] for name, step in steps.items()}
        expected = losses["mpkeras loop"]
        assert expected[2] < expected[0]
        for name, found in losses.items():
            # bfloat16 has 8 significant bits, and each library rounds in other places.
            assert found == pytest.approx(expected, rel=1e-2), (mode, name)


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
