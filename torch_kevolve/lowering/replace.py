"""Replace: the regions of one graph found, kernels asked for, those that came put in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from torch import fx

from torch_kevolve.devices import current
from torch_kevolve.errors import KevolveError, RegionRefused
from torch_kevolve.lowering.buckets import Buckets
from torch_kevolve.lowering.cost import cost, node_seconds
from torch_kevolve.lowering.hooks import Choice, Hooks, Wanted
from torch_kevolve.lowering.kinds import tensors_of
from torch_kevolve.lowering.passage import Passage, Work
from torch_kevolve.lowering.regions import Finder, Left, Region, equal_tasks
from torch_kevolve.lowering.splice import Moved, splice
from torch_kevolve.lowering.twin import TwinMaker
from torch_kevolve.record import RegionVerdict


def replace_regions(graph: fx.Graph, work: Work, passage: Passage) -> None:
    """Find the regions of a graph, ask for kernels, put in those that came."""
    device = _device(graph)
    if device is None:
        return
    buckets = Buckets.now() if work.hooks.buckets and passage.phase != "backward" else None
    with ExitStack() as stack:
        _enter_real_world(stack)
        ceilings = current(device).ceilings()
        finder = Finder(
            graph,
            work.hooks.claims,
            lambda node: node_seconds(node, ceilings),
            work.hooks.numerics,
            work.hooks.skip,
            TwinMaker(device),
            buckets,
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
        verdict = _place(graph, region, choice, share, passage.phase, work.hooks, moved)
        passage.verdicts.append(verdict)
        if buckets is not None and verdict.status == "replaced":
            passage.promise(partial(buckets.guard, region.captured.symbols.values()))
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
    sizes = ", ".join(f"{s.name} {s.lo} to {'any' if s.hi is None else s.hi}" for s in region.task.symbols)
    detail = "; ".join(part for part in (sizes, verdict.detail) if part)
    return replace(verdict, status="replaced", reason=choice.reason or "kernel", detail=detail)


def _left(left: Left, phase: str) -> RegionVerdict:
    return RegionVerdict(
        task=None, status="left", reason=left.reason, phase=phase, anchor=str(left.anchor.target), detail=left.detail
    )


def _tidy(graph: fx.Graph) -> None:
    from torch._inductor.pattern_matcher import stable_topological_sort

    stable_topological_sort(graph)
    graph.lint()
