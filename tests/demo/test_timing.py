import keras
import numpy as np
import pytest

from mpkeras.demo import timing

X = np.arange(14, dtype="float32").reshape(7, 2)


class FakeModel:
    """Notes the batches it takes and moves a clock on by `seconds` a step."""

    def __init__(self, name, seconds, clock, calls):
        self.name, self.seconds, self.clock, self.calls = name, seconds, clock, calls

    def train_on_batch(self, x, y):
        self.calls.append((self.name, x[0, 0], len(x), len(y)))
        self.clock[0] += self.seconds


@pytest.fixture
def fakes(monkeypatch):
    clock, calls = [0.0], []
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(timing, "prepare", lambda model, policy: calls.append(("prepare", policy)))
    slow, fast = FakeModel("a", 0.5, clock, calls), FakeModel("b", 0.25, clock, calls)
    return {"float32": slow, "mixed_float16": fast}, calls


def test_each_model_has_its_own_times_in_milliseconds_and_no_warm_up(fakes):
    models, _ = fakes
    times = timing.interleaved_step_times(models, X, X, batch_size=3, rounds=2)
    assert times == {"float32": [500.0, 500.0], "mixed_float16": [250.0, 250.0]}


def test_models_take_turns_on_the_same_full_batches(fakes, monkeypatch):
    monkeypatch.setattr(timing, "WARM_UP_ROUNDS", 1)
    models, calls = fakes
    timing.interleaved_step_times(models, X, X, batch_size=3, rounds=2)
    assert calls == [
        ("a", 0.0, 3, 3),
        ("b", 0.0, 3, 3),
        ("b", 6.0, 3, 3),
        ("a", 6.0, 3, 3),  # the seventh example fills no batch
        ("a", 0.0, 3, 3),
        ("b", 0.0, 3, 3),
    ]


def test_the_first_step_compiles_and_the_second_does_not(fakes):
    models, calls = fakes
    model = models["mixed_float16"]
    model.seconds = 4.0

    def faster_from_now_on(x, y, train_on_batch=model.train_on_batch):
        train_on_batch(x, y)
        model.seconds = 0.5

    model.train_on_batch = faster_from_now_on
    first = timing.first_steps(model, "mixed_float16", X, X, batch_size=3)
    assert (first.compile_s, first.step_s) == (3.5, 0.5)
    assert calls == [("prepare", "mixed_float16"), ("b", 0.0, 3, 3), ("b", 0.0, 3, 3)]
    # A second step that is slower by chance: no compiling.
    model.train_on_batch = lambda x, y: setattr(fakes[0]["float32"], "seconds", 1.0)
    assert timing.first_steps(model, "mixed_float16", X, X, batch_size=3).compile_s == 0.0


def test_a_real_model_is_timed_under_its_policy(backend):
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(2)(inputs))
    model.compile("sgd", "mse", jit_compile=backend == "jax")
    first = timing.first_steps(model, "mixed_float16", X / 14, X / 14, batch_size=3)
    assert first.step_s > 0 and first.compile_s >= 0
    times = timing.interleaved_step_times({"mixed_float16": model}, X / 14, X / 14, batch_size=3, rounds=2)
    assert len(times["mixed_float16"]) == 2
    assert min(times["mixed_float16"]) > 0
    assert model.layers[-1].compute_dtype == "float16"
    assert int(model.optimizer.iterations) == 2 + timing.WARM_UP_ROUNDS + 2
