"""Runs what the README shows."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


def title(block):
    return "custom loop" if "GradientTape" in block else "fit"


@pytest.mark.parametrize("block", [pytest.param(block, id=title(block)) for block in BLOCKS])
def test_code_block_runs(block, tmp_path, backend):
    if "tensorflow" in block and backend != "tensorflow":
        pytest.skip("this block is TensorFlow's own loop")
    script = tmp_path / "block.py"
    script.write_text(block)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    if "fit(" in block:
        assert "skipped_steps: 0" in done.stdout
    else:
        assert re.search(r"loss \d\.\d+, loss scale \d+\.0, skipped \d", done.stdout)


def test_both_examples_are_there_and_the_first_is_short():
    assert sorted(title(block) for block in BLOCKS) == ["custom loop", "fit"]
    (fit,) = [block for block in BLOCKS if title(block) == "fit"]
    assert len([line for line in fit.splitlines() if line.strip()]) <= 15


def test_pictures_and_files_it_links_exist():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target
