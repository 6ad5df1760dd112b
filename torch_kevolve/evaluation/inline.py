"""Inline evaluator: judge and runner in this process.

For tests: a crash of a candidate is a crash of yours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch_kevolve.candidate import Candidate
from torch_kevolve.evaluation.base import Job
from torch_kevolve.evaluation.judge import Judge
from torch_kevolve.evaluation.port import DirectPort
from torch_kevolve.evidence import Evidence, Timing
from torch_kevolve.settings import Settings


class InlineTrial:
    """The same stages as the local evaluator's, without the walls."""

    def __init__(self, job: Job, settings: Settings) -> None:
        self._judge = Judge(job, settings, DirectPort())
        try:
            self._judge.open()
        except BaseException:
            self._judge.close()
            raise
        self.baselines: Mapping[str, Timing] = self._judge.baselines
        self.notes: Mapping[str, str] = self._judge.notes

    def evaluate(self, candidates: Sequence[Candidate]) -> Iterator[tuple[Candidate, Evidence]]:
        return self._judge.evaluate(candidates)

    def confirm(self, candidate: Candidate) -> Evidence:
        return self._judge.confirm(candidate)

    def close(self) -> None:
        self._judge.close()


class InlineEvaluator:
    """The member called `inline`."""

    def open(self, job: Job, settings: Settings) -> InlineTrial:
        return InlineTrial(job, settings)

    def close(self) -> None:
        """There is nothing to end."""
