"""Factory: `FILE:make` becomes a model and its arguments."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from torch_kevolve.errors import FactoryError


@dataclass(frozen=True)
class Case:
    """A model (or any callable) with the arguments of one call."""

    model: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def load(text: str) -> list[Case]:
    """The cases that `FILE:factory` makes, at least one. Raises FactoryError, which says what is missing.

    `factory()` takes no argument and returns `(model, args)` or `(model, args, kwargs)`, or a list of those.
    The file runs as a module of its own with its folder on `sys.path`; an exception inside it passes through.
    """
    where, _, name = text.rpartition(":")
    path = Path(where).expanduser()
    if not where or not name:
        raise FactoryError(text=text, why="there is no colon between a file and a function")
    if not path.is_file():
        raise FactoryError(text=text, why=f"there is no file {where}")
    make = getattr(_module(text, path.absolute()), name, None)
    if not callable(make):
        raise FactoryError(text=text, why=f"{where} has no function {name}")
    made = make()
    rows = made if isinstance(made, list) else [made]
    if not rows:
        raise FactoryError(text=text, why=f"{name}() returned an empty list")
    return [_case(text, name, row) for row in rows]


def _module(text: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(f"_kevolve_case_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise FactoryError(text=text, why=f"{path.name} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses, pickling and torch.compile look a class's module up by name.
    sys.modules[spec.name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def _case(text: str, name: str, row: Any) -> Case:
    if not isinstance(row, tuple) or len(row) not in (2, 3) or not callable(row[0]):
        raise FactoryError(text=text, why=f"{name}() returned {type(row).__name__}, not a tuple of model and arguments")
    model, args, *rest = row
    if isinstance(args, torch.Tensor) or not isinstance(args, tuple | list):
        raise FactoryError(text=text, why=f"{name}() returned {type(args).__name__} as arguments, not a tuple of them")
    kwargs = rest[0] if rest else {}
    if not isinstance(kwargs, Mapping):
        raise FactoryError(text=text, why=f"{name}() returned {type(kwargs).__name__} as keyword arguments, not a dict")
    return Case(model, tuple(args), kwargs)
