"""Record: what is remembered of one compiled graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch_kevolve.sizes import Json

SCHEMA = 1
RANK = {"none": 0, "quick": 1, "full": 2}
LOST = ("not-faster", "not-right", "no-candidates")
"""Reasons of a search that came to its own end: only a harder one may find more."""


@dataclass(frozen=True)
class RegionVerdict:
    """One region of one graph. `status` is `replaced` or `left`; `reason` a short slug; `task` None if not captured.

    `phase`: inference, forward or backward. `anchor`: the operator it grew from. `share`: of the predicted time.
    `undecided`: a later search might still change the verdict. `effort`, `budget_s`: how hard the call that left this
    one was asked to search, and for how many seconds in all.
    """

    task: str | None
    status: str
    reason: str
    phase: str
    anchor: str = ""
    kernel: str | None = None
    ratio: float | None = None
    share: float | None = None
    undecided: bool = False
    detail: str = ""
    effort: str = ""
    budget_s: float = 0.0

    def open_to(self, effort: str, budget_s: float = 0.0) -> bool:
        """Whether a search at this effort and of so many seconds may still change the verdict.

        What the budget did not reach waits for more seconds or a harder effort: the same again would end the same way.
        """
        if self.task is None or self.status != "left" or effort not in RANK or effort == "none":
            return False
        harder = RANK.get(self.effort, 0) < RANK[effort]
        if self.reason == "budget":
            return self.undecided and (harder or self.budget_s < budget_s)
        return self.undecided or (self.reason in LOST and harder)

    def to_json(self) -> Json:
        return dict(self.__dict__)


@dataclass(frozen=True)
class GraphRecord:
    """The memory of one compiled graph, found by `graph_key` before Inductor is called.

    `graph_key` hashes the Dynamo graph, its input specs, grad mode, flags and the settings that matter.
    `gate`: the whole graph's verdict per phase ("kernels", "plain" or an option set's name) with its times in ms.
    """

    graph_key: str
    fingerprint: str
    regions: tuple[RegionVerdict, ...]
    gate: Mapping[str, Json] = field(default_factory=dict)

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(r.task for r in self.regions if r.task is not None))

    def open_to(self, effort: str, budget_s: float = 0.0) -> tuple[RegionVerdict, ...]:
        """The regions whose verdict a search at this effort and of so many seconds may still change."""
        return tuple(r for r in self.regions if r.open_to(effort, budget_s))

    def to_json(self) -> Json:
        return {
            "schema": SCHEMA,
            "graph_key": self.graph_key,
            "fingerprint": self.fingerprint,
            "regions": [r.to_json() for r in self.regions],
            "gate": dict(self.gate),
        }

    @classmethod
    def from_json(cls, data: Json) -> GraphRecord:
        """Raises KeyError, TypeError or ValueError for data that is no record of this schema."""
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']} is not {SCHEMA}")
        return cls(
            graph_key=str(data["graph_key"]),
            fingerprint=str(data["fingerprint"]),
            regions=tuple(RegionVerdict(**row) for row in data["regions"]),
            gate=dict(data["gate"]),
        )
