"""Languages: the catalogue of what kernels are written in."""

from __future__ import annotations

from torch_kevolve.languages.aten import Aten
from torch_kevolve.languages.base import Language
from torch_kevolve.languages.cpp import Cpp
from torch_kevolve.languages.triton import Triton
from torch_kevolve.registry import Registry

LANGUAGES: Registry[type[Language]] = Registry("languages", {"aten": Aten, "cpp": Cpp, "triton": Triton})


def usable(wanted: str = "") -> tuple[str, ...]:
    """Names of the languages that compile here, of those that `wanted` (comma-separated) names if it names any."""
    names = [name.strip() for name in wanted.split(",") if name.strip()] or LANGUAGES.names()
    return tuple(name for name in names if LANGUAGES[name]().status().state != "missing")
