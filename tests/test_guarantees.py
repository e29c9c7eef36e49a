"""The table of guarantees in CONTRIBUTING.md names tests that exist, in every cell."""

import re
from pathlib import Path

import pytest

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")

ROOT = Path(__file__).parents[1]
SECTION = (
    (ROOT / "CONTRIBUTING.md").read_text().split("## What is promised, and where it is tested\n")[1].split("\n## ")[0]
)
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in SECTION.splitlines()
    if line.startswith("|") and "---" not in line
]
ENTRIES = {
    label: re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    for label, text in re.findall(r"^- (\w+): (.*?)(?=^- |\Z)", SECTION, flags=re.MULTILINE | re.DOTALL)
}
# "(1) No whole-program compiler ...": a cell without a test refers to one of them.
NOTES = set(re.findall(r"\((\d)\) (?=[A-Z`])", SECTION))


def test_every_cell_names_a_test_or_says_why_there_is_none():
    header, *rows = ROWS
    assert header[1:] == ["G2", "G3", "G4", "G5", "G6", "G7"] and len(rows) == 7
    used, notes = set(), set()
    for name, *cells in rows:
        assert len(cells) == 6, name
        for cell in cells:
            if cell.startswith("–"):
                note = re.fullmatch(r"– \((\d)\)", cell)
                assert note, f"{name}: {cell}"
                notes.add(note[1])
            else:
                labels = cell.split(", ")
                assert labels and set(labels) <= set(ENTRIES), f"{name}: {cell}"
                used.update(labels)
    assert used | {"u"} == set(ENTRIES)
    assert notes == NOTES


@pytest.mark.parametrize("label", ENTRIES)
def test_the_tests_exist(label):
    assert ENTRIES[label]
    for file, function in ENTRIES[label]:
        assert re.search(rf"^def {function}\(", (ROOT / file).read_text(), flags=re.MULTILINE), f"{file}::{function}"
