"""The rooms of the house: who may import whom, and where Keras' private names stand."""

import ast
import re
from pathlib import Path

import pytest

# What is tested here knows no backend: once is enough.
pytestmark = pytest.mark.backends("tensorflow")

ROOT = Path(__file__).parents[1]
# From the bottom up: a room imports from its own floor and from those below. CONTRIBUTING.md draws it. `mpkeras` itself
# has the public names of all of them.
FLOORS = (
    ("_version", "_start", "_arguments", "_keras", "_replaced"),
    ("policies", "devices"),
    ("conversion", "scaling", "layers"),
    ("training",),
    ("insight",),
    ("callbacks",),
    ("export", "demo"),
    ("mpkeras",),
    ("_mpkeras_cli",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
BACKENDS = {"tensorflow", "jax", "torch"}


def modules():
    return sorted([*(ROOT / "mpkeras").rglob("*.py"), *(ROOT / "_mpkeras_cli").rglob("*.py")])


def name_of(path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


NAMES = {name_of(path) for path in modules()}


def imported(path) -> set:
    """Returns the full names of what a module imports, in functions, too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def modules_of_ours(path) -> set:
    """Returns the modules of mpkeras that a module imports, or imports a name from."""
    names = imported(path)
    return {name if name in NAMES else name.rpartition(".")[0] for name in names if name.startswith("mpkeras.")} & NAMES


def room(name: str) -> str:
    return name.split(".")[1] if name.startswith("mpkeras.") else name.split(".")[0]


@pytest.mark.parametrize("path", [path for path in modules() if name_of(path) not in ("mpkeras", "mpkeras.__main__")])
def test_arrows_point_down(path):
    floor = FLOOR[room(name_of(path))]
    assert not {name for name in modules_of_ours(path) if FLOOR[room(name)] > floor}


def test_no_circle():
    arrows = {name_of(path): modules_of_ours(path) - {name_of(path)} for path in modules()}
    while True:
        ends = {name for name, targets in arrows.items() if not targets & arrows.keys()}
        if not ends:
            break
        arrows = {name: targets for name, targets in arrows.items() if name not in ends}
    assert not arrows


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
    # Not drawn: where the version is written, what imports Keras, and the checks of arguments, which all floors use.
    rooms = FLOOR.keys() - {"_version", "_start", "_arguments"}
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
