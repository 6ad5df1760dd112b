"""Search: what is known while one task is searched."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch_kevolve.candidate import Candidate
from torch_kevolve.evidence import Evidence, Stage
from torch_kevolve.task import KernelTask
from torch_kevolve.templates.base import Choice, Space


@dataclass(frozen=True)
class Attempt:
    """One candidate of this search with what the judge saw of it."""

    candidate: Candidate
    evidence: Evidence

    @property
    def right(self) -> bool:
        """Judged right and timed, whatever its speed."""
        return self.evidence.ok and self.evidence.reached is Stage.DONE

    @property
    def library(self) -> bool:
        """Eager's own library calls, no kernel."""
        return self.candidate.language == "aten"

    @property
    def speed(self) -> float:
        """Fastest baseline's median over the candidate's, sampled side by side; 0 for one that is not right.

        Times of different moments are not compared: on a loaded machine the baselines drift with the candidate.
        Library calls are eager, so against all baselines they are 1 at most, however far Inductor is behind: at 2.36
        times Inductor's speed they won over a column sum that was 1.18 times as fast as eager.
        """
        speed = self._against_rivals()
        return min(speed, 1.0) if self.library else speed

    def _against_rivals(self) -> float:
        if not self.right:
            return 0.0
        mine = self.evidence.median_ms
        others = [t.median_ms for name, t in self.evidence.arms.items() if name != "candidate"]
        if mine is None or mine <= 0 or not others:
            return self.evidence.ratio or 0.0
        return min(others) / mine


@dataclass(frozen=True)
class Past:
    """A place in a family's space that once did well, on this task or on one like it. `same`: on this very task."""

    family: str
    language: str
    point: Mapping[str, Choice]
    same: bool = False


@dataclass
class Search:
    """One task under search. `seen` holds the ids of all candidates handed out: none is judged twice.

    `spaces`: what the families offer; `past`: places to begin from, best first; `dice`: the only source of chance.
    """

    task: KernelTask
    binding: Mapping[str, int]
    spaces: Sequence[Space]
    past: Sequence[Past] = ()
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    attempts: list[Attempt] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def fresh(self, candidates: Iterable[Candidate], count: int) -> list[Candidate]:
        """The first `count` candidates that were never handed out; they count as handed out from now on."""
        out: list[Candidate] = []
        for candidate in candidates:
            if len(out) == count:
                break
            if candidate.id not in self.seen:
                self.seen.add(candidate.id)
                out.append(candidate)
        return out

    def ranked(self) -> list[Attempt]:
        """The right attempts, fastest first."""
        return sorted((each for each in self.attempts if each.right), key=lambda each: -each.speed)

    @property
    def best(self) -> Attempt | None:
        ranked = self.ranked()
        return ranked[0] if ranked else None
