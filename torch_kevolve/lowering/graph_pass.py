"""Graph pass: the one place where Inductor hands us a graph.

The instance that runs may be a deep copy of the one that was passed in, so it holds a token and nothing else; what it
works for stands in a registry of this module.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomGraphPass

from torch_kevolve.devices import current
from torch_kevolve.errors import KevolveError, RegionRefused
from torch_kevolve.lowering.cost import cost, node_seconds
from torch_kevolve.lowering.hooks import Choice, Hooks, Wanted
from torch_kevolve.lowering.kinds import tensors_of
from torch_kevolve.lowering.regions import Finder, Left, Region, equal_tasks
from torch_kevolve.lowering.splice import Moved, splice
from torch_kevolve.record import RegionVerdict

log = logging.getLogger(__name__)


@dataclass
class Work:
    """One `torch.compile` call: its hooks, what was chosen so far, and the verdicts of the graph under way.

    `examples`: small integer inputs of the call, for timing with indices that are in range.
    """

    hooks: Hooks
    examples: Sequence[torch.Tensor] = ()
    choices: dict[str, Choice] = field(default_factory=dict)
    lock: threading.RLock = field(default_factory=threading.RLock)


@dataclass
class Passage:
    """What the pass did while one graph was compiled once. `ran` False: Inductor's cache answered instead."""

    phase: str
    ran: bool = False
    verdicts: list[RegionVerdict] = field(default_factory=list)

    @property
    def replaced(self) -> int:
        return sum(verdict.status == "replaced" for verdict in self.verdicts)


_WORKS: dict[int, Work] = {}
_TOKENS = itertools.count(1)
_NOW = threading.local()


def enroll(work: Work) -> int:
    """Register a call's work; the token its pass carries."""
    token = next(_TOKENS)
    _WORKS[token] = work
    return token


class recording:
    """While it lasts, passes that run in this thread write into one Passage."""

    def __init__(self, phase: str) -> None:
        self.passage = Passage(phase)

    def __enter__(self) -> Passage:
        self.before = getattr(_NOW, "passage", None)
        _NOW.passage = self.passage
        return self.passage

    def __exit__(self, *_: object) -> None:
        _NOW.passage = self.before


class RegionPass(CustomGraphPass):  # type: ignore[misc]
    """Inductor's post-grad pre-pass. `first`: a pass of the user's own that stood in the same place."""

    def __init__(self, token: int, uuid: str | None, first: Any = None) -> None:
        self.token, self._uuid, self.first = token, uuid, first

    def __call__(self, graph: fx.Graph) -> None:
        if self.first is not None:
            self.first(graph)
        work = _WORKS.get(self.token)
        if work is None:
            return
        passage = getattr(_NOW, "passage", None) or Passage("inference")
        passage.ran = True
        try:
            replace_regions(graph, work, passage)
        except (
            Exception
        ) as error:  # a fault of ours leaves the graph to Inductor; the hook decides whether it is raised
            log.warning("regions were left to Inductor: %s: %s", type(error).__name__, error)
            work.hooks.fault("pass", error)

    def uuid(self) -> Any:
        """None: Inductor's caches are bypassed, so the pass is sure to run."""
        if self._uuid is None:
            return None
        if self.first is None:
            return self._uuid
        inner = self.first.uuid()
        return None if inner is None else (self._uuid, inner)


def replace_regions(graph: fx.Graph, work: Work, passage: Passage) -> None:
    """Find the regions of a graph, ask for kernels, put in those that came."""
    device = _device(graph)
    if device is None:
        return
    with ExitStack() as stack:
        _enter_real_world(stack)
        ceilings = current(device).ceilings()
        finder = Finder(
            graph, work.hooks.claims, lambda node: node_seconds(node, ceilings), work.hooks.numerics, work.hooks.skip
        )
        regions, left = finder.find()
        inside = {node for region in regions for node in region.nodes}
        seconds = {id(r): cost(r.task.graph).seconds(r.captured.binding, ceilings) for r in regions}
        total = sum(seconds.values()) + sum(node_seconds(node, ceilings) for node in graph.nodes if node not in inside)
        wanted = _wanted(regions, seconds, total, passage.phase, device)
        choices = _choices(work, wanted)
    passage.verdicts.extend(_left(each, passage.phase) for each in left)
    moved: Moved = {}
    for region in regions:
        choice = choices[region.task.key]
        share = seconds[id(region)] / total if total > 0 else 0.0
        passage.verdicts.append(_place(graph, region, choice, share, passage.phase, work.hooks, moved))
    if moved:
        _tidy(graph)


def _enter_real_world(stack: ExitStack) -> None:
    """Tensors made by whoever is asked are real ones, though Inductor is in the middle of a fake trace."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.utils._python_dispatch import _disable_current_modes

    stack.enter_context(unset_fake_temporarily())
    stack.enter_context(_disable_current_modes())


def _device(graph: fx.Graph) -> torch.device | None:
    for node in graph.nodes:
        for tensor in tensors_of(node.meta.get("val")):
            if tensor.device.type in ("cpu", "cuda") and node.op == "call_function":
                return tensor.device
    return None


def _wanted(
    regions: Sequence[Region], seconds: Mapping[int, float], total: float, phase: str, device: torch.device
) -> list[Wanted]:
    out = []
    for same in equal_tasks(regions).values():
        first = same[0]
        spent = sum(seconds[id(region)] for region in same)
        out.append(
            Wanted(
                task=first.task,
                binding=first.captured.binding,
                share=spent / total if total > 0 else 0.0,
                count=len(same),
                phase=phase,
                device=str(device),
                seconds=seconds[id(first)],
                anchor=str(first.anchor.target),
                frozen=any(spec.frozen for spec in first.task.graph.inputs),
            )
        )
    return sorted(out, key=lambda each: each.share, reverse=True)


def _choices(work: Work, wanted: Sequence[Wanted]) -> dict[str, Choice]:
    """A choice for every wanted task. Asked once a call: two compilations of one graph put in the same kernels."""
    with work.lock:
        new = [each for each in wanted if each.task.key not in work.choices]
        for each in new:
            if each.share < work.hooks.min_share:
                work.choices[each.task.key] = Choice(reason="cold", detail=f"{each.share:.2%} of the predicted time")
        asked = [each for each in new if each.task.key not in work.choices]
        if asked:
            answer = work.hooks.choose(asked)
            for each in asked:
                work.choices[each.task.key] = answer.get(each.task.key, Choice(reason="no-answer"))
        return {each.task.key: work.choices[each.task.key] for each in wanted}


def _place(
    graph: fx.Graph, region: Region, choice: Choice, share: float, phase: str, hooks: Hooks, moved: Moved
) -> RegionVerdict:
    verdict = RegionVerdict(
        task=region.task.key,
        status="left",
        reason=choice.reason or "no-kernel",
        phase=phase,
        anchor=str(region.anchor.target),
        kernel=None if choice.kernel is None else choice.kernel.key,
        ratio=choice.ratio,
        share=share,
        undecided=choice.undecided,
        detail=choice.detail or "; ".join(f"{name}: {why}" for name, why in sorted(region.cuts.items())),
    )
    if choice.kernel is None:
        return verdict
    try:
        splice(graph, region, choice.kernel, moved)
    except RegionRefused as error:
        return replace(verdict, reason=error.reason, detail=str(error))
    except Exception as error:  # the region was left as it was; the hook decides whether it is raised
        hooks.fault("splice", error)
        reason = "plan" if isinstance(error, KevolveError) else "splice"
        return replace(verdict, reason=reason, detail=f"{type(error).__name__}: {error}")
    return replace(verdict, status="replaced", reason=choice.reason or "kernel")


def _left(left: Left, phase: str) -> RegionVerdict:
    return RegionVerdict(
        task=None, status="left", reason=left.reason, phase=phase, anchor=str(left.anchor.target), detail=left.detail
    )


def _tidy(graph: fx.Graph) -> None:
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)
    graph.lint()
