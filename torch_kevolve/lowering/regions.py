"""Regions: convex subgraphs that one kernel could compute.

A region starts at an anchor (anything that is neither pointwise nor a view), grows as far as it may, and is offered to
the kernel families; if none of them claims it, smaller ones are offered, down to the bare anchor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from torch_kevolve.errors import RegionRefused
from torch_kevolve.lowering.buckets import Buckets
from torch_kevolve.lowering.capture import Captured, capture
from torch_kevolve.lowering.grow import Growth, ladder, outputs_of
from torch_kevolve.lowering.kinds import ANCHORS, LIBRARY, forget, kind_of, name_of, refusal
from torch_kevolve.lowering.reach import Reach
from torch_kevolve.lowering.twin import TwinMaker
from torch_kevolve.task import KernelTask

Claims = Callable[[KernelTask, Mapping[str, int]], bool]


@dataclass(frozen=True)
class Region:
    """`nodes` in the graph's order; `cuts`: why the neighbours stayed outside, by operator name."""

    anchor: fx.Node
    nodes: tuple[fx.Node, ...]
    captured: Captured
    cuts: Mapping[str, str] = field(default_factory=dict)

    @property
    def task(self) -> KernelTask:
        return self.captured.task


@dataclass(frozen=True)
class Left:
    """An anchor that stays with Inductor, and why."""

    anchor: fx.Node
    reason: str
    detail: str = ""


@dataclass
class Finder:
    """Finds the regions of one graph. `weight` orders anchors: the heaviest grows first."""

    graph: fx.Graph
    claims: Claims
    weight: Callable[[fx.Node], float]
    numerics: str = "default"
    skip: tuple[str, ...] = ()
    twins: TwinMaker = field(default_factory=TwinMaker)
    buckets: Buckets | None = None

    def __post_init__(self) -> None:
        self.reach = Reach(self.graph)
        self.taken: set[fx.Node] = set()
        self._asked: dict[tuple[str, bool], bool] = {}

    def find(self) -> tuple[list[Region], list[Left]]:
        """All regions, heaviest anchor first, and the anchors that are in none."""
        try:
            return self._find()
        finally:
            forget(self.reach.nodes)

    def _find(self) -> tuple[list[Region], list[Left]]:
        regions: list[Region] = []
        left: list[Left] = []
        for node in self.reach.nodes:
            reason = _outside(node)
            if reason is not None:
                left.append(Left(node, reason))
        anchors = [node for node in self.reach.nodes if kind_of(node) in ANCHORS]
        anchors.sort(key=self.weight, reverse=True)
        refused: list[Left] = []
        for anchor in anchors:
            if anchor in self.taken:
                continue
            found = self._region(anchor)
            if isinstance(found, Region):
                regions.append(found)
            else:
                refused.append(found)
        return regions, left + [each for each in refused if each.anchor not in self.taken]

    def _region(self, anchor: fx.Node) -> Region | Left:
        if name_of(anchor) in self.skip:
            return Left(anchor, "skipped")
        rungs: list[tuple[Growth, Captured]] = []
        seen: set[frozenset[fx.Node]] = set()
        reason = Left(anchor, "no-family")
        for growth in ladder(anchor, self.reach, self.taken):
            nodes = frozenset(growth.nodes)
            if nodes in seen:
                continue
            seen.add(nodes)
            try:
                made = capture(growth.nodes, outputs_of(growth.nodes), self.numerics, self.buckets)
            except RegionRefused as error:
                reason = Left(anchor, error.reason, str(error))
                continue
            if any(made.task.key.startswith(prefix) for prefix in self.skip if prefix):
                return Left(anchor, "skipped")
            rungs.append((growth, made))
        # Families that write kernels first: a library twin of the largest rung would hide the kernel of a smaller one.
        for with_twin in (False, True):
            for growth, made in rungs:
                if self._claimed(made, with_twin):
                    return self._settle(anchor, growth, made)
        return reason

    def _claimed(self, made: Captured, with_twin: bool) -> bool:
        task = made.task
        if with_twin:
            twin = self.twins.twin(made)
            if twin is None or twin == task.graph:
                return False
            task = replace(task, twin=twin)
        key = (task.key, with_twin)
        if key not in self._asked:
            self._asked[key] = self.claims(task, made.binding)
        return self._asked[key]

    def _settle(self, anchor: fx.Node, growth: Growth, made: Captured) -> Region:
        made = replace(made, task=replace(made.task, twin=self.twins.twin(made)))
        owned = [node for node in growth.nodes if node in growth.owned]
        self.taken.update(owned)
        self.reach.join(owned)
        return Region(anchor, tuple(growth.nodes), made, growth.cuts)


def _outside(node: fx.Node) -> str | None:
    """The reason for which a node that costs time can be in no region; None for all others."""
    if node.op != "call_function" or kind_of(node) is not None:
        return None
    known = LIBRARY.get(name_of(node))
    if known is not None:
        return known
    reason = refusal(node)
    return None if reason in (None, "no-tensor", "foreign-operator") else reason


def equal_tasks(regions: Sequence[Region]) -> dict[str, list[Region]]:
    """Regions by task key, in the order in which they were found."""
    out: dict[str, list[Region]] = {}
    for region in regions:
        out.setdefault(region.task.key, []).append(region)
    return out
