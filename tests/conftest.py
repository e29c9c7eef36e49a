"""Every test starts and ends with Keras as it was imported: float32, fixed seeds, no global policy."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras  # noqa: E402
import pytest  # noqa: E402


@pytest.fixture(autouse=True)
def fresh_keras():
    keras.utils.set_random_seed(7)
    yield
    keras.config.set_dtype_policy("float32")
    keras.config.set_floatx("float32")


@pytest.fixture
def backend():
    return keras.backend.backend()


def pytest_configure(config):
    config.addinivalue_line("markers", "backends(*names): runs on the named Keras backends only, and says why")


def pytest_collection_modifyitems(config, items):
    active = keras.backend.backend()
    for item in items:
        marker = item.get_closest_marker("backends")
        if marker is not None and active not in marker.args:
            item.add_marker(pytest.mark.skip(reason=f"for {', '.join(marker.args)}, not {active}"))
