"""Hunt: one task searched, from the trial to the store."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

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
from torch_kevolve.lowering.hooks import Choice, Wanted
from torch_kevolve.purse import Purse
from torch_kevolve.record import GraphRecord, RegionVerdict
from torch_kevolve.settings import VERSION, Settings
from torch_kevolve.store.base import Store
from torch_kevolve.tally import TALLY
from torch_kevolve.task import KernelTask, digest
from torch_kevolve.templates import spaces
from torch_kevolve.templates.base import Space

log = logging.getLogger(__name__)
VERIFY_S = 120.0
AFTER_BASELINES = 0.25
"""Share of a search's seconds that candidates get at least, however long the baselines took."""


@cache
def shared_evaluator(name: str) -> Evaluator:
    """One per process: its workers stay warm over all sessions."""
    return EVALUATORS[name]()


@dataclass(frozen=True)
class Hunt:
    """Searches one task at a time with what the settings name. What it finds is in the store when it returns."""

    settings: Settings
    store: Store
    memory: ExperienceGraph
    languages: tuple[str, ...]

    def families(self, task: KernelTask, device: str) -> list[Space]:
        """What the template families offer for a task there."""
        return spaces(task, current(device).facts(), self.languages)

    def lost(self, each: Wanted) -> Choice | None:
        """The verdict of a search that came to its own end without a winner, if this effort would find no more."""
        record = self.store.get_record(self._loss_key(each))
        if record is None or self.settings.effort == "none" or record.open_to(self.settings.effort):
            return None
        return Choice(reason=record.regions[0].reason, detail="searched before")

    def _lose(self, each: Wanted, reason: str) -> None:
        """Remember a finished search that found nothing, as the record of a graph that is this task alone."""
        effort = self.settings.effort
        verdict = RegionVerdict(each.task.key, "left", reason, each.phase, each.anchor, effort=effort)
        fingerprint = current(each.device).fingerprint().key
        self.store.put_record(GraphRecord(self._loss_key(each), fingerprint, (verdict,)))

    def _loss_key(self, each: Wanted) -> str:
        return digest({
            "kevolve": VERSION, "task": each.task.key, "device": current(each.device).fingerprint().key,
            "languages": list(self.languages), "proposer": self.settings.proposer,
        })  # fmt: skip

    def verified_again(self, each: Wanted, kernel: Kernel, purse: Purse) -> Choice | None:
        """Prove a stored kernel here once; it is stored with what was seen. None where it holds no more.

        A kernel that did not hold is set aside, or remembered as rejected where it lies in a read-only tier.
        """
        key = self._rejection_key(each, kernel)
        if self.store.get_record(key) is not None:
            return None
        outcome = self._run(each, lambda trial: _confirmed(trial.confirm(kernel.candidate), kernel.candidate))
        if isinstance(outcome, str):
            return Choice(reason="not-verified-here", undecided=True, detail=outcome)
        purse.closed = purse.closed or outcome.interrupted
        if outcome.candidate is not None and outcome.evidence is not None:
            return Choice(self._keep(each, outcome.candidate, outcome.evidence), "hit", outcome.evidence.ratio)
        if outcome.interrupted:
            return Choice(reason="interrupted", undecided=True)
        self.store.put_record(GraphRecord(key, current(each.device).fingerprint().key, ()))
        self.store.remove(each.task.key, kernel.fingerprint, f"{outcome.reason} with the software that is here now")
        return None

    def _rejection_key(self, each: Wanted, kernel: Kernel) -> str:
        return digest({"rejected": kernel.key, "soft": current(each.device).soft()})

    def search(self, each: Wanted, seconds: float, purse: Purse) -> Choice:
        """Search for so many seconds. A winner is in the store; a search that came to its own end is remembered."""
        families = self.families(each.task, each.device)
        if not families:
            return Choice(reason="no-family")
        TALLY.add("searches")
        started = time.monotonic()

        def body(trial: Trial) -> Outcome:
            # Baselines that took the time of the candidates would be time for nothing.
            deadline = max(started + seconds, time.monotonic() + AFTER_BASELINES * seconds)
            return self._evolve(each, families, trial, deadline)

        outcome = self._run(each, body, started + (1 + AFTER_BASELINES) * seconds)
        if isinstance(outcome, str):
            return Choice(reason="evaluation", detail=outcome, undecided=True)
        purse.closed = purse.closed or outcome.interrupted
        if outcome.candidate is not None and outcome.evidence is not None:
            kernel = self._keep(each, outcome.candidate, outcome.evidence)
            return Choice(kernel, "won", outcome.evidence.ratio)
        if outcome.finished:
            self._lose(each, outcome.reason)
        else:
            self.store.wish(each.task, dict(each.binding), each.share)
        return Choice(reason=outcome.reason, undecided=not outcome.finished)

    def _evolve(self, each: Wanted, families: list[Space], trial: Trial, deadline: float) -> Outcome:
        dice = random.Random(self.settings.seed)
        search = Search(each.task, each.binding, families, self._past(each), dice=dice)
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

    def _run(self, each: Wanted, body: Callable[[Trial], Outcome], deadline: float | None = None) -> Outcome | str:
        """Open a trial, run, close. A sentence where the evaluation itself is broken; Ctrl-C ends the search only."""
        deadline = time.monotonic() + VERIFY_S if deadline is None else deadline
        job = Job(each.task, each.binding, each.device, deadline, frozen=each.frozen)
        evaluator = shared_evaluator(self.settings.evaluator)
        trial = None
        try:
            trial = evaluator.open(job, self.settings)
            return body(trial)
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
