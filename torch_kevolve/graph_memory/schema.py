"""Schema: the kinds of nodes and edges of the experience graph.

A Case is one decision and its outcome; `began_from` names the Case whose state it began from, so Cases form a forest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_kevolve.candidate import Candidate
from torch_kevolve.evidence import Evidence
from torch_kevolve.sizes import Json
from torch_kevolve.task import digest

SCHEMA = 1
NODES = ("Task", "Device", "Case", "Strategy", "Lesson")
EDGES = ("began_from", "solves", "ran_on", "used", "fixed_by", "similar_to", "distilled_from")


@dataclass(frozen=True)
class Case:
    """One candidate, one judgement. `candidate` is its content hash; `evidence` as the judge wrote it.

    `moment`: seconds since the epoch, for order alone.
    """

    task: str
    candidate: str
    device: str
    proposer: str
    family: str
    language: str
    point: dict[str, Any]
    strategies: tuple[str, ...]
    began_from: str | None
    evidence: Json
    moment: float

    @property
    def id(self) -> str:
        """Content hash, 32 hex digits."""
        return digest([self.task, self.candidate, self.device, self.moment])[:32]

    @property
    def ok(self) -> bool:
        return bool(self.evidence["ok"])

    @property
    def ratio(self) -> float | None:
        ratio = self.evidence["ratio"]
        return None if ratio is None else float(ratio)

    def to_json(self) -> Json:
        return {"kind": "Case", "id": self.id, **self.__dict__, "strategies": list(self.strategies)}

    @classmethod
    def from_json(cls, data: Json) -> Case:
        """Raises KeyError, TypeError or ValueError for a line that is no Case."""
        case = cls(
            task=str(data["task"]),
            candidate=str(data["candidate"]),
            device=str(data["device"]),
            proposer=str(data["proposer"]),
            family=str(data["family"]),
            language=str(data["language"]),
            point=dict(data["point"]),
            strategies=tuple(data["strategies"]),
            began_from=data["began_from"],
            evidence=dict(data["evidence"]),
            moment=float(data["moment"]),
        )
        if not isinstance(case.evidence["reached"], str) or "ratio" not in case.evidence:
            raise ValueError("evidence without its stage or ratio")
        return case


def case_of(
    task: str, device: str, candidate: Candidate, evidence: Evidence, began_from: str | None, moment: float
) -> Case:
    """The Case of one judgement."""
    provenance = candidate.provenance
    return Case(
        task=task,
        candidate=candidate.id,
        device=device,
        proposer=provenance.proposer,
        family=provenance.family,
        language=candidate.language,
        point=dict(provenance.point),
        strategies=provenance.strategies,
        began_from=began_from,
        evidence=evidence.to_json(),
        moment=moment,
    )
