"""FILE:factory becomes a model, or an error that names the cure."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torch_kevolve.errors import FactoryError
from torch_kevolve.factory import load

TEXT = """
from __future__ import annotations
from dataclasses import dataclass
import torch
from beside import WIDTH

@dataclass
class Shape:
    width: int = WIDTH

def pair():
    return torch.nn.Linear(Shape().width, 2), (torch.ones(1, 3),)

def triple():
    return (lambda x, scale: x * scale), [torch.ones(2)], {"scale": 3}

def several():
    return [pair(), triple()]

number = 4
def tensor(): return torch.nn.ReLU(), torch.ones(2)
def single(): return torch.nn.ReLU()
def empty(): return []
def badkw(): return torch.nn.ReLU(), (), 3
def broken(): raise ValueError("inside")
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("WIDTH = 3\n")
    path = tmp_path / "case.py"
    path.write_text(TEXT)
    return path


def test_pair_triple_and_several(file: Path) -> None:
    (pair,) = load(f"{file}:pair")
    assert pair.model(*pair.args).shape == (1, 2) and pair.kwargs == {}
    (triple,) = load(f"{file}:triple")
    assert torch.equal(triple.model(*triple.args, **triple.kwargs), torch.full((2,), 3.0))
    assert len(load(f"{file}:several")) == 2


@pytest.mark.parametrize("name", ["missing", "number", "tensor", "single", "empty", "badkw"])
def test_what_is_no_factory_says_the_cure(file: Path, name: str) -> None:
    with pytest.raises(FactoryError, match="FILE:factory, where factory"):
        load(f"{file}:{name}")


@pytest.mark.parametrize("text", ["nothing", "nowhere.py:make", ":make", "file.py:"])
def test_what_is_no_file_says_the_cure(text: str) -> None:
    with pytest.raises(FactoryError, match="FILE:factory"):
        load(text)


def test_an_exception_inside_passes_through(file: Path) -> None:
    with pytest.raises(ValueError, match="inside"):
        load(f"{file}:broken")
