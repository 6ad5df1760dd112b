"""Install: the package and its seeds travel as an editable install, as a wheel and as a plain checkout."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from samples import kernel
from torch_kevolve.settings import VERSION
from torch_kevolve.store import DiskStore

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("setup.py", "pyproject.toml", "LICENSE", "torch_kevolve", "kernels_cache")
CODE = """
import json, sys
import torch_kevolve.kernels_cache
from torch_kevolve.settings import Settings
from torch_kevolve.store import open_store
store = open_store(Settings.make({"home": sys.argv[1]}, {}))
print(json.dumps([torch_kevolve.kernels_cache.__file__, [line.key for line in store.summaries()], store.verify()[0]]))
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the tree that holds one known seed, so that building leaves nothing behind in the real one."""
    copy = tmp_path_factory.mktemp("checkout")
    skip = shutil.ignore_patterns("__pycache__", ".mypy_cache", "*.egg-info")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, copy / part, ignore=skip)
        else:
            shutil.copy(ROOT / part, copy / part)
    DiskStore(copy / "kernels_cache").put(kernel())
    return copy


def ask(home, paths, *flags):
    """What an installed package sees: the seeds' folder, the keys of all kernels, and how many are whole."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHONPATH", "KEVOLVE_"))}
    env = {**clean, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, *flags, "-c", CODE, str(home)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=home, check=True)
    where, keys, whole = json.loads(done.stdout)
    return Path(where), keys, whole


def committed():
    return {each.key for each in DiskStore(ROOT / "kernels_cache", frozen=True).ls()}


def test_seeds_are_read_from_an_editable_install(tmp_path):
    where, keys, whole = ask(tmp_path, [])
    assert where.name == "__init__.py" and where.parent.name == "kernels_cache"
    assert set(keys) == committed() and whole == len(keys)


def test_seeds_are_read_from_a_wheel(checkout, tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*command, str(checkout)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    where, keys, whole = ask(tmp_path, [site])
    assert where == site / "torch_kevolve" / "kernels_cache" / "__init__.py"
    assert set(keys) == committed() | {kernel().key} and whole == len(keys)
    assert not [name for name in names if "__pycache__" in name or name.startswith(("tests", "benchmarks"))]
    assert "torch_kevolve/py.typed" in names


def test_seeds_are_read_from_a_checkout_on_the_path(checkout, tmp_path):
    """No install at all: the folder of seeds stands beside the package then."""
    code = "from torch_kevolve.store.tiered import seeds; print(seeds())"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("KEVOLVE_")}
    site = [path for path in sys.path if path.endswith("site-packages")]
    env = {**clean, "PYTHONPATH": os.pathsep.join([str(checkout), *site])}
    # -S: an editable install of the tree under test is not seen.
    command = [sys.executable, "-S", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=tmp_path, check=True)
    assert Path(done.stdout.strip()) == checkout / "kernels_cache"


def test_torch_finds_the_backend_by_name():
    code = "import torch._dynamo as d; print('kevolve' in d.list_backends())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"


def test_the_metadata_has_one_home():
    told = metadata.metadata("torch_kevolve")
    assert told["Version"] == VERSION and told["Requires-Python"] == ">=3.11"
    assert "[project]" not in (ROOT / "pyproject.toml").read_text()
    commands = {point.name: point.value for point in metadata.entry_points(group="console_scripts")}
    assert commands["kevolve"] == "torch_kevolve.cli:main"
