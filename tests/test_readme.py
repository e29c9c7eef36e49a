"""Runs what the README and the pages under docs/ show."""

import importlib.util
import re
import runpy
import warnings

import keras
import pytest

from tests.pages import ROOT

PAGES = {"README.md": (ROOT / "README.md").read_text()}
PAGES.update({path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "docs").rglob("*.md"))})
# tests/distributed/test_docs.py runs the one on many devices, tests/test_migration.py compares blocks in pairs.
PAGES_OF_OTHER_TESTS = ("docs/many_devices.md", "docs/migration.md")
# What a block prints in the end.
RESULT = re.compile(r"First culprit|skipped_steps: 0|loss \d+\.\d+, (loss scale \d+\.0, )?skipped \d")


def blocks(page):
    return re.findall(r"```python\n(.*?)```", PAGES[page], flags=re.DOTALL)


def fit_example():
    return next(block for block in blocks("README.md") if "model.fit(" in block)


def cases():
    for page in PAGES:
        for i, block in enumerate(blocks(page) if page not in PAGES_OF_OTHER_TESTS else []):
            if "set_distribution" not in block:
                yield pytest.param(block, id=f"{page} {i + 1}")


# On TensorFlow and JAX the first, as a page says the same on every backend.
@pytest.mark.slow
@pytest.mark.parametrize("block", list(cases()))
def test_code_block_runs(block, tmp_path, backend, monkeypatch, capsys):
    if "import tensorflow" in block and backend != "tensorflow":
        pytest.skip("this block is TensorFlow's own loop")
    if ("mpkeras.forecast" in block or "plan_memory" in block) and importlib.util.find_spec("jax") is None:
        pytest.skip("JAX compiles, which is not installed")
    if "import keras_hub" in block and importlib.util.find_spec("keras_hub") is None:
        pytest.skip("KerasHub is not installed")
    # The pages train unseeded models, of which one in sixty skips its first step; a test does the same in every run.
    keras.utils.set_random_seed(7)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "block.py").write_text(block)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        runpy.run_path("block.py", run_name="__main__")
    printed = capsys.readouterr().out
    assert RESULT.search(printed), printed[-500:]


def test_the_first_example_is_short():
    assert len([line for line in fit_example().splitlines() if line.strip()]) <= 12


@pytest.mark.parametrize("page", PAGES)
def test_pictures_and_files_it_links_exist(page):
    for target in re.findall(r"\]\(([^)#]+)\)", PAGES[page]):
        if not target.startswith("http"):
            assert ((ROOT / page).parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES)
def test_tests_it_names_exist(page):
    for name, target in re.findall(r"\[`(test_\w+)`\]\((?:\.\./)?(tests/[^)]+)\)", PAGES[page]):
        assert f"def {name}(" in (ROOT / target).read_text(), name


def test_the_table_of_pains_names_its_tests():
    table = PAGES["docs/promises.md"].partition("## What stock Keras loses")[2].partition("\n## ")[0]
    rows = [line for line in table.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    assert len(rows) > 10 and all("[`test_" in row for row in rows[1:])
