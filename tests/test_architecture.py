"""Architecture: imports run down, and a few things stand nowhere."""

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "torch_kevolve"
FLOORS = [
    "errors log",
    "settings registry",
    "sizes task plan candidate evidence",
    "kernel record",
    "languages devices store graph_memory",
    "lowering evaluation templates",
    "agent",
    "only_here purse tally session",
    "factory checkup backend deploy bench report mcp",
    "cli",
]
FLOOR = {name: floor for floor, row in enumerate(FLOORS) for name in row.split()}
ORDER = {name: place for place, name in enumerate(name for row in FLOORS for name in row.split())}
# Rooms of single files on one floor stand in the order in which they are listed; folders never look sideways.
FOLDERS = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)


def room(path):
    part = path.relative_to(PACKAGE).parts[0]
    return part.removesuffix(".py")


def imports(path):
    """(module, line) of every absolute import of our own package."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} relative import"
            if (node.module or "").split(".")[0] == "torch_kevolve":
                yield node.module, node.lineno
        elif isinstance(node, ast.Import):
            for alias in node.names:
                assert alias.name.split(".")[0] != "torch_kevolve", f"{path}:{node.lineno} write: from {alias.name} import"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_down(path):
    here = room(path)
    if here == "__init__":
        return
    assert here in FLOOR, f"{here} has no floor: give it one in docs/flow.md and here"
    for module, line in imports(path):
        assert module != "torch_kevolve", f"{path}:{line} imports the package root from inside"
        there = module.split(".")[1]
        if there == here:
            continue
        down = FLOOR[there] < FLOOR[here]
        beside = FLOOR[there] == FLOOR[here] and ORDER[there] < ORDER[here] and not {there, here} <= FOLDERS
        assert down or (beside and there not in FOLDERS) or (beside and here not in FOLDERS), (
            f"{path}:{line} may not import {module}"
        )


def test_no_ring_inside_a_folder():
    """A file may import earlier files of its own folder: no ring, and no member imports its face."""
    edges = {}
    for path in SOURCES:
        name = ".".join(["torch_kevolve", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
        edges[name] = {module for module, _ in imports(path)}
    done, path = set(), []

    def visit(name):
        assert name not in path, f"ring: {' -> '.join([*path[path.index(name):], name])}"
        if name in done or name not in edges:
            return
        path.append(name)
        for other in edges[name]:
            visit(other)
        path.pop()
        done.add(name)

    for name in edges:
        visit(name)


def test_no_back_door():
    for path in SOURCES:
        assert "TYPE_CHECKING" not in path.read_text(), path


def called(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name):
                yield function.id, node
            elif isinstance(function, ast.Attribute):
                yield function.attr, node


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_text_never_becomes_code_by_accident(path):
    for name, node in called(path):
        where = f"{path}:{node.lineno}"
        if isinstance(node.func, ast.Name):
            assert name != "eval", where
            assert name != "exec" or room(path) in ("evaluation", "languages"), where
        if name == "sympify":
            strict = [keyword for keyword in node.keywords if keyword.arg == "strict"]
            assert strict and strict[0].value.value is True, where
        if name in ("load", "loads") and isinstance(node.func, ast.Attribute):
            assert not (isinstance(node.func.value, ast.Name) and node.func.value.id in ("pickle", "dill", "cloudpickle")), where
    assert not re.search(r"^\s*(import|from) (pickle|dill|cloudpickle)", path.read_text(), re.M), path


def test_rooms_have_no_drawer_for_everything():
    banned = {"core", "utils", "util", "common", "manager", "helper", "helpers", "misc"}
    for path in SOURCES:
        assert path.stem not in banned, path


def tracked():
    try:
        done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
        return [ROOT / name for name in done.stdout.decode().split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        skip = {".git", ".venv", "build", "__pycache__"}
        return [path for path in ROOT.rglob("*") if path.is_file() and not skip & set(path.parts)]


def test_the_project_speaks_of_itself_alone():
    words = ["/wo" + "rk/", "/tm" + "p/kv", "shared/" + "design", "shared/" + "surface"]
    for path in tracked():
        if path.is_file() and path.suffix not in (".png", ".gz"):
            text = path.read_text(errors="ignore")
            for word in words:
                assert word not in text, f"{path} names {word}"


def test_every_file_begins_with_a_caption():
    for path in SOURCES:
        first = (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[:1]
        assert first and len(first[0]) <= 90, f"{path}: the first line of its docstring is its caption"
