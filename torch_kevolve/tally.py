"""Tally: what this process has done, in numbers."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

COUNTS = ("regions", "replaced", "hits", "misses", "searches", "candidates")


class Tally:
    """Counters that many threads add to. `left` counts the reasons for which regions stayed with Inductor."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._left: Counter[str] = Counter()

    def add(self, name: str, number: int = 1) -> None:
        """Raises KeyError for a name that is not in COUNTS."""
        if name not in COUNTS:
            raise KeyError(name)
        with self._lock:
            self._counts[name] += number

    def leave(self, reason: str) -> None:
        with self._lock:
            self._left[reason] += 1

    def read(self) -> dict[str, Any]:
        """`{name: int}` for all of COUNTS, and `left: {reason: int}`."""
        with self._lock:
            return {**{name: self._counts[name] for name in COUNTS}, "left": dict(self._left)}

    def clear(self) -> None:
        with self._lock:
            self._counts.clear()
            self._left.clear()


TALLY = Tally()
"""The process's own."""
