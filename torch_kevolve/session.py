"""Session: names become objects, tasks become kernels.

Where settings are turned into a store, a memory, languages and whatever a search needs. It answers lowering's two
questions: could anybody write a kernel for this task (`claims`), and which kernel shall stand here (`choose`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import torch

from torch_kevolve.devices import current
from torch_kevolve.kernel import Kernel
from torch_kevolve.lowering.hooks import Choice, Wanted
from torch_kevolve.only_here import only_here
from torch_kevolve.purse import Purse
from torch_kevolve.record import GraphRecord, RegionVerdict
from torch_kevolve.settings import VERSION, Settings
from torch_kevolve.store import open_store
from torch_kevolve.store.base import Store
from torch_kevolve.tally import TALLY
from torch_kevolve.task import KernelTask, digest

log = logging.getLogger(__name__)
SOFT = ("torch", "triton", "compiler", "toolkit", "driver")
"""Parts of the soft fingerprint whose change asks for a new verification."""
BROKEN = ("evaluation", "not-verified-here", "session")
"""Reasons of a task whose evaluation, or whose way there, broke. No fault of any kernel: it is tried again, but not for
ever."""
TRIES = 2
"""Faults of a task after which it is left alone, until kevolve or the software around it changes."""
Fault = Callable[[str, Exception], None]


def _raised(reason: str, error: Exception) -> None:
    raise error


@dataclass
class Session:
    """What one set of settings means. Safe for many threads; searches take turns in the purse."""

    settings: Settings
    store: Store
    make_hunt: Callable[[Settings, Store], Any]
    _claims: dict[str, bool] = field(default_factory=dict)

    @classmethod
    def open(cls, settings: Settings) -> Session:
        return cls(settings, open_store(settings), _hunt)

    @classmethod
    def of(cls, settings: Settings, store: Store, memory: Any, languages: tuple[str, ...]) -> Session:
        """A session of given parts."""
        from torch_kevolve.hunt import Hunt

        return cls(settings, store, lambda settings, store: Hunt(settings, store, memory, languages))

    @cached_property
    def hunt(self) -> Any:
        """The searcher, made when it is first needed: where Inductor's caches answer, that saves 0.2 s of imports."""
        return self.make_hunt(self.settings, self.store)

    @property
    def may_search(self) -> bool:
        """Of several processes of a distributed run, one per machine searches."""
        return self.settings.effort != "none" and _local_rank() == 0

    def claims(self, task: KernelTask, binding: Mapping[str, int], device: str) -> bool:
        """Whether any family has a space for the task here, or a proven kernel lies in the store."""
        # The twin is no part of a task's key, but a family of its own offers it.
        key = f"{task.key}@{device}{'+twin' if task.twin is not None else ''}"
        if key not in self._claims:
            here = current(device)
            self._claims[key] = (
                bool(self.hunt.families(task, device)) or self.store.get(task.key, here.fingerprint()) is not None
            )
        return self._claims[key]

    def choose(self, wanted: Sequence[Wanted], purse: Purse, fault: Fault = _raised) -> dict[str, Choice]:
        """A choice per task key, hottest first. Never raises for a bad candidate or a broken evaluator; a fault of our
        own is told to `fault` and, where that does not raise, costs its own task only."""
        out: dict[str, Choice] = {}
        todo: list[Wanted] = []
        for each in sorted(wanted, key=lambda w: -w.share):
            if each.task.key in out:
                continue
            known = self._guarded(each, partial(self._known_or_lost, each, purse), fault)
            if known is None:
                todo.append(each)
            else:
                out[each.task.key] = known
        while todo:
            each = todo.pop(0)
            shares = [each.share, *(w.share for w in todo)]
            found = self._guarded(each, partial(self._search_or_wish, each, shares, purse), fault)
            assert found is not None
            out[each.task.key] = found
        return out

    def settled(
        self, wanted: Sequence[Wanted], recorded: Mapping[str, RegionVerdict], purse: Purse
    ) -> dict[str, Choice]:
        """A choice per task key as a closed record says: the kernels of the store, and no search for what was left."""
        out: dict[str, Choice] = {}
        for each in wanted:
            verdict = recorded[each.task.key]
            left = Choice(reason=verdict.reason, undecided=verdict.undecided, detail=verdict.detail)
            out[each.task.key] = self._known(each, purse) or left
        return out

    def broken(self, each: Wanted, error: Exception) -> Choice:
        """The choice of a task that a fault of our own ended; it counts as one of TRIES."""
        choice = Choice(reason="session", undecided=True, detail=f"{type(error).__name__}: {error}"[:300])
        try:
            self._count_broken(each, choice)
        except Exception as another:  # the store itself may be what broke
            log.warning("a fault is not remembered: %s: %s", type(another).__name__, another)
        return choice

    def given_up(self, task: str, device: str) -> bool:
        """Whether a task broke so often, with this software, that it is not tried again."""
        return len(self._broken(task, device)) >= TRIES

    def _guarded(self, each: Wanted, ask: Callable[[], Choice | None], fault: Fault) -> Choice | None:
        try:
            return ask()
        except Exception as error:
            fault("session", error)
            return self.broken(each, error)

    def _known_or_lost(self, each: Wanted, purse: Purse) -> Choice | None:
        return self._known(each, purse) or self.hunt.lost(each)

    def _broken(self, task: str, device: str) -> tuple[RegionVerdict, ...]:
        record = self.store.get_record(_broken_key(task, device))
        return () if record is None else record.regions

    def _count_broken(self, each: Wanted, choice: Choice) -> None:
        """Remember a fault, as the record of a graph that is this task alone, once per try."""
        if choice.kernel is not None or choice.reason not in BROKEN:
            return
        verdict = RegionVerdict(each.task.key, "left", choice.reason, each.phase, each.anchor, detail=choice.detail)
        tried = (*self._broken(each.task.key, each.device), verdict)
        fingerprint = current(each.device).fingerprint().key
        self.store.put_record(GraphRecord(_broken_key(each.task.key, each.device), fingerprint, tried))

    def _known(self, each: Wanted, purse: Purse) -> Choice | None:
        kernel = self._stored(each)
        changed = [] if kernel is None else _changed(kernel, current(each.device).soft())
        choice = None
        if kernel is not None and not changed:
            choice = Choice(kernel, "hit", kernel.evidence.ratio)
        elif (
            kernel is not None
            and self.may_search
            and not purse.closed
            and not self.given_up(each.task.key, each.device)
        ):
            # Another torch, triton, compiler or driver: the kernel is proven here once, or searched for anew.
            with purse.turn:
                choice = self.hunt.verified_again(each, kernel, purse)
            if choice is not None:
                self._count_broken(each, choice)
        elif kernel is not None:
            choice = Choice(reason="not-verified-here", undecided=True, detail=f"changed: {', '.join(changed)}")
        TALLY.add("hits" if choice is not None and choice.kernel is not None else "misses")
        return choice

    def _stored(self, each: Wanted) -> Kernel | None:
        return self.store.get(each.task.key, current(each.device).fingerprint())

    def _search_or_wish(self, each: Wanted, shares: Sequence[float], purse: Purse) -> Choice:
        if self.settings.effort == "none":
            return self._wish(each, "not-searched")
        if _local_rank() != 0:
            return self._wish(each, "another-rank-searches")
        with purse.turn:
            known = self._found_meanwhile(each)
            if known is not None:
                return known
            broken = self._broken(each.task.key, each.device)
            if len(broken) >= TRIES:
                return Choice(reason=broken[-1].reason, undecided=True, detail=broken[-1].detail)
            seconds = purse.allowance(shares, each.phase)
            if seconds <= 0:
                return self._wish(each, "interrupted" if purse.closed else "budget")
            here = current(each.device)
            name = f"{each.task.key[:32]}-{here.fingerprint().key[:16]}"
            with only_here(self.settings.home_path / "locks", name) as mine:
                if not mine:
                    return self._wish(each, "searching-elsewhere")
                with purse.spending(each.phase):
                    choice: Choice = self.hunt.search(each, seconds, purse)
                self._count_broken(each, choice)
                return choice

    def _found_meanwhile(self, each: Wanted) -> Choice | None:
        kernel = self._stored(each)
        if kernel is None or _changed(kernel, current(each.device).soft()):
            return None
        return Choice(kernel, "hit", kernel.evidence.ratio)

    def _wish(self, each: Wanted, reason: str) -> Choice:
        self.store.wish(each.task, dict(each.binding), each.share)
        return Choice(reason=reason, undecided=True)


def _changed(kernel: Kernel, now: Mapping[str, object]) -> list[str]:
    """The parts of the software whose change since the proof asks for another."""
    then = kernel.evidence.device.get("soft", {}) if kernel.evidence.device else {}
    return [name for name in SOFT if name in then and then[name] != now.get(name, "")]


def _broken_key(task: str, device: str) -> str:
    here = current(device)
    return digest({"broken": task, "kevolve": VERSION, "device": here.fingerprint().key, "soft": here.soft()})


def _hunt(settings: Settings, store: Store) -> Any:
    from torch_kevolve.hunt import Hunt
    from torch_kevolve.languages import usable

    return Hunt(settings, store, _memory(str(settings.home_path / "memory")), usable(settings.languages))


@cache
def _memory(folder: str) -> Any:
    """One per folder and process: it is read once."""
    from torch_kevolve.graph_memory import ExperienceGraph

    return ExperienceGraph.open(Path(folder))


def _local_rank() -> int:
    """0 where torch.distributed does not run: there everybody may search."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 0
    return int(os.environ.get("LOCAL_RANK", torch.distributed.get_rank()))
