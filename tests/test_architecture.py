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
    "only_here purse tally hunt session",
    "factory checkup one_graph backend deploy bench report mcp",
    "cli",
]
FLOOR = {name: floor for floor, row in enumerate(FLOORS) for name in row.split()}
ORDER = {name: place for place, name in enumerate(name for row in FLOORS for name in row.split())}
# On one floor, files that are listed earlier may be imported; folders never.
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
                assert alias.name.split(".")[0] != "torch_kevolve", (
                    f"{path}:{node.lineno} write: from {alias.name} import"
                )


def refusal(here, there):
    """Why a file of room `here` may not import room `there`; None if it may."""
    if there not in FLOOR:
        return f"{there} has no floor: give it one in docs/flow.md and here"
    if there == here or FLOOR[there] < FLOOR[here]:
        return None
    if FLOOR[there] > FLOOR[here]:
        return f"{there} is above {here}"
    if there in FOLDERS:
        return f"{there} is a neighbour of {here}"
    return None if ORDER[there] < ORDER[here] else f"{there} is listed after {here}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_run_down(path):
    here = room(path)
    modules = list(imports(path))  # the root face too: no relative import, no `import torch_kevolve.x`
    if here == "__init__":
        return
    assert here in FLOOR, f"{here} has no floor: give it one in docs/flow.md and here"
    for module, line in modules:
        assert module != "torch_kevolve", f"{path}:{line} imports the package root from inside"
        why = refusal(here, module.split(".")[1])
        assert why is None, f"{path}:{line} may not import {module}: {why}"


@pytest.mark.parametrize(
    ("here", "there", "may"),
    [
        ("session", "store", True),
        ("lowering", "lowering", True),
        ("lowering", "agent", False),
        ("lowering", "evaluation", False),
        ("store", "devices", False),
        ("task", "sizes", True),
        ("sizes", "task", False),
        ("bench", "backend", True),
        ("backend", "bench", False),
        ("errors", "nowhere", False),
    ],
)
def test_the_rule_of_floors_itself(here, there, may):
    assert (refusal(here, there) is None) is may


@pytest.mark.parametrize(
    "text",
    [
        "from . import store",
        "from ..store import base",
        "import torch_kevolve.store",
        "import torch_kevolve as t",
        "import os, torch_kevolve",
        "def f():\n    import torch_kevolve.store",
    ],
)
def test_no_other_form_of_import_gets_by(tmp_path, text):
    path = tmp_path / "file.py"
    path.write_text(text)
    with pytest.raises(AssertionError):
        list(imports(path))


def test_no_ring_inside_a_folder():
    """A file may import earlier files of its own folder: no ring, and no member imports its face."""
    edges = {}
    for path in SOURCES:
        name = ".".join(["torch_kevolve", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
        if name != "torch_kevolve":  # the face of all stands above them and is imported by none
            edges[name] = {module for module, _ in imports(path)}
    done, path = set(), []

    def visit(name):
        assert name not in path, f"ring: {' -> '.join([*path[path.index(name) :], name])}"
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
        text = path.read_text()
        assert "TYPE_CHECKING" not in text, path
        # A string that an import machinery would follow; `python -m` of a child process is another matter.
        assert not re.search(r"(import_module|__import__)\(\s*f?[\"']torch_kevolve", text), path


UNPICKLERS = ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib")


def faults(path, here):
    """What a file may not say: text that becomes code, and bytes that become objects."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            modules = names if isinstance(node, ast.Import) else [node.module or ""]
            if any(module.split(".")[0] in UNPICKLERS for module in modules):
                yield node.lineno, "a pickle of what another process wrote runs its code"
            if "builtins" in modules or (modules == ["multiprocessing"] and {"Queue", "Pipe"} & set(names)):
                yield node.lineno, "a way around the rules"
        if not isinstance(node, ast.Call):
            continue
        given = {keyword.arg: getattr(keyword.value, "value", None) for keyword in node.keywords}
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        bare = isinstance(node.func, ast.Name)
        owner = getattr(getattr(node.func, "value", None), "id", "")
        if bare and name == "eval":
            yield node.lineno, "eval"
        if bare and name == "exec" and here not in ("evaluation", "languages"):
            yield node.lineno, "exec stands in evaluation/ or languages/ only"
        if name == "sympify" and given.get("strict") is not True:
            yield node.lineno, "sympify without strict=True evaluates text"
        if name in ("parse_expr", "S") and (name == "parse_expr" or owner == "sympy"):
            yield node.lineno, "sympy would evaluate text"
        if owner == "torch" and name == "load" and given.get("weights_only") is not True:
            yield node.lineno, "torch.load without weights_only=True unpickles"
        if name == "load" and given.get("allow_pickle") is True:
            yield node.lineno, "numpy would unpickle"


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_text_never_becomes_code_by_accident(path):
    assert list(faults(path, room(path))) == []


@pytest.mark.parametrize(
    "text",
    [
        "eval('1')",
        "exec('1')",
        "sympy.sympify(text)",
        "sympify(text, strict=False)",
        "sympy.S(text)",
        "parse_expr(text)",
        "import pickle",
        "from pickle import loads",
        "def f():\n    import cloudpickle as c",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "from builtins import exec as run",
        "from multiprocessing import Queue",
    ],
)
def test_the_rules_see_what_they_forbid(tmp_path, text):
    path = tmp_path / "file.py"
    path.write_text(text)
    assert len(list(faults(path, "store"))) == 1
    path.write_text("exec(text)\nsympify(x, strict=True)\nsympy.S.One\ntorch.load(p, weights_only=True)\nf.eval()")
    assert list(faults(path, "languages")) == []


def test_rooms_have_no_drawer_for_everything():
    banned = {"core", "utils", "util", "common", "manager", "helper", "helpers", "misc"}
    for path in SOURCES:
        assert not banned & set(path.relative_to(PACKAGE).with_suffix("").parts), path


def tracked():
    """Files that git knows; in an exported tree without git, every file that is no build product."""
    try:
        done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
        found = [ROOT / name for name in done.stdout.decode().split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        found = []
    # None: the tree lies inside another repository, which does not track it.
    return [path for path in found if path.is_file()] or walked(ROOT)


def walked(root):
    skip = {"build", "dist", "__pycache__"}
    parts = {path: path.relative_to(root).parts for path in root.rglob("*") if path.is_file()}
    hidden = {
        path
        for path, names in parts.items()
        if any(n.startswith(".") and n not in (".ci", ".gitignore") for n in names)
    }
    return [p for p, names in parts.items() if p not in hidden and not skip & set(names) and ".egg-info" not in str(p)]


def test_the_project_speaks_of_itself_alone():
    # Put together here, so that this file does not say them itself.
    words = ["/" + folder + "/" for folder in ("wo" + "rk", "tm" + "p/kv", "op" + "t/kv")]
    words += [
        "sha" + "red/" + page for page in ("design", "surface", "style", "torch-facts", "headroom", "lab", "prior-art")
    ]
    files = tracked()
    assert Path(__file__) in files
    for path in files:
        if path.suffix in (".png", ".gz"):
            continue
        text = path.read_text(errors="ignore")
        for word in words:
            assert word not in text, f"{path} names {word}"


def test_a_tree_without_git_is_walked(tmp_path):
    ours = {"setup.py", ".ci/run", "torch_kevolve/a.py"}
    for name in (*ours, ".venv/x.py", "build/x.py", "a/__pycache__/x.pyc", ".git/x", "a.egg-info/x"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert {str(path.relative_to(tmp_path)) for path in walked(tmp_path)} == ours


def test_every_file_begins_with_a_caption():
    captions = {path: (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0] for path in SOURCES}
    assert {str(path): text for path, text in captions.items() if not 0 < len(text) <= 100} == {}
