"""Evaluator: where candidates are proven and timed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch_kevolve.candidate import Candidate
from torch_kevolve.evidence import Evidence, Timing
from torch_kevolve.settings import Settings
from torch_kevolve.task import KernelTask

LEAST_JUDGED = 3
"""Candidates that are judged however late it is: eager's library calls and two kernels. References that took half a
minute would else have been made for nothing."""


@dataclass(frozen=True)
class Job:
    """One task at real sizes on one device.

    `device` as torch writes it ("cpu", "cuda:0"); `deadline` is a time.monotonic() moment after which nothing new is
    started, if LEAST_JUDGED candidates were; `frozen` says whether weights count as constants.
    """

    task: KernelTask
    binding: Mapping[str, int]
    device: str
    deadline: float
    frozen: bool = False
    flags: Mapping[str, str] = field(default_factory=dict)


class Trial(Protocol):
    """One job under way. Baselines are measured when it opens and again beside every winner.

    Closing it ends its workers. It never raises for a bad candidate; EvaluationError means that we are broken.
    """

    baselines: Mapping[str, Timing]
    """`eager` (the twin), `inductor`, `max_autotune`; an arm that could not run is absent and named in `notes`."""
    notes: Mapping[str, str]

    def evaluate(self, candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, Evidence]]:
        """Judge candidates: built in parallel, verified and timed one by one. Order of results is free.

        Evidence below DONE is a refusal. DONE with `ok` means right and measured; `ratio` says how fast.
        """
        ...

    def confirm(self, candidate: Candidate) -> Evidence:
        """Verify again with fresh seeds and time again, cold, in a fresh process. The evidence that is stored."""
        ...

    def close(self) -> None: ...


class Evaluator(Protocol):
    """A member of the evaluator axis."""

    def open(self, job: Job, settings: Settings) -> Trial: ...

    def close(self) -> None:
        """End all processes. The evaluator may be opened again."""
        ...
