"""Twin: the task in the library operators that eager calls.

Decomposed groups are put back one by one. Each step is proven: region and twin run in fp64 on small random inputs and
must agree, and the twin must run in its own types on the device, else the group stays as it is. A twin is what accuracy
is measured against, so a wrong one would let wrong kernels in.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import torch

from torch_kevolve.lowering.capture import Captured
from torch_kevolve.lowering.exact import runs, same
from torch_kevolve.lowering.twin_rules import RULES, Group, Guess
from torch_kevolve.task import Arg, KernelTask, Op, Ref, TaskGraph

log = logging.getLogger(__name__)


class TwinMaker:
    """Twins by task key: equal regions are proven once a process. `device`: where they are to run."""

    _made: ClassVar[dict[str, TaskGraph | None]] = {}
    _lock = threading.Lock()

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def twin(self, captured: Captured) -> TaskGraph | None:
        """The proven twin; the region's own graph where nothing was decomposed; None where the region cannot be run."""
        key = f"{captured.task.key}@{self.device.type}"
        with self._lock:
            if key in self._made:
                return self._made[key]
        made = self._prove(captured.task, captured.origins)
        with self._lock:
            return self._made.setdefault(key, made)

    def _prove(self, task: KernelTask, origins: tuple[str, ...]) -> TaskGraph | None:
        from torch._subclasses.fake_tensor import unset_fake_temporarily
        from torch.utils._python_dispatch import _disable_current_modes

        with unset_fake_temporarily(), _disable_current_modes(), torch.no_grad():
            if not same(task.graph, task.graph, task):
                log.info(
                    "no twin: the region does not run at small sizes (%s)", ", ".join(dict.fromkeys(task.graph.targets))
                )
                return None
            chosen: Guess = {}
            for group in _groups(task.graph, origins):
                label = origins[group.places[0]]
                for guess in _guesses(label, group):
                    trial = {**chosen, **guess}
                    twin = rebuild(task.graph, trial)
                    if same(task.graph, twin, task) and runs(twin, task, self.device):
                        chosen = trial
                        break
                else:
                    log.debug("no proven twin for a group of %s", label)
            return rebuild(task.graph, chosen) if chosen else task.graph


def _guesses(label: str, group: Group) -> Iterator[Guess]:
    try:
        yield from RULES[label](group)
    except (LookupError, AssertionError):
        return


def _groups(graph: TaskGraph, origins: tuple[str, ...]) -> list[Group]:
    """Connected operators of one origin that has a rule."""
    base = len(graph.inputs)
    parent = list(range(len(graph.ops)))

    def root(place: int) -> int:
        while parent[place] != place:
            place = parent[place]
        return place

    for place, op in enumerate(graph.ops):
        for ref in op.refs():
            other = ref.index - base
            if other >= 0 and origins[other] == origins[place]:
                parent[root(place)] = root(other)
    sets: dict[int, list[int]] = {}
    for place, origin in enumerate(origins):
        if origin in RULES:
            sets.setdefault(root(place), []).append(place)
    # Pieces of one decomposition that touch only through inputs (the count of rows and the loss) belong together.
    merged: dict[str, list[int]] = {}
    out: list[list[int]] = []
    for places in sets.values():
        if origins[places[0]].startswith("aten.nll_loss"):
            merged.setdefault(origins[places[0]], []).extend(places)
        else:
            out.append(places)
    out.extend(sorted(places) for places in merged.values())
    return [Group(graph, tuple(places), _wanted(graph, places)) for places in sorted(out)]


def _wanted(graph: TaskGraph, places: list[int]) -> tuple[Ref, ...]:
    base, inside = len(graph.inputs), set(places)
    read = [ref for place, op in enumerate(graph.ops) if place not in inside for ref in op.refs()]
    wanted = {ref for ref in (*read, *graph.outputs) if ref.index - base in inside}
    return tuple(sorted(wanted, key=lambda ref: (ref.index, ref.item)))


def rebuild(graph: TaskGraph, replaced: Guess) -> TaskGraph:
    """The graph with library calls in place of what they make. All inputs are kept, in their places."""
    base = len(graph.inputs)
    ops: list[Op] = []
    place: dict[int, int] = {}
    calls: dict[Op, int] = {}

    def visit(start: Ref) -> Ref:
        stack: list[Ref] = [start]
        while stack:
            ref = stack[-1]
            if known(ref):
                stack.pop()
                continue
            source = replaced[ref][0] if ref in replaced else graph.ops[ref.index - base]
            missing = [each for each in source.refs() if not known(each)]
            if missing:
                stack.extend(missing)
                continue
            made = replace(
                source, args=tuple(map(moved, source.args)), kwargs=tuple((k, moved(v)) for k, v in source.kwargs)
            )
            if ref in replaced:
                calls[source] = len(ops)
            else:
                place[ref.index] = len(ops)
            ops.append(made)
            stack.pop()
        return final(start)

    def known(ref: Ref) -> bool:
        if ref.index < base:
            return True
        return replaced[ref][0] in calls if ref in replaced else ref.index in place

    def final(ref: Ref) -> Ref:
        if ref.index < base:
            return ref
        if ref in replaced:
            op, item = replaced[ref]
            return Ref(base + calls[op], item)
        return Ref(base + place[ref.index], ref.item)

    def moved(arg: Arg) -> Arg:
        if isinstance(arg, Ref):
            return final(arg)
        return tuple(moved(each) for each in arg) if isinstance(arg, tuple) else arg

    outputs = tuple(visit(ref) for ref in graph.outputs)
    return TaskGraph(graph.inputs, tuple(ops), outputs)
