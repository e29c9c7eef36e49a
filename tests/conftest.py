"""Every test starts and ends with Keras as it was imported: float32, fixed seeds, no global policy."""

import gc
import os
from unittest import mock

import pytest

# Keras and mpkeras are imported where they are used: the process that hands the tests out runs none, and its workers
# wait for what it imports.

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers share the cores: one thread each, not workers with a thread for every core. TensorFlow's inter-op
    # threads stay, as replicas wait for each other in them.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")


@pytest.fixture(autouse=True)
def fresh_keras():
    import keras

    import mpkeras
    from mpkeras.training import covered_compile

    keras.utils.set_random_seed(7)
    yield
    keras.config.set_floatx("float32")
    mpkeras.set_global_policy(None)
    left_over = list(covered_compile._in_force)
    for follow in left_over:
        covered_compile.leave(follow)
    assert not left_over, "`mpkeras.autoprepare` was left in force, for every test that follows"


@pytest.fixture(autouse=True)
def environment_put_back():
    """What a script that a test runs sets for its own programs does not reach those of later tests."""
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def backend():
    import keras

    return keras.backend.backend()


def pytest_configure(config):
    config.addinivalue_line("markers", "backends(*names): runs on the named Keras backends only, and says why")


def pytest_collection_finish():
    # What stands now stays to the end: half a million objects that no collection need look at again. Collections, those
    # among them that Keras asks for while it quantizes a layer, were a quarter of a run.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def pytest_collection_modifyitems(items):
    import keras

    active = keras.backend.backend()
    for item in items:
        marker = item.get_closest_marker("backends")
        if marker is not None and active not in marker.args:
            item.add_marker(pytest.mark.skip(reason=f"for {', '.join(marker.args)}, not {active}"))
