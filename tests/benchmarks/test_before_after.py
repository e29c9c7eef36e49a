"""benchmarks/before_after.py: what it times, what it calls slower, and the process that is timed."""

import io
import json

import keras
import pytest

import before_after as benchmark
import before_after_steps as steps

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")


def result(ratio, variant="mpkeras", backend="jax", name="train_step_overhead"):
    return {"backend": backend, "benchmark": name, "variant": variant, "ratio": {"median": ratio}}


@pytest.mark.parametrize(
    ("ratio", "of_bare", "expected"),
    [
        pytest.param(1.02, 1.0, False, id="at the tolerance"),
        pytest.param(1.03, 1.0, True, id="above it"),
        pytest.param(1.03, 1.03, False, id="as far as the step without mpkeras"),
        pytest.param(1.04, 1.03, True, id="further"),
    ],
)
def test_slower_is_what_noise_does_not_explain(ratio, of_bare, expected):
    results = [result(ratio), result(of_bare, "bare"), result(1.5, "bare", backend="torch")]
    assert (results[0] in benchmark.slower(results)) == expected
    assert not any(benchmark.is_noise(found) for found in benchmark.slower(results))


def test_bare_of_the_rollback_has_code_of_mpkeras():
    results = [result(1.0, "bare"), result(1.1, "bare", name="rollback_overhead")]
    assert benchmark.slower(results) == results[1:]


def test_every_mode_is_timed_with_every_model():
    found = benchmark.cases("tensorflow", ["cnn", "lstm"])
    assert {case["mode"] for case in found} == {"tensorflow graph", "tensorflow XLA"}
    assert len(found) == 2 * (2 * 2 + len(benchmark.PARAMETERS))


def test_what_is_no_commit_is_named(tmp_path):
    with pytest.raises(SystemExit, match=r"Expected a commit\. Received: no-such-commit"):
        benchmark.check_out("no-such-commit", str(tmp_path))


@pytest.mark.slow
def test_a_process_times_the_step_that_it_is_asked_for():
    mode = benchmark.MODES[keras.backend.backend()][0][0]
    case = {"benchmark": "loss_scale_overhead", "mode": mode, "jit_compile": False, "params": 1000}
    said: list = []
    steps.answer(io.StringIO("\n".join(map(json.dumps, (case, "mpkeras", "bare", "environment")))), said.append)
    ready, *times_ms, environment = said
    assert ready == "ready" and all(time_ms > 0 for time_ms in times_ms) and len(times_ms) == 2
    assert environment["backend"] == keras.backend.backend()
