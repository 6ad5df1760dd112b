"""Memory store: kept for this process only."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_kevolve.kernel import Fingerprint, Kernel
from torch_kevolve.record import GraphRecord
from torch_kevolve.store.base import Bad, Summary, summary
from torch_kevolve.task import KernelTask

log = logging.getLogger(__name__)


class MemoryStore:
    """Dictionaries under a lock. Also what is used where nothing can be written."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kernels: dict[tuple[str, str], Kernel] = {}
        self._records: dict[str, GraphRecord] = {}
        self._wishes: dict[str, dict[str, Any]] = {}

    @classmethod
    def at(cls, home: Path) -> MemoryStore:
        """The folder is not used."""
        return cls()

    def get(self, task_key: str, fingerprint: Fingerprint) -> Kernel | None:
        with self._lock:
            return self._kernels.get((task_key, fingerprint.key))

    def put(self, kernel: Kernel) -> None:
        with self._lock:
            self._kernels[kernel.task.key, kernel.fingerprint.key] = kernel

    def ls(self) -> Iterator[Kernel]:
        with self._lock:
            kernels = sorted(self._kernels.values(), key=lambda kernel: kernel.key)
        return iter(kernels)

    def summaries(self) -> list[Summary]:
        return [summary(kernel) for kernel in self.ls()]

    def remove(self, task_key: str, fingerprint: Fingerprint, why: str) -> bool:
        with self._lock:
            kernel = self._kernels.pop((task_key, fingerprint.key), None)
        if kernel is not None:
            log.warning("kernel %s is dropped: %s", kernel.key[:12], why)
        return kernel is not None

    def verify(self) -> tuple[int, list[Bad]]:
        return len(self._kernels), []

    def get_record(self, graph_key: str) -> GraphRecord | None:
        with self._lock:
            return self._records.get(graph_key)

    def put_record(self, record: GraphRecord) -> None:
        with self._lock:
            self._records[record.graph_key] = record

    def wish(self, task: KernelTask, binding: dict[str, int], share: float) -> None:
        with self._lock:
            known = self._wishes.get(task.key)
            if known is None or known["share"] < share:
                self._wishes[task.key] = {"task": task.to_json(), "binding": dict(binding), "share": share}

    def wishes(self) -> list[dict[str, Any]]:
        with self._lock:
            return sorted(self._wishes.values(), key=lambda wish: -wish["share"])
