"""Twin: the task in eager's own library calls.

The zero-kernel family. Its one candidate is the task's eager twin as a plan of `aten` steps: it gives back what a
decomposition took away (flash attention, a fused LayerNorm, embedding_bag).
"""

from __future__ import annotations

from torch_kevolve.candidate import Candidate, Provenance
from torch_kevolve.devices.base import DeviceFacts
from torch_kevolve.errors import PlanError
from torch_kevolve.plan import LaunchPlan, PlanArg, PlanBuilder, Tensor
from torch_kevolve.task import Arg, KernelTask, Ref, TaskGraph
from torch_kevolve.templates.around import VIEWS, name_of
from torch_kevolve.templates.base import Point, Space
from torch_kevolve.templates.matmul_parts import ANCHORS

LIBRARY_CALLS = "library-calls"
SAME_CALLS = frozenset((*ANCHORS, *VIEWS, "clone"))
"""Operators for which Inductor makes eager's own calls."""


def twin_plan(task: KernelTask, twin: TaskGraph) -> LaunchPlan:
    """The twin, operator by operator. Raises PlanError where an output of it is an input or does not fit the task."""
    builder = PlanBuilder(task)
    made: list[tuple[Tensor, ...]] = [(tensor,) for tensor in builder.inputs]

    def value(arg: Arg) -> PlanArg:
        if isinstance(arg, Ref):
            return made[arg.index][arg.item]
        if isinstance(arg, tuple):
            return tuple(value(each) for each in arg)
        return arg

    for op in twin.ops:
        kwargs = {name: value(arg) for name, arg in op.kwargs}
        made.append(builder.aten(op.target, [value(arg) for arg in op.args], op.outs, kwargs))
    return builder.finish([made[ref.index][ref.item] for ref in twin.outputs])


def _calls_the_same(twin: TaskGraph) -> bool:
    """Matrix products and views alone: Inductor calls the same library functions, and any gain would be noise."""
    return all(name_of(op) in SAME_CALLS for op in twin.ops)


class Twin:
    """Claims every task that has a twin, but for those that are the same calls under Inductor."""

    name = "twin"
    language = "aten"

    def match(self, task: KernelTask, device: DeviceFacts) -> Space | None:
        if task.twin is None or len(task.twin.inputs) != len(task.graph.inputs) or _calls_the_same(task.twin):
            return None
        try:
            plan = twin_plan(task, task.twin)
        except PlanError:
            return None

        def render(point: Point) -> Candidate:
            provenance = Provenance("template", self.name, tuple(sorted(point.items())), strategies=(LIBRARY_CALLS,))
            return Candidate("aten", "", plan, provenance)

        start = {"form": "eager"}
        return Space(
            self.name, "aten", {"form": ("eager",)}, render, start=(start,), strategies=lambda point: (LIBRARY_CALLS,)
        )
