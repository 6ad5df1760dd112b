"""Proposer: who writes candidates."""

from __future__ import annotations

from typing import Protocol

from torch_kevolve.agent.search import Attempt, Search
from torch_kevolve.candidate import Candidate


class Proposer(Protocol):
    """A member of the proposer axis."""

    name: str

    def propose(self, search: Search, parent: Attempt | None, count: int) -> list[Candidate]:
        """At most `count` candidates that `search` has not handed out (take them from `search.fresh`).

        `parent`: the attempt to improve on, None for independent ones. An empty list: nothing is left to propose.
        """
        ...
