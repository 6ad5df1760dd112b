"""Template: fills the families' spaces, no LLM.

Draft: every space's starting points by turns, begun with the places that did well before on this task or one like it,
then random places. Refine: single steps along each axis from the parent, crossings of the parent with other good
places of its family, and mutations of two axes.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace

from torch_kevolve.agent.search import Attempt, Past, Search
from torch_kevolve.candidate import Candidate
from torch_kevolve.settings import Settings
from torch_kevolve.templates.base import Point, Space

log = logging.getLogger(__name__)

RANDOM_TRIES = 64
PAST_SHARE = 0.5
"""At most this share of a draft batch comes from memory of other tasks: it finds good places sooner, but anchors."""


class TemplateProposer:
    """The default proposer. Deterministic for a given `search.dice`."""

    name = "template"

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def propose(self, search: Search, parent: Attempt | None, count: int) -> list[Candidate]:
        spaces = [space for space in search.spaces if space.axes or space.start]
        if not spaces or count <= 0:
            return []
        own = None if parent is None else _space_of(spaces, parent)
        if own is None or parent is None:
            return search.fresh(_render(_draft(search, spaces, count), self.name, None), count)
        out = search.fresh(_render(_refine(search, own, parent), self.name, parent), count)
        if len(out) < count:  # the neighbourhood is used up: independent places, still within the same budget
            out += search.fresh(_render(_draft(search, spaces, count), self.name, None), count - len(out))
        return out


def _draft(search: Search, spaces: list[Space], count: int) -> Iterator[tuple[Space, Point]]:
    table = {(space.family, space.language): space for space in spaces}
    same = [past for past in search.past if past.same]
    alike = [past for past in search.past if not past.same][: max(1, int(count * PAST_SHARE))]
    yield from _recalled(table, same)
    first = [(space, point) for space in spaces for point in space.start[:1]]
    yield from first
    yield from _recalled(table, alike)
    yield from _by_turns(spaces)
    for _ in range(RANDOM_TRIES):
        space = search.dice.choice(spaces)
        point = {name: search.dice.choice(choices) for name, choices in space.axes.items()}
        if space.valid(point):
            yield space, point
    for space in spaces:  # a small space is exhausted, not sampled for ever
        if space.size <= RANDOM_TRIES * 4:
            yield from ((space, point) for point in space.points())


def _recalled(table: dict[tuple[str, str], Space], pasts: list[Past]) -> Iterator[tuple[Space, Point]]:
    for past in pasts:
        space = table.get((past.family, past.language))
        if space is not None and _fits(space, past.point):
            yield space, dict(past.point)


def _fits(space: Space, point: Point) -> bool:
    return (
        set(point) == set(space.axes)
        and all(point[name] in choices for name, choices in space.axes.items())
        and space.valid(point)
    )


def _by_turns(spaces: list[Space]) -> Iterator[tuple[Space, Point]]:
    """Second starting point of every space, then the third ... so that a short budget sees all families."""
    rows = itertools.zip_longest(*(space.start[1:] for space in spaces))
    for row in rows:
        yield from ((space, point) for space, point in zip(spaces, row, strict=True) if point is not None)


def _refine(search: Search, space: Space, parent: Attempt) -> Iterator[tuple[Space, Point]]:
    here: Point = dict(parent.candidate.provenance.point)
    if not _fits(space, here):
        return
    steps = space.neighbours(here)
    search.dice.shuffle(steps)
    crossings = [_cross(search, here, other) for other in _mates(search, parent)]
    mutations = [_mutate(search, space, here) for _ in range(RANDOM_TRIES)]
    # Two single steps for each crossing and mutation: neighbours are seen first, far places are not starved.
    streams = [iter(steps[::2]), iter(steps[1::2]), iter(crossings), iter(mutations)]
    for row in itertools.zip_longest(*streams):
        for point in row:
            if point is not None and _fits(space, point):
                yield space, point


def _mates(search: Search, parent: Attempt) -> list[Point]:
    mine = parent.candidate
    return [
        dict(each.candidate.provenance.point)
        for each in search.ranked()[:6]
        if each is not parent
        and each.candidate.language == mine.language
        and each.candidate.provenance.family == mine.provenance.family
    ]


def _cross(search: Search, here: Point, other: Point) -> Point:
    return {
        name: other[name] if name in other and search.dice.random() < 0.5 else value for name, value in here.items()
    }


def _mutate(search: Search, space: Space, here: Point) -> Point:
    names = search.dice.sample(sorted(space.axes), k=min(2, len(space.axes)))
    return {**here, **{name: search.dice.choice(space.axes[name]) for name in names}}


def _space_of(spaces: list[Space], parent: Attempt) -> Space | None:
    made = parent.candidate
    for space in spaces:
        if (space.family, space.language) == (made.provenance.family, made.language):
            return space
    return None


def _render(places: Iterable[tuple[Space, Point]], proposer: str, parent: Attempt | None) -> Iterator[Candidate]:
    """Render lazily. A renderer that raises is our fault: that place is passed over and logged."""
    for space, point in places:
        try:
            candidate = space.render(point)
        except Exception:  # one broken place of one family must not end a search
            log.warning("family %s (%s) cannot render %s", space.family, space.language, dict(point), exc_info=True)
            continue
        yield stamped(candidate, space, point, proposer, parent)


def stamped(candidate: Candidate, space: Space, point: Point, proposer: str, parent: Attempt | None) -> Candidate:
    """The candidate with its origin filled in: proposer, family, place, parent and named moves."""
    provenance = replace(
        candidate.provenance,
        proposer=proposer,
        family=space.family,
        point=tuple(sorted(point.items())),
        parent=None if parent is None else parent.candidate.id,
        strategies=space.strategies(point),
    )
    return replace(candidate, provenance=provenance)
