"""benchmarks/before_after.py: the process that is timed."""

import io
import json

import keras
import pytest

import before_after as benchmark
import before_after_steps as steps

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")


@pytest.mark.slow
def test_a_process_times_the_step_that_it_is_asked_for():
    mode = benchmark.MODES[keras.backend.backend()][0][0]
    case = {"benchmark": "loss_scale_overhead", "mode": mode, "jit_compile": False, "params": 1000}
    said: list = []
    steps.answer(io.StringIO("\n".join(map(json.dumps, (case, "mpkeras", "bare", "environment")))), said.append)
    ready, *times_ms, environment = said
    assert ready == "ready" and all(time_ms > 0 for time_ms in times_ms) and len(times_ms) == 2
    assert environment["backend"] == keras.backend.backend()
