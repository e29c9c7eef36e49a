"""Every test starts and ends with Keras as it was imported: float32, fixed seeds, no global policy."""

import gc
import os
import zlib

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers share the cores: one thread each, not workers with a thread for every core. TensorFlow's inter-op
    # threads stay, as replicas wait for each other in them.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")

import keras  # noqa: E402
import pytest  # noqa: E402

import mpkeras  # noqa: E402
from mpkeras.training import covered_compile  # noqa: E402

BACKENDS = ("tensorflow", "jax", "torch")


@pytest.fixture(autouse=True)
def fresh_keras():
    keras.utils.set_random_seed(7)
    yield
    keras.config.set_floatx("float32")
    mpkeras.set_global_policy(None)
    left_over = list(covered_compile._in_force)
    for follow in left_over:
        covered_compile.leave(follow)
    assert not left_over, "`mpkeras.autoprepare` was left in force, for every test that follows"


@pytest.fixture
def backend():
    return keras.backend.backend()


def pytest_addoption(parser):
    parser.addoption(
        "--one-case",
        choices=("slow", "all"),
        help="the first case alone of each parametrized test (or of those marked slow) that is not marked every_case, "
        "and no test marked seldom",
    )
    parser.addoption(
        "--turn",
        type=int,
        metavar="N",
        help="of the slow tests those alone whose turn it is: each on one of its backends, with the next number on the "
        "next one; and one of a single backend every other time",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "backends(*names): runs on the named Keras backends only, and says why")
    config.addinivalue_line(
        "markers",
        "every_case(*names): all its cases matter, on the named Keras backends or on every, with `--one-case` too",
    )
    config.addinivalue_line(
        "markers",
        "seldom(*names): left out with `--one-case`, on the named Keras backends or on every: another test, or this "
        "one on another backend, would fail as well",
    )
    config.addinivalue_line("markers", "every_turn: although slow, on each of its backends every time")


def pytest_collection_finish():
    # What stands now stays to the end: half a million objects that no collection need look at again. Collections, those
    # among them that Keras asks for while it quantizes a layer, were a quarter of a run.
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def pytest_collection_modifyitems(config, items):
    active = keras.backend.backend()
    for item in items:
        marker = item.get_closest_marker("backends")
        if marker is not None and active not in marker.args:
            item.add_marker(pytest.mark.skip(reason=f"for {', '.join(marker.args)}, not {active}"))
    left_out = {}
    if config.getoption("one_case") is not None:
        left_out |= _later_cases(items, slow_ones_only=config.getoption("one_case") == "slow")
        left_out |= {item: None for item in items if _names_backend(item.get_closest_marker("seldom"))}
    if config.getoption("turn") is not None:
        left_out |= {item: None for item in items if not has_its_turn(item, active, config.getoption("turn"))}
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))


def _later_cases(items, slow_ones_only: bool) -> dict:
    """Returns all cases of parametrized tests but the first that runs, with `every_case` tests left alone."""
    seen, later = set(), {}
    for item in items:
        marks = {marker.name for marker in item.iter_markers()}
        if "skip" in marks or (slow_ones_only and not marks & {"slow", "matrix"}):
            continue
        name = (item.parent.nodeid, getattr(item, "originalname", item.name))
        all_matter = _names_backend(item.get_closest_marker("every_case"))
        # Of a test that is marked `every_case`, single cases may be marked `matrix`.
        if name in seen and (not all_matter or "matrix" in marks):
            later[item] = None
        seen.add(name)
    return later


def has_its_turn(item, backend: str, turn: int) -> bool:
    """Whether a test runs on a backend in this turn: all but the slow ones do in each."""
    marks = {marker.name for marker in item.iter_markers()}
    if "slow" not in marks or "every_turn" in marks:
        return True
    runs_on, seldom = item.get_closest_marker("backends"), item.get_closest_marker("seldom")
    names = BACKENDS if runs_on is None else runs_on.args
    names = [name for name in BACKENDS if name in names and (seldom is None or name not in seldom.args)]
    # By name, all cases of a test together: the same ones everywhere, whoever is asked.
    name = f"{item.location[0]}::{getattr(item, 'originalname', item.name)}"
    places = names if len(names) > 1 else [*names, None]
    return places[(zlib.crc32(name.encode()) + turn) % len(places)] == backend


def _names_backend(marker) -> bool:
    """Whether a marker is there for the active backend: it names it, or none."""
    return marker is not None and (not marker.args or keras.backend.backend() in marker.args)
