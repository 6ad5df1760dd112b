"""Tiered store: the user's kernels over read-only seeds."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch_kevolve.kernel import Fingerprint, Kernel
from torch_kevolve.record import GraphRecord
from torch_kevolve.store.base import Bad, Store, Summary
from torch_kevolve.store.disk import DiskStore
from torch_kevolve.task import KernelTask


class TieredStore:
    """Reads the top tier first; writes go to the top only. Records and wishes live in the top tier."""

    def __init__(self, top: Store, below: Sequence[Store]) -> None:
        self.top = top
        self.below = tuple(below)
        self._hidden: set[tuple[str, str]] = set()

    @classmethod
    def at(cls, home: Path) -> TieredStore:
        return cls(DiskStore(home), [DiskStore(seeds(), frozen=True)])

    def get(self, task_key: str, fingerprint: Fingerprint) -> Kernel | None:
        hidden = (task_key, fingerprint.key) in self._hidden
        for tier in (self.top,) if hidden else (self.top, *self.below):
            kernel = tier.get(task_key, fingerprint)
            if kernel is not None:
                return kernel
        return None

    def put(self, kernel: Kernel) -> None:
        self.top.put(kernel)

    def ls(self) -> Iterator[Kernel]:
        found: dict[tuple[str, str], Kernel] = {}
        for tier in (self.top, *self.below):
            for kernel in tier.ls():
                found.setdefault((kernel.task.key, kernel.fingerprint.key), kernel)
        return iter(sorted(found.values(), key=lambda kernel: kernel.key))

    def summaries(self) -> list[Summary]:
        found: dict[tuple[str, str], Summary] = {}
        for tier in (self.top, *self.below):
            for each in tier.summaries():
                found.setdefault((each.task, each.fingerprint_key), each)
        return sorted(found.values(), key=lambda each: each.key)

    def remove(self, task_key: str, fingerprint: Fingerprint, why: str) -> bool:
        """From the top tier. A kernel of a lower tier is not ours to change: it is hidden while this process lives."""
        removed = self.top.remove(task_key, fingerprint, why)
        if any(tier.get(task_key, fingerprint) is not None for tier in self.below):
            self._hidden.add((task_key, fingerprint.key))
            removed = True
        return removed

    def verify(self) -> tuple[int, list[Bad]]:
        counts = [tier.verify() for tier in (self.top, *self.below)]
        return sum(good for good, _ in counts), [each for _, bad in counts for each in bad]

    def get_record(self, graph_key: str) -> GraphRecord | None:
        return self.top.get_record(graph_key)

    def put_record(self, record: GraphRecord) -> None:
        self.top.put_record(record)

    def wish(self, task: KernelTask, binding: dict[str, int], share: float) -> None:
        self.top.wish(task, binding, share)

    def wishes(self) -> list[dict[str, Any]]:
        return self.top.wishes()


def seeds() -> Path:
    """The folder of seed kernels that the package carries; in a wheel and in an editable install alike."""
    named = os.environ.get("KEVOLVE_SEEDS")
    if named:
        return Path(named)
    import importlib.util

    spec = importlib.util.find_spec("torch_kevolve.kernels_cache")
    if spec is not None and spec.origin is not None:
        return Path(spec.origin).parent
    # A checkout on PYTHONPATH without an install: the folder stands beside the package.
    return Path(__file__).resolve().parents[2] / "kernels_cache"
