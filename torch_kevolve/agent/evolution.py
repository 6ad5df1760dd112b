"""Evolution: select, propose, evaluate, record.

One task at a time. The library calls that eager makes (no kernel at all) are judged first, then a draft of
independent candidates, then children of what did best. It ends with the clock, the number of candidates, a stall,
95 % of the roofline floor, an empty space, or Ctrl-C, which ends the search and keeps what it found.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch_kevolve.agent.progress import Progress
from torch_kevolve.agent.promotion import hopeful, refusal
from torch_kevolve.agent.proposers.base import Proposer
from torch_kevolve.agent.proposers.template import stamped
from torch_kevolve.agent.search import Attempt, Search
from torch_kevolve.agent.selection.base import Selection
from torch_kevolve.candidate import Candidate
from torch_kevolve.evaluation.base import LEAST_JUDGED, Trial
from torch_kevolve.evidence import Evidence
from torch_kevolve.settings import Budget

log = logging.getLogger(__name__)

Record = Callable[[Candidate, Evidence], None]
BATCH = 4
"""Candidates per refining step: enough to build in parallel, few enough that each step learns from the last."""
ENOUGH = 0.95
GAIN = 1.01
"""A better best must be this much faster to end a stall: smaller steps are noise (2 to 3 % between quiet runs)."""
CONFIRM_TRIES = 3


@dataclass(frozen=True)
class Outcome:
    """What a search came to. `candidate` and `evidence` (the confirmation's) are set when one earned its place.

    `reason`: `won`, or why not: `not-faster`, `not-right`, `no-candidates`, `budget`, `interrupted`.
    `finished`: the search came to its own end, so an equal search would find no more.
    """

    candidate: Candidate | None
    evidence: Evidence | None
    reason: str
    tried: int
    finished: bool
    interrupted: bool = False


@dataclass
class Evolution:
    """One search under way: who proposes, who picks, who judges, and the limits.

    `deadline`: time.monotonic() after which no new candidate is judged, if LEAST_JUDGED were; the confirmation of the
    best one may pass it.
    `record` is called with every candidate and its evidence, confirmations included.
    """

    search: Search
    trial: Trial
    proposer: Proposer
    selection: Selection
    limits: Budget
    deadline: float
    record: Record
    progress: Progress
    label: str = ""
    _ended: str = field(default="", init=False)
    _best: float = field(default=0.0, init=False)
    _stalled: int = field(default=0, init=False)

    def run(self) -> Outcome:
        """Search, then confirm the best. KeyboardInterrupt ends the search and is not raised again."""
        interrupted = False
        try:
            self._judge(self._library_calls())
            self._draft()
            while not self._over():
                self._step()
        except KeyboardInterrupt:
            interrupted, self._ended = True, "interrupted"
        finally:
            self.progress.close()
        try:
            return self._promote(interrupted)
        except KeyboardInterrupt:
            return Outcome(None, None, "interrupted", len(self.search.attempts), False, True)

    def _library_calls(self) -> list[Candidate]:
        """Zero-kernel candidates: they cost no build, and give back library kernels that a decomposition lost."""
        spaces = [space for space in self.search.spaces if space.language == "aten"]
        made = [stamped(s.render(p), s, p, "template", None) for s in spaces for p in (s.start or s.points()[:1])]
        return self.search.fresh(made, len(made))

    def _draft(self) -> None:
        wanted = min(self.limits.draft, self.limits.candidates_per_task - len(self.search.attempts))
        while wanted > 0 and not self._over():
            batch = self.proposer.propose(self.search, None, min(BATCH, wanted))
            if not batch:
                return
            wanted -= len(batch)
            self._judge(batch)

    def _step(self) -> None:
        room = self.limits.candidates_per_task - len(self.search.attempts)
        parent = self.selection.pick(self.search)
        batch = self.proposer.propose(self.search, parent, min(BATCH, room))
        if not batch and parent is not None:
            batch = self.proposer.propose(self.search, None, min(BATCH, room))
        if not batch:
            self._ended = "exhausted"
            return
        self._judge(batch)

    def _judge(self, batch: Sequence[Candidate]) -> None:
        if not batch or self._over():
            return
        for candidate, evidence in self.trial.evaluate(batch):
            attempt = Attempt(candidate, evidence)
            self.search.attempts.append(attempt)
            self._record(candidate, evidence)
            self._notice(attempt)

    def _notice(self, attempt: Attempt) -> None:
        if attempt.speed > self._best * GAIN:
            self._best, self._stalled = attempt.speed, 0
        else:
            self._stalled += 1
        if attempt.right and (attempt.evidence.roofline or 0.0) >= ENOUGH:
            self._ended = "roofline"
        self.progress.show(self.label, len(self.search.attempts), self._best, self.deadline - time.monotonic())

    def _over(self) -> bool:
        if self._ended:
            return True
        if time.monotonic() >= self.deadline and len(self.search.attempts) >= LEAST_JUDGED:
            self._ended = "budget"
        elif len(self.search.attempts) >= self.limits.candidates_per_task:
            self._ended = "candidates"
        elif self._stalled >= self.limits.stall and len(self.search.attempts) > self.limits.draft:
            self._ended = "stall"
        return bool(self._ended)

    def _promote(self, interrupted: bool) -> Outcome:
        tried = len(self.search.attempts)
        finished = self._ended not in ("budget", "interrupted")
        last = ""
        for attempt in self._hopes():
            evidence = self.trial.confirm(attempt.candidate)
            self._record(attempt.candidate, evidence)
            last = refusal(evidence)
            if not last:
                return Outcome(attempt.candidate, evidence, "won", tried, finished, interrupted)
            log.info("%s: %s is not kept: %s %s", self.label, attempt.candidate.id[:12], last, evidence.note)
        if not finished:
            reason = self._ended
        elif not tried:
            reason = "no-candidates"
        else:
            reason = last or ("not-faster" if self.search.best else "not-right")
        return Outcome(None, None, reason, tried, finished, interrupted)

    def _hopes(self) -> list[Attempt]:
        """What is confirmed, fastest first: a few kernels, and eager's library calls, which only have to be ahead of
        Inductor's code."""
        ranked = [each for each in self.search.ranked() if hopeful(each)]
        kernels = [each for each in ranked if not each.library][:CONFIRM_TRIES]
        return [each for each in ranked if each.library or each in kernels]

    def _record(self, candidate: Candidate, evidence: Evidence) -> None:
        try:
            self.record(candidate, evidence)
        except OSError as error:  # a full or read-only disk costs the memory, not the search
            log.warning("case of %s is not recorded: %s", candidate.id[:12], error)
