"""Install: the seeds travel with the package."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = """
from torch_kevolve.store.tiered import seeds
from pathlib import Path
print(Path(seeds(), "__init__.py").read_text().splitlines()[0])
print(sum(1 for _ in Path(seeds()).glob("kernels/*/*/current")))
"""


def ask(**env):
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "KEVOLVE_SEEDS")}
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, env={**clean, **env}, cwd="/", check=True
    )
    return done.stdout.splitlines()


def committed():
    return sum(1 for _ in (ROOT / "kernels_cache").glob("kernels/*/*/current"))


def test_seeds_are_read_from_an_editable_install():
    caption, count = ask()
    assert caption.startswith('"""Seed kernels') and int(count) == committed()


def test_seeds_are_read_from_a_wheel(tmp_path):
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    wheel = next(tmp_path.glob("*.whl"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    caption, count = ask(PYTHONPATH=str(tmp_path / "site"))
    assert caption.startswith('"""Seed kernels') and int(count) == committed()


def test_torch_finds_the_backend_by_name():
    code = "import torch._dynamo as d; print('kevolve' in d.list_backends())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"
