"""Runs the scripts that the README and the pages under docs/ show."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# The pages train unseeded models, of which one in sixty skips its first step; a test does the same in every run.
SEEDED = "import keras\n\nkeras.utils.set_random_seed(7)\n"


def run(path: Path, text: str, environment: dict | None = None) -> str:
    """Writes `text` to `path`, runs it and returns what it printed."""
    path.write_text(text)
    done = subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), **(environment or {})},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
