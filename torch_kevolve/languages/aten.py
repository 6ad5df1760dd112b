"""Aten: candidates that only call the library."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch_kevolve.candidate import Candidate
from torch_kevolve.errors import PlanError
from torch_kevolve.languages.base import Built, Launcher, Status
from torch_kevolve.languages.replay import operator
from torch_kevolve.plan import Aten as Step


class Aten:
    """No source: the plan is all. A build checks that this torch has every operator."""

    name = "aten"

    def status(self) -> Status:
        return Status(self.name, "available")

    def build(self, candidate: Candidate, binding: Mapping[str, int], arch: str, workdir: Path) -> Built:
        try:
            for step in candidate.plan.flat:
                if isinstance(step, Step):
                    operator(step.target)
        except PlanError as error:
            return Built(None, str(error))
        if candidate.plan.kernels:
            return Built(None, f"{candidate.plan.kernels[0]} is launched, but library calls have no source")
        return Built(Path("/"))

    def load(self, built: Built, candidate: Candidate) -> Launcher:
        raise PlanError(detail="library calls launch nothing")
