"""The rooms of the house: who may import whom, and where Keras' private names stand."""

import ast
import functools
import re
from pathlib import Path

import pytest

import mpkeras
from mpkeras import seams

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")

ROOT = Path(__file__).parents[1]
# From the bottom up: a room imports from its own floor and from those below. CONTRIBUTING.md draws it. `mpkeras` itself
# has the public names of all of them.
FLOORS = (
    ("_version", "_start", "_when_asked", "_arguments", "_keras", "_replaced"),
    ("policies", "devices"),
    ("distribution",),
    ("conversion", "scaling", "layers"),
    ("training",),
    ("callbacks",),
    ("seams",),
    ("shared",),
    ("numerics", "audit", "advise", "forecast", "export"),
    ("blackbox",),
    ("demo",),
    ("mpkeras",),
    ("_mpkeras_cli",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
TOOLS = ("blackbox", "numerics", "audit", "advise", "forecast", "export")
# The one tool that stands on another: a capsule shows its step as `trace_numerics` does.
BESIDE = {("blackbox", "numerics")}
# What else stands above the core, and takes of it no more than a tool does.
ABOVE = ("demo", "_mpkeras_cli")
MOST_SEAMS = 30
# Modules that hold public names and nothing else, as `mpkeras` itself does: where each is documented.
PLACES = ("mpkeras.callbacks", "mpkeras.insight", "mpkeras.export")
BACKENDS = {"tensorflow", "jax", "torch"}


def modules():
    return sorted([*(ROOT / "mpkeras").rglob("*.py"), *(ROOT / "_mpkeras_cli").rglob("*.py")])


def name_of(path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {name_of(path) for path in modules()}


@functools.cache
def nodes_of(path) -> list:
    """Returns the imports and the texts of a module, in functions, too."""
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    return [node for node in tree if isinstance(node, ast.Import | ast.ImportFrom | ast.Constant)]


def plain_imports(path) -> set:
    return {alias.name for node in nodes_of(path) if isinstance(node, ast.Import) for alias in node.names}


def from_imports(path, of: str = "mpkeras") -> list:
    """Returns `(module, name)` of everything that a module imports from modules that begin so, as it is written."""
    found = [node for node in nodes_of(path) if isinstance(node, ast.ImportFrom) and node.module.startswith(of)]
    return [(node.module, alias.name) for node in found for alias in node.names]


def texts(path) -> list:
    return [node.value for node in nodes_of(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def imported(path) -> set:
    """Returns the full names of what a module imports."""
    return plain_imports(path) | {f"{module}.{name}" for module, name in from_imports(path, of="")}


def modules_of_ours(path) -> set:
    """Returns the modules of mpkeras that a module imports, or imports a name from."""
    names = imported(path)
    return {name if name in NAMES else name.rpartition(".")[0] for name in names if name.startswith("mpkeras.")} & NAMES


def room(name: str) -> str:
    """Returns the room of a module: a folder or module of mpkeras, and of `mpkeras.tools` the folder inside it."""
    parts = name.split(".")
    if name in PLACES or ".".join(parts[:2]) in PLACES[1:] or name == "mpkeras.tools":
        return "mpkeras"
    return parts[2 if parts[:2] == ["mpkeras", "tools"] else 1] if parts[0] == "mpkeras" and parts[1:] else parts[0]


def test_arrows_point_down_and_make_no_circle():
    for path in modules():
        name = name_of(path)
        if name not in ("mpkeras", "mpkeras.__main__"):
            assert not {target for target in modules_of_ours(path) if FLOOR[room(target)] > FLOOR[room(name)]}, name
    arrows = {name_of(path): modules_of_ours(path) - {name_of(path)} for path in modules()}
    while True:
        ends = {name for name, targets in arrows.items() if not targets & arrows.keys()}
        if not ends:
            break
        arrows = {name: targets for name, targets in arrows.items() if name not in ends}
    assert not arrows


def is_tool(path) -> bool:
    return room(name_of(path)) in ("shared", *TOOLS, *ABOVE)


def test_a_tool_takes_public_names_seams_and_what_tools_share():
    for path in filter(is_tool, modules()):
        own = room(name_of(path))
        for module, name in from_imports(path):
            full = f"{module}.{name}"
            target = room(full if full in NAMES else module)
            if target in ("seams", "shared", own) or own in ABOVE and target in (*TOOLS, *ABOVE):
                continue
            # Of the core a public name, from the module that defines it or from `mpkeras` itself.
            is_public = target not in TOOLS and name in mpkeras.__all__
            assert is_public or (own, target) in BESIDE, (path, module, name)
        # And nothing by another door: a plain import, or a name in a string.
        assert not [name for name in plain_imports(path) if name.startswith("mpkeras.")], path
        in_text = [text for text in texts(path) if re.fullmatch(r"mpkeras(\.\w+)+", text) and _names_a_module(text)]
        assert not [text for text in in_text if room(text.rstrip("_.")) not in ("shared", own)], path


def _names_a_module(text: str) -> bool:
    """Whether a text is the name of a module, or its beginning, as of `_jax.py` and its like."""
    return any(name == text or name.startswith(text) and text.endswith("._") for name in NAMES)


def test_the_core_imports_no_tool_and_names_none():
    for path in modules():
        if is_tool(path) or room(name_of(path)) in ("mpkeras", "seams"):
            continue
        assert not {room(name) for name in modules_of_ours(path)} & {"shared", *TOOLS, *ABOVE}, path
        assert not [text for text in texts(path) if text.startswith("mpkeras.tools")], path


def test_seams_are_few_and_each_has_a_sentence_and_a_user():
    names = set(seams.__all__)
    assert len(names) == len(seams.__all__) <= MOST_SEAMS
    lines = re.findall(r"^- (`.+`): (.+[.])$", seams.__doc__, flags=re.MULTILINE)
    described = [name for listed, _ in lines for name in re.findall(r"`(\w+)`", listed)]
    assert sorted(described) == sorted(names)
    taken = {name for path in modules() for module, name in from_imports(path) if module == "mpkeras.seams"}
    assert taken == names


def reached(arrows) -> dict:
    """Returns all rooms below each room, by the arrows between them."""
    found: dict = {}
    for start in arrows:
        todo, found[start] = [*arrows[start]], set()
        while todo:
            room = todo.pop()
            found[start].add(room)
            todo += arrows.get(room, set()) - found[start]
    return found


def test_the_picture_draws_the_rooms_and_their_imports():
    picture = (ROOT / "docs" / "assets" / "house.svg").read_text(encoding="utf-8")
    drawn: dict = {}
    for source, target in re.findall(r'id="(\w+)-to-(\w+)"', picture):
        drawn.setdefault(source, set()).add(target)
    # Not drawn: where the version is written, what imports Keras and, later, tools, and the checks of arguments.
    rooms = FLOOR.keys() - {"_version", "_start", "_when_asked", "_arguments"}
    assert set(re.findall(r'<g id="(\w+)"', picture)) == rooms
    imports: dict = {}
    for path in modules():
        name = name_of(path)
        if name != "mpkeras.__main__":
            targets = {room(target) for target in modules_of_ours(path)} & rooms - {room(name)}
            imports[room(name)] = imports.get(room(name), set()) | targets
    assert {name: targets for name, targets in reached(imports).items() if targets} == reached(drawn)


def test_private_names_of_keras_stand_in_one_module():
    for path in modules():
        text = path.read_text(encoding="utf-8")
        if path.name != "_keras.py":
            assert not re.search(r"(?<!mp)keras\.(src\b|_[a-z])|from keras\._", text), path


def test_backends_are_imported_in_modules_named_after_them():
    for path in modules():
        backends = {name.partition(".")[0] for name in imported(path)} & BACKENDS
        assert not backends or path.stem == f"_{backends.pop()}" and not backends, path


def test_where_a_change_goes_names_what_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = text.partition("### Where a change goes")[2].partition("\n\n")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(rows) >= 10
    for row in rows:
        # A file and, behind a colon or "in", names that it has.
        quoted = re.findall(r"`([^`]+)`", row.split("|")[2])
        files = [
            ROOT / ("" if name.startswith(("mpkeras/", "tests/", "_mpkeras_cli/")) else "mpkeras") / name
            for name in quoted
            if "/" in name or name.endswith(".py")
        ]
        assert files and all(file.exists() for file in files), row
        sources = "".join(file.read_text(encoding="utf-8") for file in files if file.is_file())
        for name in quoted:
            if "/" not in name and not name.endswith(".py"):
                assert re.search(rf"^(class |def |){name}\b", sources, re.MULTILINE), (name, row)
