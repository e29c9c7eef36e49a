"""Public types: what a user's own program, checked with `mypy --strict`, may rely on."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import typed_program
from tests.public_names import INTERNAL, RETURNED, function_of, public_members, public_objects

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")

ROOT = Path(__file__).parents[1]
# Keras comes without types: under `--strict` its user has to say so. The rest is for speed: to read the sources of the
# backends takes half a minute, and no type of theirs is in a public name.
SETTINGS = """
[mypy]
strict = True
[mypy-keras.*]
ignore_missing_imports = True
[mypy-tensorflow.*,jax.*,torch.*]
follow_imports = skip
ignore_missing_imports = True
"""


@pytest.mark.slow
def test_a_program_of_a_user_passes_mypy_strict(tmp_path):
    pytest.importorskip("mypy", reason="`pip install mypy` for it")
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    # Read where it lies alone: mpkeras is found as an installed package is, by its `py.typed`.
    program = tmp_path / "program.py"
    program.write_text(Path(typed_program.__file__).read_text(encoding="utf-8"), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", program.name],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_the_program_runs(tmp_path):
    scores = typed_program.main(tmp_path)
    assert scores["skipped"] == 0 and scores["prepared"] == 256.0
    # Sums of four squares, twice: about 8 each, of which the model has learned little.
    assert 0.0 < scores["fit"] < 200.0 and 0.0 < scores["loop"] < 200.0


def untyped() -> set:
    """Returns the public functions without any annotation: `--strict` lets nobody call them."""
    found = set()
    for path, thing in public_objects().items():
        functions = {} if path in RETURNED else {path: thing.__init__ if inspect.isclass(thing) else thing}
        if inspect.isclass(thing):
            functions |= {name: function_of(member) for name, member in public_members(thing).items()}
        # A property is read, not called.
        properties = {name for name, member in vars(thing).items() if isinstance(member, property)}
        for name, function in functions.items():
            is_ours = getattr(function, "__module__", "").startswith("mpkeras")
            if is_ours and name.rpartition(".")[2] not in properties and not function.__annotations__:
                found.add(name)
    return found - INTERNAL


def test_what_is_called_has_types():
    assert untyped() == set()
