"""A hook of MkDocs: brings into the site what pages link to outside of docs/.

Pages link to files as they lie in the repository, so that the links work there, too. Markdown and notebooks become
pages, sources become pages that show them, and all other files are copied.
"""

import posixpath
import re
from pathlib import Path

import nbconvert
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
# Pages of the site that lie elsewhere; what they link to follows.
STARTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
# A page named after its folder would become the index of a whole section.
PLACES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/results/README.md": "benchmarks/results.md",
    "benchmarks/gpu/README.md": "benchmarks/gpu.md",
}
LINK = re.compile(r"(?<=\]\()[^)#\s]+")
# docs/migration.md marks what its tests do with a block; MkDocs reads no such mark.
MARK = re.compile(r"^```python (before|not-run)$", flags=re.MULTILINE)
TITLES = {"before": "before", "not-run": "before (not run)"}

# Where each page of the site lies in the repository.
_origins: dict = {}


def place(path: str) -> str:
    """Returns where a file of the repository stands in the site."""
    path = PLACES.get(path, path.removeprefix("docs/"))
    if path.endswith(".ipynb"):
        return path.removesuffix(".ipynb") + ".md"
    return path + ".md" if path.endswith(".py") else path


def linked(path: str, link: str) -> str | None:
    """Returns the file of the repository to which a page of it links, or `None` where there is none."""
    target = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    return target if (ROOT / target).is_file() else None


def files_of(path: str, config):
    """Yields the files of the site that a file of the repository outside of docs/ becomes, pages first."""
    source = ROOT / path
    if path.endswith(".ipynb"):
        name = source.stem
        settings = {"unique_key": name, "output_files_dir": f"{name}_files"}
        text, found = nbconvert.MarkdownExporter().from_filename(str(source), resources=settings)
        yield File.generated(config, place(path), content=text)
        for picture, data in found["outputs"].items():
            yield File.generated(config, posixpath.join(posixpath.dirname(path), picture), content=data)
    elif path.endswith(".py"):
        text = f"---\nsearch:\n  exclude: true\n---\n\n# {path}\n\n```python\n{source.read_text(encoding='utf-8')}```\n"
        yield File.generated(config, place(path), content=text)
    else:
        yield File.generated(config, place(path), abs_src_path=str(source))


def on_files(files, config):
    _origins.clear()
    _origins.update({file.src_uri: f"docs/{file.src_uri}" for file in files.documentation_pages()})
    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in _origins.values()}
    todo = [*STARTS, *(linked(path, link) for path, text in texts.items() for link in LINK.findall(text))]
    while todo:
        path = todo.pop(0)
        if path is None or path.startswith("docs/") or place(path) in _origins:
            continue
        made = list(files_of(path, config))
        for file in made:
            files.append(file)
        _origins[made[0].src_uri] = path
        if made[0].is_documentation_page() and not path.endswith(".py"):
            todo += [linked(path, link) for link in LINK.findall(made[0].content_string)]
    return files


def on_page_markdown(markdown, page, config, files):
    path, folder = _origins[page.file.src_uri], posixpath.dirname(page.file.src_uri)

    def placed(match):
        target = linked(path, match[0])
        return posixpath.relpath(place(target), folder or ".") if target else match[0]

    markdown = MARK.sub(lambda match: f'```python title="{TITLES[match[1]]}"', markdown)
    return LINK.sub(placed, markdown)
