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
class TestNotebook:
    def test_begins_with_a_title_and_what_will_be_seen(self, name):
        first = NOTEBOOKS[name]["cells"][0]
        assert first["cell_type"] == "markdown" and re.match(r"# \w.*\n\n\w", source(first))

    def test_was_run_from_top_to_bottom(self, name):
        counts = [cell["execution_count"] for cell in code_cells(name)]
        assert counts == list(range(1, len(counts) + 1))

    def test_shows_results_and_pictures(self, name):
        assert any(output.get("name") == "stdout" for output in outputs(name))
        assert any("image/png" in output.get("data", {}) for output in outputs(name))

    def test_shows_no_errors_and_no_noise(self, name):
        kinds = {(output["output_type"], output.get("name")) for output in outputs(name)}
        assert kinds <= {("stream", "stdout"), ("display_data", None), ("execute_result", None)}
        assert not [text for text in texts(name) if re.search(r"INFO:|WARNING:|Traceback|\x1b\[", text)]

    def test_names_no_path_of_a_machine(self, name):
        assert not [text for text in texts(name) if MACHINE_PATH.search(text)]

    def test_sets_its_seed(self, name):
        assert any("keras.utils.set_random_seed(" in source(cell) for cell in code_cells(name))

    def test_uses_public_names_only(self, name):
        code = "\n".join(source(cell) for cell in code_cells(name))
        assert not re.search(r"\bfrom mpkeras\b|\bmpkeras(\.\w+)*\._|\b\w+\._\w", code)

    def test_links_lead_somewhere(self, name):
        for cell in NOTEBOOKS[name]["cells"]:
            if cell["cell_type"] == "markdown":
                for target in re.findall(r"\]\(([^)#]+)\)", source(cell)):
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
