"""The package's metadata: one version, the extras, the console script, and what an import may cost."""

import configparser
import importlib.metadata
import re
import runpy
from pathlib import Path

import pytest

import mpkeras
from mpkeras import _version

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")

ROOT = Path(__file__).parents[1]
BACKENDS = ("tensorflow", "jax", "torch")


@pytest.fixture(scope="module")
def config():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def test_version_is_written_in_one_place(config):
    assert config["metadata"]["version"] == "attr: mpkeras._version.__version__"
    assert mpkeras.__version__ == _version.__version__
    pattern = re.compile(rf"""__version__\s*=\s*["']{re.escape(_version.__version__)}""")
    written = [
        path.name for path in (ROOT / "mpkeras").rglob("*.py") if pattern.search(path.read_text(encoding="utf-8"))
    ]
    assert written == ["_version.py"]


@pytest.fixture(scope="module")
def distribution():
    try:
        return importlib.metadata.distribution("mpkeras")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("mpkeras is on the path but not installed: `pip install -e .`")


def test_installed_metadata_agrees(distribution):
    metadata = distribution.metadata
    assert metadata["Version"] == _version.__version__
    assert {"demo", "dev", "test", "tensorflow", "jax", "torch", "notebooks"} <= set(metadata.get_all("Provides-Extra"))
    assert metadata["Requires-Python"] == ">=3.10"


def test_console_script_is_callable(distribution):
    (script,) = distribution.entry_points.select(name="mpkeras")
    assert script.value == "_mpkeras_cli:main"
    assert callable(script.load())


def test_every_folder_of_the_package_is_installed(config):
    """`packages = find:` passes over a folder without `__init__.py`, silently."""
    assert config["options"]["packages"] == "find:"
    folders = {path.parent for name in ("mpkeras", "_mpkeras_cli") for path in (ROOT / name).rglob("*.py")}
    assert [str(folder) for folder in sorted(folders) if not (folder / "__init__.py").exists()] == []
    assert (ROOT / "mpkeras" / "py.typed").exists()


def test_changelog_has_this_version():
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert headings[0] == "Unreleased"
    # The one below is the newest release, or the one that is being prepared.
    assert headings[1] == _version.__version__


def test_sdist_has_what_tests_and_docs_need():
    """Folders that are not Python packages are left out unless `MANIFEST.in` names them."""
    manifest = (ROOT / "MANIFEST.in").read_text(encoding="utf-8").split()
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "_"))}
    named = folders & {"tests", "docs", "benchmarks", "notebooks"}
    assert named == {"tests", "docs", "benchmarks", "notebooks"} <= set(manifest)


def test_a_plain_install_brings_keras_and_numpy_and_a_backend_is_an_extra(config):
    def names(requirements):
        return [re.split(r"[<>=]", line)[0] for line in requirements.split("\n") if line]

    assert names(config["options"]["install_requires"]) == ["keras", "numpy"]
    extras = config["options.extras_require"]
    assert [names(extras[backend]) for backend in BACKENDS] == [
        ["tensorflow"],
        ["jax"],
        ["torch"],
    ]


def test_keras_range_is_the_same_everywhere(config):
    (requirement,) = [line for line in config["options"]["install_requires"].split("\n") if line.startswith("keras")]
    oldest = re.fullmatch(r"keras>=([\d.]+),<[\d.]+", requirement).group(1)
    assert f"Keras {oldest}" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    # The CI's oldest run must test that very version, or the promise is empty.
    assert re.search(rf"keras=={re.escape(oldest)}\b", (ROOT / ".ci" / "run").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def description():
    return runpy.run_path(str(ROOT / "setup.py"))["description"]


@pytest.mark.parametrize(
    ("readme", "expected"),
    [
        pytest.param("see [fit](docs/fit.md#logs) here", "see fit here", id="a link to a file"),
        pytest.param("[fit](docs/fit.md), [own](docs/loops.md)", "fit, own", id="two links"),
        pytest.param("[Keras](https://keras.io/api)", "[Keras](https://keras.io/api)", id="a page of the web"),
        pytest.param("a\n\n![bars](benchmarks/bars.png)\n\nb", "a\n\nb", id="a picture"),
    ],
)
def test_the_description_leads_nowhere_inside_the_repository(description, readme, expected):
    assert description(readme) == expected


def test_the_description_is_the_readme_without_dead_links(description):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    text = description(readme)
    assert not re.findall(r"\]\((?!https?://)", text)
    assert re.findall(r"```.*?```", text, flags=re.DOTALL) == re.findall(r"```.*?```", readme, flags=re.DOTALL)
    words = re.sub(r"!\[[^]]*\]\([^)]*\)|\]\([^)]*\)|\[", "", readme).split()
    assert re.sub(r"\[", "", text).split() == words


def test_the_citation_names_this_package():
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(r"^cff-version: 1\.2\.0$", text, flags=re.MULTILINE)
    assert "license: Apache-2.0" in text and "mpkeras" in text
    (version,) = re.findall(r"^version: (.+)$", text, flags=re.MULTILINE)
    (date,) = re.findall(r"^date-released: (.+)$", text, flags=re.MULTILINE)
    assert version == _version.__version__
    assert f"## [{version}] - {date}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
