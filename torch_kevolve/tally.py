"""Tally: what this process has done, in numbers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch_kevolve.record import RegionVerdict

COUNTS = ("regions", "replaced", "hits", "misses", "searches", "candidates")


class Tally:
    """Counters that many threads add to. `left` counts the reasons for which regions stayed with Inductor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._left: Counter[str] = Counter()
        self._regions: list[RegionVerdict] = []
        self._gates: list[dict[str, Any]] = []

    def add(self, name: str, number: int = 1) -> None:
        """Raises KeyError for a name that is not in COUNTS."""
        if name not in COUNTS:
            raise KeyError(name)
        with self._lock:
            self._counts[name] += number

    def leave(self, reason: str) -> None:
        with self._lock:
            self._left[reason] += 1

    def note(self, verdicts: Iterable[RegionVerdict]) -> None:
        """Count the regions of one graph and keep their verdicts."""
        with self._lock:
            for verdict in verdicts:
                self._regions.append(verdict)
                self._counts["regions"] += 1
                if verdict.status == "replaced":
                    self._counts["replaced"] += 1
                else:
                    self._left[verdict.reason] += 1

    def regions(self) -> list[RegionVerdict]:
        """The verdicts noted so far, in order."""
        with self._lock:
            return list(self._regions)

    def raced(self, phase: str, verdict: Mapping[str, Any]) -> None:
        """Keep what the whole-graph gate decided for one graph."""
        with self._lock:
            self._gates.append({"phase": phase, **verdict})

    def gates(self) -> list[dict[str, Any]]:
        """The gate's verdicts so far: `phase`, `kept`, and `ms` by arm or `why` there was no race."""
        with self._lock:
            return list(self._gates)

    def read(self) -> dict[str, Any]:
        """`{name: int}` for all of COUNTS, and `left: {reason: int}`."""
        with self._lock:
            return {**{name: self._counts[name] for name in COUNTS}, "left": dict(self._left)}

    def clear(self) -> None:
        with self._lock:
            self._counts.clear()
            self._left.clear()
            self._regions.clear()
            self._gates.clear()


TALLY = Tally()
"""The process's own."""
