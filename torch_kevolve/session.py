"""Session: names become objects, tasks become kernels.

The only place where settings are turned into a store, an evaluator, a proposer and the rest. It answers lowering's two
questions: could anybody write a kernel for this task (`claims`), and which kernel shall stand here (`choose`).
"""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch

from torch_kevolve.agent.evolution import Evolution, Outcome
from torch_kevolve.agent.progress import open_progress
from torch_kevolve.agent.promotion import refusal
from torch_kevolve.agent.proposers import PROPOSERS
from torch_kevolve.agent.search import Past, Search
from torch_kevolve.agent.selection import SELECTIONS
from torch_kevolve.candidate import Candidate
from torch_kevolve.devices import current
from torch_kevolve.errors import EvaluationError
from torch_kevolve.evaluation import EVALUATORS
from torch_kevolve.evaluation.base import Evaluator, Job, Trial
from torch_kevolve.evidence import Evidence
from torch_kevolve.graph_memory import Case, ExperienceGraph
from torch_kevolve.kernel import Kernel
from torch_kevolve.languages import usable
from torch_kevolve.lowering.hooks import Choice, Wanted
from torch_kevolve.only_here import only_here
from torch_kevolve.purse import Purse
from torch_kevolve.settings import Settings
from torch_kevolve.store import open_store
from torch_kevolve.store.base import Store
from torch_kevolve.tally import TALLY
from torch_kevolve.task import KernelTask
from torch_kevolve.templates import spaces
from torch_kevolve.templates.base import Space

log = logging.getLogger(__name__)
SOFT = ("torch", "triton", "compiler", "toolkit", "driver")
"""Parts of the soft fingerprint whose change asks for a new verification."""


@lru_cache(maxsize=None)
def shared_evaluator(name: str) -> Evaluator:
    """One per process: its workers stay warm over all sessions."""
    return EVALUATORS[name]()


@dataclass
class Session:
    """What one set of settings means. Safe for many threads; searches take turns in the purse."""

    settings: Settings
    store: Store
    memory: ExperienceGraph
    languages: tuple[str, ...]
    _claims: dict[str, bool] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @classmethod
    def open(cls, settings: Settings) -> Session:
        return cls(
            settings=settings,
            store=open_store(settings),
            memory=_memory(str(settings.home_path / "memory")),
            languages=usable(settings.languages),
        )

    def claims(self, task: KernelTask, binding: Mapping[str, int], device: str) -> bool:
        """Whether any family has a space for the task here, or a proven kernel lies in the store."""
        key = f"{task.key}@{device}"
        if key not in self._claims:
            here = current(device)
            families = spaces(task, here.facts(), self.languages)
            self._claims[key] = bool(families) or self.store.get(task.key, here.fingerprint()) is not None
        return self._claims[key]

    def choose(self, wanted: Sequence[Wanted], purse: Purse) -> dict[str, Choice]:
        """A choice per task key, hottest first. Never raises for a bad candidate or a broken evaluator."""
        out: dict[str, Choice] = {}
        todo: list[Wanted] = []
        for each in sorted(wanted, key=lambda w: -w.share):
            known = self._known(each)
            if known is not None:
                out[each.task.key] = known
            elif each.task.key not in out:
                todo.append(each)
        while todo:
            each = todo.pop(0)
            out[each.task.key] = self._search_or_wish(each, [each.share, *(w.share for w in todo)], purse)
        return out

    def _known(self, each: Wanted) -> Choice | None:
        here = current(each.device)
        kernel = self.store.get(each.task.key, here.fingerprint())
        if kernel is None:
            TALLY.add("misses")
            return None
        soft = kernel.evidence.device.get("soft", {}) if kernel.evidence.device else {}
        now = here.soft()
        changed = [name for name in SOFT if name in soft and soft.get(name) != now.get(name, "")]
        if not changed:
            TALLY.add("hits")
            return Choice(kernel, "hit", kernel.evidence.ratio)
        return self._verified_again(each, kernel, changed)

    def _verified_again(self, each: Wanted, kernel: Kernel, changed: list[str]) -> Choice | None:
        """Another torch, triton, compiler or driver: prove the kernel here once; it is stored with what was seen."""
        if not self._may_search():
            TALLY.add("misses")
            return Choice(reason="not-verified-here", undecided=True, detail=f"changed: {', '.join(changed)}")
        outcome = self._run(each, lambda trial, job: _confirmed(trial.confirm(kernel.candidate), kernel.candidate))
        if isinstance(outcome, Outcome) and outcome.candidate is not None and outcome.evidence is not None:
            TALLY.add("hits")
            return Choice(self._keep(each, outcome.candidate, outcome.evidence), "hit", outcome.evidence.ratio)
        TALLY.add("misses")
        return None

    def _may_search(self) -> bool:
        return self.settings.effort != "none" and _local_rank() == 0

    def _search_or_wish(self, each: Wanted, shares: Sequence[float], purse: Purse) -> Choice:
        if self.settings.effort == "none":
            return self._wish(each, "not-searched")
        if _local_rank() != 0:
            return self._wish(each, "another-rank-searches")
        with purse.turn:
            known = self._found_meanwhile(each)
            if known is not None:
                return known
            seconds = purse.allowance(shares, each.phase)
            if seconds <= 0:
                return self._wish(each, "interrupted" if purse.closed else "budget")
            here = current(each.device)
            name = f"{each.task.key[:32]}-{here.fingerprint().key[:16]}"
            with only_here(self.settings.home_path / "locks", name) as mine:
                if not mine:
                    return self._wish(each, "searching-elsewhere")
                with purse.spending():
                    return self._search(each, seconds, purse)

    def _found_meanwhile(self, each: Wanted) -> Choice | None:
        kernel = self.store.get(each.task.key, current(each.device).fingerprint())
        return None if kernel is None else Choice(kernel, "hit", kernel.evidence.ratio)

    def _wish(self, each: Wanted, reason: str) -> Choice:
        self.store.wish(each.task, dict(each.binding), each.share)
        return Choice(reason=reason, undecided=True)

    def _search(self, each: Wanted, seconds: float, purse: Purse) -> Choice:
        families = spaces(each.task, current(each.device).facts(), self.languages)
        if not families:
            return Choice(reason="no-family")
        TALLY.add("searches")
        deadline = time.monotonic() + seconds
        outcome = self._run(each, lambda trial, job: self._evolve(each, families, trial, deadline), deadline)
        if isinstance(outcome, str):
            return Choice(reason="evaluation", detail=outcome, undecided=True)
        purse.closed = purse.closed or outcome.interrupted
        if outcome.candidate is not None and outcome.evidence is not None:
            kernel = self._keep(each, outcome.candidate, outcome.evidence)
            return Choice(kernel, "won", outcome.evidence.ratio)
        if not outcome.finished:
            self.store.wish(each.task, dict(each.binding), each.share)
        return Choice(reason=outcome.reason, undecided=not outcome.finished)

    def _evolve(self, each: Wanted, families: list[Space], trial: Trial, deadline: float) -> Outcome:
        search = Search(
            each.task, each.binding, families, self._past(each), dice=random.Random(self.settings.seed)
        )
        made: dict[str, Case] = {}

        def record(candidate: Candidate, evidence: Evidence) -> None:
            TALLY.add("candidates")
            parent = made.get(candidate.provenance.parent or "")
            fingerprint = current(each.device).fingerprint()
            began = None if parent is None else parent.id
            made[candidate.id] = self.memory.record_case(each.task, candidate, evidence, fingerprint, began)

        return Evolution(
            search=search,
            trial=trial,
            proposer=PROPOSERS[self.settings.proposer](self.settings),
            selection=SELECTIONS[self.settings.selection](self.settings),
            limits=self.settings.budget,
            deadline=deadline,
            record=record,
            progress=open_progress(self.settings.progress),
            label=f"{each.anchor or 'region'} {each.task.key[:8]}",
        ).run()

    def _run(self, each: Wanted, body: Callable[[Trial, Job], Outcome], deadline: float | None = None) -> Outcome | str:
        """Open a trial, run, close. A sentence where the evaluation itself is broken; Ctrl-C ends the search only."""
        deadline = time.monotonic() + 120.0 if deadline is None else deadline
        job = Job(each.task, each.binding, each.device, deadline, frozen=each.frozen)
        evaluator = shared_evaluator(self.settings.evaluator)
        trial = None
        try:
            trial = evaluator.open(job, self.settings)
            return body(trial, job)
        except EvaluationError as error:
            log.warning("task %s: %s", each.task.key[:12], error)
            if self.settings.on_error == "raise":
                raise
            return str(error)
        except KeyboardInterrupt:
            return Outcome(None, None, "interrupted", 0, False, True)
        finally:
            if trial is not None:
                trial.close()

    def _keep(self, each: Wanted, candidate: Candidate, evidence: Evidence) -> Kernel:
        kernel = Kernel(each.task, current(each.device).fingerprint(), candidate, evidence)
        self.store.put(kernel)
        return kernel

    def _past(self, each: Wanted) -> list[Past]:
        fingerprint = current(each.device).fingerprint()
        own = self.memory.best(each.task.key, fingerprint)
        cases = [*([own] if own is not None else []), *self.memory.like(each.task, fingerprint)]
        return [Past(c.family, c.language, c.point, same=c.task == each.task.key) for c in cases if c.family]


def _confirmed(evidence: Evidence, candidate: Candidate) -> Outcome:
    why = refusal(evidence)
    return Outcome(None if why else candidate, None if why else evidence, why or "won", 1, True)


@lru_cache(maxsize=None)
def _memory(folder: str) -> ExperienceGraph:
    return ExperienceGraph.open(Path(folder))


def _local_rank() -> int:
    """0 where torch.distributed does not run: there everybody may search."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    return int(os.environ.get("LOCAL_RANK", "0"))

