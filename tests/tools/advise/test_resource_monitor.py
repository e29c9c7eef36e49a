"""`ResourceMonitor`: what it puts into the logs of `fit`, and who sees it."""

import contextlib
import copy
import csv
import math
import pickle
from types import SimpleNamespace

import keras
import numpy as np
import pytest

from mpkeras.callbacks import MixedPrecision, ResourceMonitor
from mpkeras.tools.advise import resource_monitor
from mpkeras.tools.advise.resource_monitor import process_peak_bytes
from tests.cases import first_quick

X = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
Y = np.zeros((20, 2), "float32")
NAMES = {"step_time_ms", "state_bytes", "peak_bytes"}
# Up to Keras 3.15 `fit` traces the step on TensorFlow for batches of any length; from 3.16 on for the batch at hand.
IS_OLD = tuple(int(part) for part in keras.__version__.split(".")[:2]) < (3, 16)
BATCH_IS_SEEN = keras.backend.backend() != "tensorflow" or not IS_OLD


def compiled(**options):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])
    model.compile("sgd", "mse", **{"metrics": ["mae"], **options})
    return model


def epoch(monitor, clock, seconds, *, number=0, together=1, validation=0.0):
    """One epoch of executions that take so many seconds each; returns its logs."""
    monitor.on_epoch_begin(number)
    for i, duration in enumerate(seconds):
        monitor.on_train_batch_begin(i * together)
        clock.now += duration
        monitor.on_train_batch_end((i + 1) * together - 1)
    if validation:
        monitor.on_test_begin()
        clock.now += validation
    logs = {}
    monitor.on_epoch_end(number, logs)
    return logs


@pytest.fixture
def clock(monkeypatch):
    """Stands for `time.perf_counter`, and moves when told."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(resource_monitor.time, "perf_counter", lambda: clock.now)
    return clock


def started(steps=None, **options):
    monitor = ResourceMonitor(**options)
    monitor.set_model(compiled())
    monitor.set_params({"epochs": 2, "steps": steps, "verbose": 0})
    monitor.on_train_begin()
    return monitor


@pytest.mark.parametrize(
    ("steps", "first", "second"),
    [
        # The first batch compiles; from the second epoch on all of them count.
        pytest.param(None, ([30.0, 2.0, 4.0], 3000.0), ([3.0, 2.0, 4.0], 3000.0), id="unknown number"),
        # The last one may be smaller, and is compiled anew.
        pytest.param(4, ([30.0, 2.0, 4.0, 20.0], 3000.0), ([1.0, 2.0, 4.0, 1.0], 2000.0), id="known number"),
        pytest.param(2, ([30.0, 20.0], math.nan), ([2.0, 2.0], 2000.0), id="two"),
        pytest.param(None, ([30.0], math.nan), ([2.0], 2000.0), id="one"),
    ],
)
def test_which_batches_count(clock, steps, first, second):
    monitor = started(steps=steps)
    for number, (seconds, expected) in enumerate((first, second)):
        found = epoch(monitor, clock, seconds, number=number)["step_time_ms"]
        assert found == pytest.approx(expected, nan_ok=True)


def test_validation_is_not_counted(clock):
    assert epoch(started(), clock, [9.0, 2.0, 2.0], validation=50.0)["step_time_ms"] == pytest.approx(2000.0)


def test_batches_of_one_execution_share_its_time(clock):
    assert epoch(started(), clock, [30.0, 8.0, 8.0], together=4)["step_time_ms"] == pytest.approx(2000.0)


def test_examples_are_those_of_a_full_batch_where_it_is_given(clock):
    monitor = started(batch_size=16)
    assert math.isnan(epoch(monitor, clock, [30.0])["examples_per_s"])
    assert epoch(started(batch_size=16), clock, [9.0, 2.0, 2.0])["examples_per_s"] == pytest.approx(8.0)
    assert set(epoch(started(), clock, [9.0, 2.0])) == NAMES


@pytest.mark.slow
@pytest.mark.parametrize("monitor_first", [True, False])
def test_history_and_csv_beside_the_loss_scale(monitor_first, tmp_path, capsys):
    path = tmp_path / "log.csv"
    callbacks = [MixedPrecision("mixed_float16"), ResourceMonitor()]
    callbacks = (callbacks[::-1] if monitor_first else callbacks) + [keras.callbacks.CSVLogger(path)]
    model = compiled()
    history = model.fit(X, Y, batch_size=8, epochs=2, callbacks=callbacks, validation_data=(X, Y), verbose=2).history
    expected = {"loss", "mae", "val_loss", "val_mae", "loss_scale", "skipped_steps"} | NAMES
    if BATCH_IS_SEEN:
        # Three batches of 8, 8 and 4: the guarded step has seen the larger.
        expected |= {"examples_per_s"}
        times, rates = history["step_time_ms"], history["examples_per_s"]
        assert rates == pytest.approx([8e3 / milliseconds for milliseconds in times])
    assert set(history) == expected
    assert all(value > 0 for name in NAMES for value in history[name])
    with open(path) as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    assert [float(row["step_time_ms"]) for row in rows] == history["step_time_ms"]
    assert [int(row["peak_bytes"]) for row in rows] == history["peak_bytes"]
    shown = capsys.readouterr().out
    assert "step_time_ms: " in shown and "peak_bytes: " in shown and "loss_scale: " in shown


@pytest.mark.parametrize(
    "options", first_quick([{"run_eagerly": True}, {"jit_compile": True}, {"steps_per_execution": 3}])
)
def test_modes_of_fit(options, backend):
    if backend == "torch" and "run_eagerly" not in options:
        pytest.skip("Keras refuses steps_per_execution on torch, and its layers take torch.compile minutes")
    model = compiled(**options)
    history = model.fit(X[:8], Y[:8], batch_size=2, epochs=2, callbacks=[ResourceMonitor(2)], verbose=0).history
    assert all(0 < value < 1e5 for value in history["step_time_ms"])


def test_a_generator_of_unknown_length():
    def batches():
        for _ in range(3):
            yield X[:5], Y[:5]

    # Keras 3.16 has nothing to say of it.
    with pytest.warns(UserWarning, match="ran out of data") if IS_OLD else contextlib.nullcontext():
        model = compiled(run_eagerly=True)
        history = model.fit(batches(), shuffle=False, callbacks=[ResourceMonitor()], verbose=0).history
    assert set(history) == {"loss", "mae"} | NAMES


def test_keras_goes_on_handing_out_batches_in_its_own_threads():
    """Or it would wait for the device after every batch."""
    with_monitor = keras.callbacks.CallbackList([ResourceMonitor()], model=compiled(), steps=1, epochs=1, verbose=0)
    without = keras.callbacks.CallbackList([], model=compiled(), steps=1, epochs=1, verbose=0)
    assert with_monitor._async_train == without._async_train


def test_peak_of_the_process_is_in_bytes():
    # More than Python with Keras takes in any case, and less than a machine has.
    assert 5e7 < process_peak_bytes() < 1e13


@pytest.mark.slow
def test_it_can_be_copied_and_sent_to_other_processes():
    """As callbacks of Keras can, and a search over models does."""
    monitor, model = ResourceMonitor(batch_size=5), compiled(run_eagerly=True)
    for again in (copy.copy(monitor), copy.deepcopy(monitor), pickle.loads(pickle.dumps(monitor))):
        history = model.fit(X[:15], Y[:15], batch_size=5, verbose=0, callbacks=[again]).history
        assert history["examples_per_s"][0] == pytest.approx(5e3 / history["step_time_ms"][0])
