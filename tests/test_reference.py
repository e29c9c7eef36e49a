"""docs/reference/: every public name stands there, and what users do not call does not."""

import re
from pathlib import Path

import pytest

from _mpkeras_cli import COMMANDS
from tests.public_names import INTERNAL, public_objects

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")

ROOT = Path(__file__).parents[1]
PAGES = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs" / "reference").glob("*.md"))]
NAMES = re.findall(r"^::: (\S+)$", "\n".join(PAGES), flags=re.MULTILINE)


def test_every_public_name_stands_there_once():
    assert sorted(NAMES) == sorted(public_objects())


def test_what_no_user_calls_is_left_out():
    (pattern,) = re.findall(r'"!(\^\(.*\)\$)"', (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    hidden = {name.partition(".")[2] for name in INTERNAL}
    assert all(re.search(pattern, name) for name in hidden)
    assert pattern.count("|") + 1 == len(hidden)


def test_every_command_stands_there():
    page = (ROOT / "docs" / "reference" / "cli.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `mpkeras (\w+)", page, flags=re.MULTILINE) == [
        add.__name__.removeprefix("add_") for add in COMMANDS
    ]


def test_every_page_is_in_the_navigation():
    """A page that is left out is built, and found by nobody."""
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {page for page in pages if not re.search(rf"\b{re.escape(page)}$", navigation, flags=re.MULTILINE)} == set()
