"""Scripted: candidates given beforehand, in order."""

from __future__ import annotations

from collections.abc import Iterable

from torch_kevolve.agent.search import Attempt, Search
from torch_kevolve.candidate import Candidate
from torch_kevolve.settings import Settings


class ScriptedProposer:
    """Hands out a fixed list: a double for tests, and the way to have one's own candidates judged by the loop."""

    name = "scripted"

    def __init__(self, settings: Settings, candidates: Iterable[Candidate] = ()) -> None:
        self.settings = settings
        self.candidates = list(candidates)

    def propose(self, search: Search, parent: Attempt | None, count: int) -> list[Candidate]:
        return search.fresh(self.candidates, count)
