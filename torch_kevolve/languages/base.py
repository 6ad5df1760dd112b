"""Language: how one kind of source is built and launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from torch_kevolve.candidate import Candidate

Launcher: TypeAlias = Callable[[str, tuple[int, ...], Sequence[Any], Mapping[str, Any], Mapping[str, int]], None]
"""launch(kernel, grid, args, meta, options): args are tensors, ints and floats in the kernel's order."""


@dataclass(frozen=True)
class Built:
    """The outcome of a build. `note` empty: it worked and `artifact` can be loaded. `profile`: registers, spills ..."""

    artifact: Path | None
    note: str = ""
    profile: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return self.artifact is not None


@dataclass(frozen=True)
class Status:
    """`state`: available, compile-only or missing. `hint`: what to install or do, empty when available."""

    name: str
    state: str
    hint: str = ""


class Language(Protocol):
    """A member of the language axis. No member raises for a bad candidate: `Built.note` says what is wrong."""

    name: str

    def status(self) -> Status:
        """Whether this language works on this machine."""
        ...

    def build(self, candidate: Candidate, binding: Mapping[str, int], arch: str, workdir: Path) -> Built:
        """Compile for `arch` ("cpu:native", "cuda:90", "hip:gfx942"); needs no device. Safe in parallel processes."""
        ...

    def load(self, built: Built, candidate: Candidate) -> Launcher:
        """Bring a build into this process (a worker, or the user's once it is proven)."""
        ...
