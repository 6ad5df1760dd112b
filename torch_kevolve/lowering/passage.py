"""Passage: what a pass works for, and what it did.

The instance of the pass that runs may be a deep copy of the one that was passed in, so it holds a token and nothing
else; what it works for stands in a registry of this module.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

import torch

from torch_kevolve.lowering.hooks import Choice, Hooks
from torch_kevolve.record import RegionVerdict


@dataclass
class Work:
    """One `torch.compile` call: its hooks, what was chosen so far, and the verdicts of the graph under way.

    `examples`: small integer inputs of the call, for timing with indices that are in range.
    """

    hooks: Hooks
    examples: Sequence[torch.Tensor] = ()
    choices: dict[str, Choice] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)

    def refuse(self, verdicts: Sequence[RegionVerdict], reason: str, detail: str) -> None:
        """Whatever is compiled next for this call leaves the regions that these verdicts call replaced."""
        with self.lock:
            for verdict in verdicts:
                if verdict.status == "replaced" and verdict.task is not None:
                    self.choices[verdict.task] = Choice(reason=reason, detail=detail)


@dataclass
class Passage:
    """What the pass did while one graph was compiled once. `ran` False: Inductor's cache answered instead.

    `waits`: guards are added when it is decided whether the kernels stay, by `keep`. Else at once: Inductor's caches
    store the guards that are there when it has compiled.
    """

    phase: str
    ran: bool = False
    verdicts: list[RegionVerdict] = field(default_factory=list)
    waits: bool = False
    _promised: list[Callable[[], None]] = field(default_factory=list)

    @property
    def replaced(self) -> int:
        return sum(verdict.status == "replaced" for verdict in self.verdicts)

    def promise(self, guard: Callable[[], None]) -> None:
        """The kernels that were put in need this guard."""
        self._promised.append(guard)
        if not self.waits:
            self.keep()

    def forget(self) -> None:
        """The kernels that were put in are gone, and the graph was compiled without them."""
        self._promised.clear()

    def keep(self) -> None:
        """The kernels that were put in stay: add their guards."""
        while self._promised:
            self._promised.pop()()


_WORKS: WeakValueDictionary[int, Work] = WeakValueDictionary()
"""Whoever compiles holds the work: with the last function that may still compile for it, it is gone."""
_TOKENS = itertools.count(1)
_NOW = threading.local()


def enroll(work: Work) -> int:
    """Register a call's work; the token its pass carries. The work is held by the caller, not here."""
    token = next(_TOKENS)
    _WORKS[token] = work
    return token


def enrolled(token: int) -> Work | None:
    """The work of a token; None where nobody waits for it any more, or in another process."""
    return _WORKS.get(token)


def passage_now() -> Passage:
    """Where a pass that runs in this thread writes."""
    return getattr(_NOW, "passage", None) or Passage("inference")


class recording:
    """While it lasts, passes that run in this thread write into one Passage."""

    def __init__(self, phase: str, waits: bool = False) -> None:
        self.passage = Passage(phase, waits=waits)

    def __enter__(self) -> Passage:
        self.before = getattr(_NOW, "passage", None)
        _NOW.passage = self.passage
        return self.passage

    def __exit__(self, *_: object) -> None:
        _NOW.passage = self.before
