"""Best first: refine the fastest, now and then another."""

from __future__ import annotations

from torch_kevolve.agent.search import Attempt, Search
from torch_kevolve.settings import Settings

CLEAN_SLATE = 0.15
SECOND = 0.25


class BestFirst:
    """Picks the fastest right attempt; with some chance the next one of another family, or none at all.

    The clean slate keeps a search from being tied to where it began.
    """

    name = "best_first"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def pick(self, search: Search) -> Attempt | None:
        ranked = search.ranked()
        if not ranked or search.dice.random() < CLEAN_SLATE:
            return None
        first = ranked[0]
        family = first.candidate.provenance.family
        others = [each for each in ranked if each.candidate.provenance.family != family]
        if others and search.dice.random() < SECOND:
            return others[0]
        return first
