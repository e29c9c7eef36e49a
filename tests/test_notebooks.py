"""What can be seen of the notebooks without running them: `.ci/run` runs them."""

import json
import re
from pathlib import Path

import pytest

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")

FOLDER = Path(__file__).parents[1] / "notebooks"
NAMES = ["custom_loop", "existing_model", "first_model", "loss_scaling", "memory", "when_it_goes_wrong"]
NOTEBOOKS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.ipynb"))}
# Of whoever ran the notebook: a home, a temporary folder or kernel, a drive.
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|root|Users|tmp|var|work|mnt|opt|usr|private)/|\b[A-Z]:\\")


def code_cells(name):
    return [cell for cell in NOTEBOOKS[name]["cells"] if cell["cell_type"] == "code"]


def outputs(name):
    return [output for cell in code_cells(name) for output in cell["outputs"]]


def source(cell):
    return "".join(cell["source"])


def texts(name):
    """Returns all that a reader sees, without the bytes of pictures."""
    found = [source(cell) for cell in NOTEBOOKS[name]["cells"]]
    for output in outputs(name):
        data = output.get("data", {})
        found += ["".join(output.get("text", "")), *("".join(data[kind]) for kind in data if kind.startswith("text/"))]
    return found


def test_these_and_no_others():
    assert list(NOTEBOOKS) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_was_run_from_top_to_bottom_and_shows_results_without_noise(name):
    first = NOTEBOOKS[name]["cells"][0]
    assert first["cell_type"] == "markdown" and re.match(r"# \w.*\n\n\w", source(first)), "a title, what will be seen"
    counts = [cell["execution_count"] for cell in code_cells(name)]
    assert counts == list(range(1, len(counts) + 1))
    kinds = {(output["output_type"], output.get("name")) for output in outputs(name)}
    assert ("stream", "stdout") in kinds
    assert kinds <= {("stream", "stdout"), ("display_data", None), ("execute_result", None)}
    assert any("image/png" in output.get("data", {}) for output in outputs(name)), "a picture"
    assert not [text for text in texts(name) if re.search(r"INFO:|WARNING:|Traceback|\x1b\[", text)]
    assert not [text for text in texts(name) if MACHINE_PATH.search(text)]


@pytest.mark.parametrize("name", NAMES)
def test_code_sets_its_seed_and_uses_public_names_only_and_links_lead_somewhere(name):
    code = "\n".join(source(cell) for cell in code_cells(name))
    assert "keras.utils.set_random_seed(" in code
    assert not re.search(r"\bfrom mpkeras\b|\bmpkeras(\.\w+)*\._|\b\w+\._\w", code)
    prose = "\n".join(source(cell) for cell in NOTEBOOKS[name]["cells"] if cell["cell_type"] == "markdown")
    for target in re.findall(r"\]\(([^)#]+)\)", prose):
        assert target.startswith("http") or (FOLDER / target).exists(), target


@pytest.mark.parametrize(
    ("text", "is_path"),
    [
        pytest.param("written to /tmp/tmpabc/served", True, id="a temporary folder"),
        pytest.param("File /home/me/x.py", True, id="a home"),
        pytest.param("see ../docs/export.md", False, id="a link"),
        pytest.param("accuracy 3/home/4", False, id="a quotient"),
    ],
)
def test_what_counts_as_a_path_of_a_machine(text, is_path):
    assert bool(MACHINE_PATH.search(text)) == is_path
