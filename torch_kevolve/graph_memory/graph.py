"""Graph: every attempt ever made, as nodes and edges."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import networkx as nx

from torch_kevolve.candidate import Candidate
from torch_kevolve.evidence import Evidence
from torch_kevolve.graph_memory.journal import write_entry
from torch_kevolve.graph_memory.schema import NODES, Case, case_of
from torch_kevolve.graph_memory.segments import Segments
from torch_kevolve.kernel import Fingerprint
from torch_kevolve.task import KernelTask

log = logging.getLogger(__name__)


class ExperienceGraph:
    """Append-only. Cases of other processes are seen after `refresh`. Safe for many threads and processes.

    Targets of a task's operators are kept beside it, so that a search can begin from what did well on its like.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._segments = Segments(folder / "segments")
        self._lock = threading.Lock()
        self._cases: dict[str, Case] = {}
        self._by_task: dict[str, list[str]] = defaultdict(list)
        self._targets: dict[str, tuple[str, ...]] = {}
        self._devices: set[str] = set()

    @classmethod
    def open(cls, folder: Path) -> ExperienceGraph:
        graph = cls(folder)
        graph.refresh()
        return graph

    def refresh(self) -> None:
        """Read what all processes wrote since the last time."""
        with self._lock:
            for row in self._segments.rows():
                self._take(row)

    def record_case(
        self,
        task: KernelTask,
        candidate: Candidate,
        evidence: Evidence,
        fingerprint: Fingerprint,
        began_from: str | None = None,
    ) -> Case:
        """Keep one judgement. `began_from`: id of the Case whose candidate this one was made from."""
        case = case_of(task.key, fingerprint.key, candidate, evidence, began_from, time.time())
        with self._lock:
            if task.key not in self._targets:
                row: dict[str, Any] = {"kind": "Task", "id": task.key, "targets": list(task.graph.targets)}
                self._segments.append(row)
                self._take(row)
            if fingerprint.key not in self._devices:
                row = {"kind": "Device", "id": fingerprint.key, "hard": dict(fingerprint.hard)}
                self._segments.append(row)
                self._take(row)
            self._segments.append(case.to_json())
            self._take(case.to_json())
        write_entry(self.folder / "journal", case)
        return case

    def cases(self, task_key: str, fingerprint: Fingerprint | None = None) -> list[Case]:
        """The Cases of a task, oldest first; of one kind of device if said."""
        with self._lock:
            found = [self._cases[each] for each in self._by_task.get(task_key, ())]
        if fingerprint is not None:
            found = [case for case in found if case.device == fingerprint.key]
        return sorted(found, key=lambda case: case.moment)

    def best(self, task_key: str, fingerprint: Fingerprint) -> Case | None:
        """The right Case with the highest ratio."""
        right = [case for case in self.cases(task_key, fingerprint) if case.ok and case.ratio is not None]
        return max(right, key=lambda case: case.ratio or 0.0, default=None)

    def like(self, task: KernelTask, fingerprint: Fingerprint, limit: int = 4) -> list[Case]:
        """The best Case of each task with most operators in common, on this kind of device; nearest task first."""
        mine = set(task.graph.targets)
        with self._lock:
            others = [(key, targets) for key, targets in self._targets.items() if key != task.key and targets]
        near = sorted(((_overlap(mine, set(targets)), key) for key, targets in others), reverse=True)
        found = [self.best(key, fingerprint) for overlap, key in near[: 4 * limit] if overlap >= 0.5]
        return [case for case in found if case is not None][:limit]

    def counts(self) -> dict[str, int]:
        """Number of nodes of each kind."""
        with self._lock:
            strategies = {name for case in self._cases.values() for name in case.strategies}
            sizes = (len(self._targets), len(self._devices), len(self._cases), len(strategies), 0)
        return dict(zip(NODES, sizes, strict=True))

    def view(self) -> nx.MultiDiGraph:
        """All nodes and edges, as networkx has them."""
        out = nx.MultiDiGraph()
        with self._lock:
            cases = list(self._cases.values())
            out.add_nodes_from((key, {"kind": "Task"}) for key in self._targets)
            out.add_nodes_from((key, {"kind": "Device"}) for key in self._devices)
        for case in cases:
            out.add_node(case.id, kind="Case", ok=case.ok, ratio=case.ratio)
            out.add_edge(case.id, case.task, key="solves")
            out.add_edge(case.id, case.device, key="ran_on")
            for strategy in case.strategies:
                out.add_node(strategy, kind="Strategy")
                out.add_edge(case.id, strategy, key="used")
            if case.began_from is not None:
                out.add_edge(case.id, case.began_from, key="began_from")
        return out

    def _take(self, row: object) -> None:
        if not isinstance(row, dict):
            return
        try:
            if row["kind"] == "Task":
                self._targets[str(row["id"])] = tuple(row["targets"])
            elif row["kind"] == "Device":
                self._devices.add(str(row["id"]))
            elif row["kind"] == "Case":
                case = Case.from_json(row)
                if case.id not in self._cases:
                    self._cases[case.id] = case
                    self._by_task[case.task].append(case.id)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            log.info("a row of the experience graph is skipped: %r", error)


def _overlap(mine: set[str], theirs: set[str]) -> float:
    return len(mine & theirs) / max(1, len(mine | theirs))
