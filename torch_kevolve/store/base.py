"""Store: where proven kernels, graph records and wishes are kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch_kevolve.kernel import Fingerprint, Kernel
from torch_kevolve.record import GraphRecord
from torch_kevolve.task import KernelTask


@dataclass(frozen=True)
class Bad:
    """An entry that cannot be used: where it lies and why."""

    path: str
    why: str


class Store(Protocol):
    """A member of the store axis. A corrupt entry is a miss, never an exception.

    `put` and `put_record` publish in one step: a reader sees the old entry or the new one, whole.
    """

    def get(self, task_key: str, fingerprint: Fingerprint) -> Kernel | None:
        """The kernel for this task on this kind of device."""
        ...

    def put(self, kernel: Kernel) -> None:
        """Keep a kernel in place of the one for its task and fingerprint. A store that cannot write drops it, logged."""
        ...

    def ls(self) -> Iterator[Kernel]:
        """Every readable kernel, in the order of their keys."""
        ...

    def verify(self) -> tuple[int, list[Bad]]:
        """How many entries are whole, and the ones that are not (left where they are)."""
        ...

    def get_record(self, graph_key: str) -> GraphRecord | None: ...

    def put_record(self, record: GraphRecord) -> None: ...

    def wish(self, task: KernelTask, binding: dict[str, int], share: float) -> None:
        """Remember a miss, for an offline search. One wish per task; a larger share replaces a smaller one."""
        ...

    def wishes(self) -> list[dict[str, Any]]:
        """`{"task": <task JSON>, "binding", "share"}`, largest share first."""
        ...
