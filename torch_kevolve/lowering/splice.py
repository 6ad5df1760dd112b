"""Splice: a kernel's plan becomes nodes of the graph.

Triton launches become functional wrapper nodes that Inductor inlines, C++ launches one baked kernel, library calls
themselves. Nothing of a region is changed before all of its new nodes exist, so a failure leaves the graph as it was.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from torch_kevolve.candidate import Candidate
from torch_kevolve.errors import PlanError, RegionRefused
from torch_kevolve.kernel import Kernel
from torch_kevolve.languages.replay import operator as library
from torch_kevolve.lowering.bake import Layout, library_call, lowering, pin
from torch_kevolve.lowering.bake_text import Entry
from torch_kevolve.lowering.kinds import fuses_natively
from torch_kevolve.lowering.regions import Region
from torch_kevolve.lowering.sizes_fx import SizeNodes
from torch_kevolve.lowering.triton_node import functions, launch
from torch_kevolve.plan import Aten, Buffer, Prepare, Run, Step, Tensor, tensors_in
from torch_kevolve.task import DType, digest

Moved: TypeAlias = "dict[fx.Node, fx.Node]"


def splice(graph: fx.Graph, region: Region, kernel: Kernel, moved: Moved) -> None:
    """Put a kernel in a region's place. Raises RegionRefused or PlanError, and then the graph is as before.

    `moved`: nodes that earlier splices of this graph replaced, and what stands for them now; added to.
    """
    inputs = tuple(moved.get(node, node) for node in region.captured.inputs)
    region = replace(region, captured=replace(region.captured, inputs=inputs))
    before = set(graph.nodes)
    try:
        with graph.inserting_before(region.nodes[-1]):
            outputs = _Splicer(graph, region, kernel).build()
        _check(region, outputs)
    except Exception:
        for node in reversed([node for node in graph.nodes if node not in before]):
            graph.erase_node(node)
        raise
    inside = set(region.nodes)
    for old, new in zip(region.captured.outputs, outputs, strict=True):
        new.meta.update({k: v for k, v in old.meta.items() if k not in ("val", "eager_input_vals")})
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inside or _survives(user, inside))
        moved[old] = new
    for node in reversed(region.nodes):
        if not node.users:
            graph.erase_node(node)


def _survives(user: fx.Node, inside: set[fx.Node]) -> bool:
    """A view inside the region that somebody outside still reads."""
    return any(each not in inside or _survives(each, inside) for each in user.users)


def _check(region: Region, outputs: Sequence[fx.Node]) -> None:
    for old, new in zip(region.captured.outputs, outputs, strict=True):
        want, got = old.meta["val"], new.meta["val"]
        if want.dtype != got.dtype or len(want.shape) != len(got.shape):
            raise RegionRefused(
                "output-form", f"{got.dtype}{list(got.shape)} in place of {want.dtype}{list(want.shape)}"
            )
        if _plain(want.stride()) != _plain(got.stride()):
            raise RegionRefused("output-strides", f"{list(got.stride())} in place of {list(want.stride())}")


def _plain(sizes: Sequence[Any]) -> list[str]:
    return [str(s.node.expr if isinstance(s, torch.SymInt) else s) for s in sizes]


class _Splicer:
    """The nodes of one plan. `world`: the newest node of every tensor by name."""

    def __init__(self, graph: fx.Graph, region: Region, kernel: Kernel) -> None:
        self.graph, self.region, self.kernel = graph, region, kernel
        self.candidate: Candidate = kernel.candidate
        self.captured = region.captured
        specs = region.task.graph.inputs
        self.sizes = SizeNodes(graph, self.captured.inputs, specs)
        self.world: dict[str, fx.Node] = {}
        self.buffers: dict[str, Buffer] = {}
        self.fake = _fake_mode(self.captured.inputs)

    def build(self) -> list[fx.Node]:
        plan = self.candidate.plan
        if len(plan.inputs) != len(self.captured.inputs) or len(plan.outputs) != len(self.captured.outputs):
            raise PlanError(detail="the plan's inputs or outputs are not the task's")
        triton = self.candidate.language == "triton"
        for name, node in zip(plan.inputs, self.captured.inputs, strict=True):
            self.world[name] = node if self.candidate.language == "cpp" else self._pinned(node)
        steps = _flat(plan.steps)
        if triton:
            self.functions = functions(self.candidate)
        place = 0
        while place < len(steps):
            step = steps[place]
            if isinstance(step, Buffer):
                self.buffers[step.name] = step
                if triton:
                    self.world[step.name] = self._empty(step)
                place += 1
            elif isinstance(step, Aten):
                self._library(step)
                place += 1
            elif triton:
                self._triton(step)  # type: ignore[arg-type]
                place += 1
            else:
                place = self._bake(steps, place)
        return [self._made(name) for name in plan.outputs]

    def _made(self, name: str) -> fx.Node:
        if name not in self.world:
            raise PlanError(detail=f"{name} is never written")
        return self.world[name]

    def _pinned(self, node: fx.Node) -> fx.Node:
        """A graph input has its strides already; what Inductor lays out is asked for in the captured ones."""
        if node.op in ("placeholder", "get_attr"):
            return node
        made = self.graph.call_function(pin(Layout.of(node.meta["val"])), (node,))
        made.meta["val"] = node.meta["val"]
        return made

    def _empty(self, buffer: Buffer) -> fx.Node:
        shape, strides = [self.sizes.node(s) for s in buffer.shape], [self.sizes.node(s) for s in buffer.strides]
        keywords = {"dtype": getattr(torch, buffer.dtype), "device": self.captured.device}
        if buffer.fill is None:
            node = self.graph.call_function(torch.ops.aten.empty_strided.default, (shape, strides), keywords)
        else:
            node = self.graph.call_function(torch.ops.aten.full.default, (shape, buffer.fill), keywords)
        node.meta["val"] = self._fake_empty(buffer)
        return node

    def _fake_empty(self, buffer: Buffer) -> torch.Tensor:
        with self.fake:
            return torch.empty_strided(
                [self.sizes.value(s) for s in buffer.shape],
                [self.sizes.value(s) for s in buffer.strides],
                dtype=getattr(torch, buffer.dtype),
                device=self.captured.device,
            )

    def _library(self, step: Aten) -> None:
        target = library(step.target)
        args = tuple(self._value(arg) for arg in step.args)
        kwargs = {name: self._value(value) for name, value in step.kwargs}
        if any(a.name == "device" for a in target._schema.arguments):
            kwargs["device"] = self.captured.device
        node = self.graph.call_function(target if fuses_natively(target) else library_call(target), args, kwargs)
        with self.fake:
            node.meta["val"] = target(*fx.map_arg(args, _val), **fx.map_arg(kwargs, _val))  # type: ignore[arg-type]
        if isinstance(node.meta["val"], torch.Tensor):
            self.world[step.outs[0].name] = node
            return
        for place, out in enumerate(step.outs):
            self.world[out.name] = _pick(self.graph, node, place, node.meta["val"][place])

    def _value(self, arg: Any) -> Any:
        if isinstance(arg, Tensor):
            return self._made(arg.name)
        if isinstance(arg, DType):
            return getattr(torch, arg.name)
        if isinstance(arg, tuple):
            return [self._value(each) for each in arg]
        return self.sizes.node(arg) if isinstance(arg, sympy.Expr) else arg

    def _triton(self, run: Run) -> None:
        written = [name for name in self._names([run]) if name in self.buffers]
        made = launch(self.graph, self.functions[run.kernel], run, self._value, self.sizes, written)
        for name, node in made.items():
            self.world[name] = node

    def _bake(self, steps: Sequence[Step], start: int) -> int:
        """All launches from here to the next library call as one baked kernel; the place after them."""
        stop = start
        while stop < len(steps) and not isinstance(steps[stop], Aten):
            if isinstance(steps[stop], Buffer):
                self.buffers[steps[stop].name] = steps[stop]  # type: ignore[union-attr, assignment]
            stop += 1
        runs = tuple(step for step in steps[start:stop] if isinstance(step, Run))
        names = self._names(runs)
        later = {t.name for step in steps[stop:] if isinstance(step, Run | Aten) for t in tensors_in(step.args)}
        wanted = later | set(self.candidate.plan.outputs)
        reads = tuple(name for name in names if name in self.world)
        fresh = [self.buffers[name] for name in names if name not in self.world]
        writes = tuple(buffer for buffer in fresh if buffer.name in wanted)
        scratch = tuple(buffer for buffer in fresh if buffer.name not in wanted)
        if any(name in self.buffers for name in reads):
            raise PlanError(detail="a buffer is used on both sides of a library call")
        if not writes:
            raise PlanError(detail=f"{runs[0].kernel} leaves no result")
        self._baked(Entry(self.candidate.source, runs, scratch, reads, writes, tuple(sorted(self.captured.symbols)),
                          digest([self.kernel.key, start])))  # fmt: skip
        return stop

    def _baked(self, entry: Entry) -> None:
        inputs = [self.world[name] for name in entry.reads]
        values = [self._fake_empty(buffer) for buffer in entry.writes]
        exprs = [self.captured.symbols[name] for name in entry.symbols]
        entry.text("kernel", shared=False)  # a plan that has no C++ form must fail here, not inside Inductor
        target = lowering(entry, [Layout.of(x.meta["val"]) for x in inputs], values, exprs)
        node = self.graph.call_function(target, tuple(inputs))
        node.meta["val"] = tuple(values)
        for place, (buffer, value) in enumerate(zip(entry.writes, values, strict=True)):
            self.world[buffer.name] = _pick(self.graph, node, place, value)

    def _names(self, runs: Sequence[Run]) -> list[str]:
        return list(dict.fromkeys(t.name for run in runs for t in tensors_in(run.args)))


def _flat(steps: Sequence[Step]) -> list[Step]:
    """Steps with `prepare` done in its place: a compiled graph has no memory between calls."""
    out: list[Step] = []
    for step in steps:
        out.extend(step.steps if isinstance(step, Prepare) else (step,))
    return out


def _pick(graph: fx.Graph, node: fx.Node, place: int, value: Any) -> fx.Node:
    made = graph.call_function(operator.getitem, (node, place))
    made.meta["val"] = value
    return made


def _val(node: fx.Node) -> Any:
    return node.meta["val"]


def _fake_mode(nodes: Sequence[fx.Node]) -> Any:
    for node in nodes:
        mode = getattr(node.meta["val"], "fake_mode", None)
        if mode is not None:
            return mode
    raise RegionRefused("no-fake", "the region's inputs are real tensors")
