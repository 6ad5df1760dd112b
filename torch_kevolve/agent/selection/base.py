"""Selection: which attempt is refined next."""

from __future__ import annotations

from typing import Protocol

from torch_kevolve.agent.search import Attempt, Search


class Selection(Protocol):
    """A member of the selection axis."""

    name: str

    def pick(self, search: Search) -> Attempt | None:
        """The attempt whose children are judged next; None: begin on a clean slate."""
        ...
