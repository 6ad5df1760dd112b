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


@dataclass(frozen=True)
class Summary:
    """One line about a kernel, all plain data. `fingerprint`: the hard part; `path`: its folder, empty if in memory."""

    key: str
    task: str
    language: str
    family: str
    operators: list[str]
    numerics: str
    fingerprint: dict[str, str]
    fingerprint_key: str
    ratio: float | None
    path: str


def summary(kernel: Kernel, path: str = "") -> Summary:
    """The summary of a kernel that lies at `path`."""
    return Summary(
        key=kernel.key,
        task=kernel.task.key,
        language=kernel.candidate.language,
        family=kernel.candidate.provenance.family,
        operators=list(kernel.task.graph.targets),
        numerics=kernel.task.numerics,
        fingerprint=dict(kernel.fingerprint.hard),
        fingerprint_key=kernel.fingerprint.key,
        ratio=kernel.evidence.ratio,
        path=path,
    )


class Store(Protocol):
    """A member of the store axis. A corrupt entry is a miss, never an exception.

    `put` and `put_record` publish in one step: a reader sees the old entry or the new one, whole.
    """

    def get(self, task_key: str, fingerprint: Fingerprint) -> Kernel | None:
        """The kernel for this task on this kind of device."""
        ...

    def put(self, kernel: Kernel) -> None:
        """Keep a kernel in place of the one for its task and fingerprint. What cannot be written is dropped, logged."""
        ...

    def ls(self) -> Iterator[Kernel]:
        """Every readable kernel, in the order of their keys."""
        ...

    def summaries(self) -> list[Summary]:
        """A line about every readable kernel, in the order of their keys. Cheaper than `ls`."""
        ...

    def remove(self, task_key: str, fingerprint: Fingerprint, why: str) -> bool:
        """Set aside a kernel that turned out bad: a miss from now on. False where there is none to remove."""
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
