"""Candidate: one attempt at a task, before anything is known of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch_kevolve.errors import PlanError
from torch_kevolve.plan import LaunchPlan
from torch_kevolve.sizes import Json
from torch_kevolve.task import digest


@dataclass(frozen=True)
class Provenance:
    """Where a candidate came from. `point`: the place in a template's space; `strategies`: its named moves."""

    proposer: str
    family: str = ""
    point: tuple[tuple[str, int | float | bool | str], ...] = ()
    parent: str | None = None
    strategies: tuple[str, ...] = ()
    prompt: str | None = None

    def to_json(self) -> Json:
        return {
            "proposer": self.proposer,
            "family": self.family,
            "point": dict(self.point),
            "parent": self.parent,
            "strategies": list(self.strategies),
            "prompt": self.prompt,
        }

    @classmethod
    def from_json(cls, data: Json) -> Provenance:
        return cls(
            proposer=str(data["proposer"]),
            family=str(data.get("family", "")),
            point=tuple(sorted(data.get("point", {}).items())),
            parent=data.get("parent"),
            strategies=tuple(data.get("strategies", ())),
            prompt=data.get("prompt"),
        )


@dataclass(frozen=True)
class Candidate:
    """Device source and launch plan. `language` names a member of that axis; `aten` has no source of its own.

    The content hash `id` covers language, source and plan, not the provenance.
    """

    language: str
    source: str
    plan: LaunchPlan
    provenance: Provenance = field(compare=False)

    @cached_property
    def id(self) -> str:
        """sha256, 64 hex digits."""
        return digest({"language": self.language, "source": self.source, "plan": self.plan.to_json()})

    def to_json(self) -> Json:
        return {
            "language": self.language,
            "source": self.source,
            "plan": self.plan.to_json(),
            "provenance": self.provenance.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Json]) -> Candidate:
        """Raises PlanError for data that is no candidate."""
        try:
            return cls(
                language=str(data["language"]),
                source=str(data["source"]),
                plan=LaunchPlan.from_json(data["plan"]),
                provenance=Provenance.from_json(data["provenance"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise PlanError(detail=f"candidate cannot be read: {error!r}") from None
