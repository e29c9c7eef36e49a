#!/usr/bin/env python
"""Runs Keras' own tests of models, trainers, callbacks, distillation and wrappers inside `mpkeras.autoprepare`.

    .ci/keras_tests.py torch                                      under the three policies
    .ci/keras_tests.py jax --policies float32 mixed_float16       under these policies alone
    .ci/keras_tests.py torch --only trainers/ -k validation       of these files, with these words in the name

The tests are those of the Keras that is installed: its wheel has them, the same as the tag of that version. They run in
a temporary folder, once for each policy, and those that fail once more without mpkeras. What passes then is run
again without `loss_scale` and `skipped_steps` in the logs: a test that passes then has compared their names, and is
counted. The others are listed with the first line of their error and, where the failure is expected, the reason. Exits
with status 1 if one is not expected.

Left out: tests that need several devices, and those that Keras skips as a package is not there (`pip install
orbax-checkpoint`). The file is the plugin of those runs of pytest, too.
"""

import argparse
import faulthandler
import fnmatch
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDERS = ("models", "trainers", "callbacks", "distillation", "wrappers")
POLICIES = ("float32", "mixed_bfloat16", "mixed_float16")
# In seconds, for one test: then an exception in Python, or, if it is stuck in compiled code, the end of the process.
SOFT_LIMIT, HARD_LIMIT = 120, 150
# What Keras sets for them in its pyproject.toml.
SETTINGS = """[pytest]
filterwarnings =
    error
    ignore::DeprecationWarning
    ignore::ImportWarning
    ignore::RuntimeWarning
    ignore::PendingDeprecationWarning
    ignore::FutureWarning
    ignore::UserWarning
    ignore:Custom mask layers require a config
markers =
    multi_device: needs several devices
    requires_trainable_backend: needs a backend that trains
"""

# `(policies, pattern of the test, reason)`, for tests that need not pass.
EXPECTED: tuple[tuple[str, str, str], ...] = ()


def main():
    options = parse_arguments()
    surprises = 0
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        copy_tests(work / "tests", options.only)
        for policy in options.policies:
            run = functools.partial(run_tests, work, options.backend)
            outcomes = run(policy, words=options.words)
            failed = failing(outcomes)
            without = run("none", tests=failed)
            failed = {test: error for test, error in failed.items() if without[test][0] == "passed"}
            others = failing(run(policy, tests=failed, leave_out_logs=True))
            print(summary_line(policy, outcomes))
            print(f"  {len(failed)} fail that pass without mpkeras, {len(failed) - len(others)} for names of logs:")
            for test, error in others.items():
                reason = expected_reason(policy, test)
                surprises += reason is None
                print(f"  {test}\n    {error}\n    {reason or 'NOT EXPECTED'}")
    print(f"{surprises} not expected")
    sys.exit(bool(surprises))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("backend", choices=("torch", "jax", "tensorflow"))
    parser.add_argument("--policies", nargs="*", default=POLICIES, help="of `mpkeras.autoprepare`")
    parser.add_argument("--only", default="", help="what the path of a file contains, such as `trainers/`")
    parser.add_argument("-k", dest="words", default="", help="as pytest's `-k`")
    return parser.parse_args()


def summary_line(policy: str, outcomes: dict) -> str:
    states = [state for state, _ in outcomes.values()]
    return f"{policy:16}" + ", ".join(f"{states.count(state):4} {state}" for state in ("passed", "failed", "skipped"))


def failing(outcomes: dict) -> dict:
    """Returns `{test: first line of its error}` for the tests that failed."""
    return {test: error for test, (state, error) in outcomes.items() if state == "failed"}


def expected_reason(policy: str, test: str) -> str | None:
    """Returns why `test` may fail under `policy`, or `None` if it may not."""
    for policies, pattern, reason in EXPECTED:
        if fnmatch.fnmatchcase(policy, policies) and fnmatch.fnmatchcase(test, pattern):
            return reason
    return None


def copy_tests(folder: Path, only: str):
    """Copies the tests out of the installed Keras.

    Their classes are to be a user's: mpkeras takes those of modules called `keras...` for Keras' own.
    """
    package = Path(find_spec("keras").origin).parent / "src"
    paths = [path for name in FOLDERS for path in sorted((package / name).glob("*_test.py"))]
    paths = [path for path in paths if only in path.as_posix()]
    if not paths:
        sys.exit(f"Expected tests of Keras. Received none in {package} with {only!r} in their path.")
    for path in paths:
        target = folder / path.relative_to(package)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)


def run_tests(work: Path, backend: str, policy: str, *, tests=None, words="", leave_out_logs=False) -> dict:
    """Returns `{test: (state, first line of its error)}` under `policy`, or without mpkeras for `"none"`.

    Args:
        work: The folder whose `tests` are run.
        backend: Of Keras.
        policy: A name for `mpkeras.autoprepare`, or `"none"`.
        tests: Which tests; by default all.
        words: As pytest's `-k`.
        leave_out_logs: Whether the logs of a guarded step have nothing of ours.
    """
    if tests is not None and not tests:
        return {}
    settings, results = work / "pytest.ini", work / "results.jsonl"
    settings.write_text(SETTINGS)
    results.write_text("")
    command = [
        *(sys.executable, "-m", "pytest", "-q", "--tb=no", "--no-header", "--no-summary", "--import-mode=importlib"),
        *("-p", "no:cacheprovider", "-p", Path(__file__).stem, "-c", str(settings), f"--rootdir={work / 'tests'}"),
        *("--policy", policy, "--results", str(results), "-m", "not multi_device", "-k", words, "."),
        *(["--leave-out-logs"] if leave_out_logs else []),
    ]
    if tests is not None:
        (work / "chosen.json").write_text(json.dumps(list(tests)))
        command += ["--chosen", str(work / "chosen.json")]
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        # Of LLVM alone, as in `.ci/run`: what is computed stays the same.
        "XLA_FLAGS": "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
        # `torch.compile` takes minutes for one test; without, what would be compiled runs as it is written.
        "TORCHDYNAMO_DISABLE": "1",
        **os.environ,
        "KERAS_BACKEND": backend,
        # Not the user's keras.json, which may name another floatx.
        "KERAS_HOME": str(work),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]),
    }
    environment.pop("MPKERAS_POLICY", None)
    print(f"======== {backend}, {policy}{', nothing of ours in the logs' * leave_out_logs}", flush=True)
    # A test that ends the process, or is ended with it, has failed, and the others are still to run.
    while True:
        status = subprocess.run(command, cwd=work / "tests", env=environment, stdin=subprocess.DEVNULL).returncode
        interrupted = [test for test, (state, _) in read_results(results).items() if state == "started"]
        if not interrupted:
            break
        for test in interrupted:
            append_result(results, test, "failed", "The process ended within this test, or was stopped as it hung.")
    # Some failed, or none was left.
    if status not in (0, 1, 5):
        sys.exit("Expected pytest to run the tests of Keras. Received the error above.")
    return read_results(results)


def append_result(results: Path, test: str, state: str, error: str = ""):
    with results.open("a") as lines:
        lines.write(json.dumps((test, state, error)) + "\n")


def read_results(results: Path) -> dict:
    """Returns the last state of each test, as lines of the file `results` have them."""
    return {test: (state, error) for test, state, error in map(json.loads, results.read_text().splitlines())}


# The plugin.


def skip_if_backend(name: str, reason: str):
    """Is what a test imports from the `conftest` of Keras' repository, which no wheel has."""
    return pytest.mark.skipif(os.environ["KERAS_BACKEND"] == name, reason=reason)


def pytest_configure():
    sys.modules.setdefault("conftest", sys.modules[__name__])


def pytest_addoption(parser):
    parser.addoption("--policy")
    parser.addoption("--results", type=Path)
    parser.addoption("--leave-out-logs", action="store_true")
    parser.addoption("--chosen", type=Path)


def pytest_collection_modifyitems(config, items):
    # What an earlier process has done.
    done = read_results(config.getoption("--results"))
    chosen = config.getoption("--chosen")
    names = None if chosen is None else json.loads(chosen.read_text())
    items[:] = [item for item in items if name_of(item) not in done and (names is None or name_of(item) in names)]


def name_of(item) -> str:
    """Returns the name of a test, without the address in memory that the name of a function has in some."""
    return re.sub(r"at0x[0-9a-f]+", "", item.nodeid)


@pytest.fixture(autouse=True)
def prepared(request, monkeypatch):
    import keras

    keras.utils.set_random_seed(7)
    policy = request.config.getoption("--policy")
    if policy == "none":
        yield
        return
    import mpkeras
    from mpkeras.training import guard

    if request.config.getoption("--leave-out-logs"):
        monkeypatch.setattr(guard, "_with_logs", lambda result, edited: result)
    with mpkeras.autoprepare(policy):
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    results = item.config.getoption("--results")
    append_result(results, name_of(item), "started")
    signal.signal(signal.SIGALRM, _stop_test)
    signal.alarm(SOFT_LIMIT)
    faulthandler.dump_traceback_later(HARD_LIMIT, exit=True)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        faulthandler.cancel_dump_traceback_later()


def _stop_test(*_):
    raise TimeoutError(f"No result after {SOFT_LIMIT} seconds")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    # Whatever fails first decides; setting up and tearing down tell nothing else.
    failed_before = getattr(item, "has_failed", False)
    item.has_failed = failed_before or report.failed
    if (report.when == "call" or not report.passed) and not failed_before:
        error = f"{call.excinfo.typename}: {call.excinfo.value}" if report.failed else ""
        lines = [line.strip() for line in error.splitlines() if line.strip()]
        append_result(item.config.getoption("--results"), name_of(item), report.outcome, " ".join(lines[:2])[:300])
    return report


if __name__ == "__main__":
    main()
