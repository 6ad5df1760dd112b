"""Capture: a region of an FX graph becomes a KernelTask.

What leaves here names no node: inputs and outputs are matched with the graph's nodes by place. Symbols of the shape
environment (and products of them that appear only as products) become the task's own.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from torch_kevolve.errors import PlanError, RegionRefused, TaskError
from torch_kevolve.lowering.buckets import Buckets
from torch_kevolve.lowering.canon import RESHAPE, canonical_op, sizes_of
from torch_kevolve.lowering.facts import index_bounds, task_flags
from torch_kevolve.lowering.kinds import name_of, origin_of, tensors_of
from torch_kevolve.sizes import Size, Symbol, encode, free_symbols, simplify, symbol
from torch_kevolve.task import Arg, DType, KernelTask, Op, Ref, TaskGraph, TensorSpec, canonical, digest


@dataclass(frozen=True)
class Captured:
    """A task and where it came from. `inputs` and `outputs` are nodes in the task's order.

    `binding`: the hint sizes of this call. `symbols`: what each of the task's symbols is in the shape environment.
    `origins`: for each operator of the task, the ATen operator that was decomposed into it ("" if unknown).
    """

    task: KernelTask
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    binding: dict[str, int]
    symbols: dict[str, sympy.Expr]
    origins: tuple[str, ...]
    device: torch.device


@dataclass
class _Draft:
    """The graph while it is written: raw sizes over the shape environment's symbols."""

    inputs: list[fx.Node] = field(default_factory=list)
    specs: list[TensorSpec] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    place: dict[fx.Node, Ref] = field(default_factory=dict)
    same: dict[str, int] = field(default_factory=dict)


def capture(
    nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], numerics: str = "default", buckets: Buckets | None = None
) -> Captured:
    """The task of a region. `nodes` in the graph's order; `outputs` are those among them that are wanted outside.

    `buckets`: its symbols have the ranges that these give, instead of the shape environment's.

    Raises RegionRefused with the reason where the region has no task.
    """
    try:
        return _capture(nodes, outputs, numerics, buckets)
    except (TaskError, PlanError) as error:
        raise RegionRefused("size-form", str(error)) from None


def _capture(nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], numerics: str, buckets: Buckets | None) -> Captured:
    inside = set(nodes)
    read = dict.fromkeys(
        x for node in nodes for x in node.all_input_nodes if x not in inside and tensors_of(x.meta.get("val"))
    )
    device = _one_device([*read, *nodes])
    naming = _Naming.of(list(read))
    draft = _Draft()
    for node in read:
        _add_input(draft, node, naming)
    base = len(draft.inputs)
    for node in nodes:
        _add_node(draft, node, naming, base)
    refs = [draft.place[node] for node in outputs]
    graph = TaskGraph(tuple(draft.specs), tuple(draft.ops), tuple(refs))
    order = _output_order(graph)
    graph = replace(graph, outputs=tuple(refs[i] for i in order))
    made, places, names = canonical(graph)
    made = index_bounds(made)
    missing = free_symbols(
        s for specs in (made.inputs, *(op.outs for op in made.ops)) for spec in specs for s in sizes_of(spec)
    )
    if missing - set(names.values()):
        raise RegionRefused("symbols", "a size of the region cannot be read off its inputs")
    ranges, binding, exprs = naming.ranges(names, buckets)
    task = KernelTask(made, ranges, numerics, task_flags(made, device))
    _ = task.key  # every size must have a form before anybody relies on the key
    kept = _kept_ops(graph)
    return Captured(
        task=task,
        inputs=tuple(draft.inputs[i] for i in places),
        outputs=tuple(outputs[i] for i in order),
        binding=binding,
        symbols=exprs,
        origins=tuple(draft.origins[i] for i in kept),
        device=device,
    )


def _one_device(nodes: Sequence[fx.Node]) -> torch.device:
    devices = {t.device for node in nodes for t in tensors_of(node.meta.get("val"))}
    if len(devices) != 1:
        raise RegionRefused("devices", f"tensors on {', '.join(sorted(map(str, devices)))}")
    return devices.pop()


def _add_input(draft: _Draft, node: fx.Node, naming: _Naming) -> None:
    value = node.meta["val"]
    if not isinstance(value, torch.Tensor):
        raise RegionRefused("input-form", f"{node.name} is no single tensor")
    spec = naming.spec(value)
    draft.place[node] = Ref(len(draft.inputs))
    draft.inputs.append(node)
    draft.specs.append(replace(spec, frozen=node.op == "get_attr"))


def _add_node(draft: _Draft, node: fx.Node, naming: _Naming, base: int) -> None:
    if node.target is operator.getitem:
        source, item = node.args
        if not isinstance(source, fx.Node) or not isinstance(item, int):
            raise RegionRefused("input-form", f"{node.name} picks by something else than a number")
        draft.place[node] = Ref(draft.place[source].index, item)
        return
    target = str(node.target)
    values = tensors_of(node.meta["val"])
    whole = node.meta["val"]
    if not isinstance(whole, torch.Tensor) and len(values) != len(whole):
        raise RegionRefused("output-form", f"{name_of(node)} returns something else than tensors")
    op = Op(
        target=target if target.count(".") == 2 else f"{target}.default",
        args=tuple(_arg(a, draft, naming) for a in node.args),
        outs=tuple(naming.spec(v) for v in values),
        kwargs=tuple(sorted((k, _arg(v, draft, naming)) for k, v in node.kwargs.items())),
        written=name_of(node) == "convert_element_type" and origin_of(node) in ("aten._to_copy.default", ""),
    )

    def spec_of(ref: Ref) -> TensorSpec:
        return draft.specs[ref.index] if ref.index < base else draft.ops[ref.index - base].outs[ref.item]

    op = _short_reshape(canonical_op(op, spec_of), draft, base)
    if op.target == RESHAPE and isinstance(op.args[0], Ref) and spec_of(op.args[0]).shape == op.outs[0].shape:
        draft.place[node] = op.args[0]
        return
    name = digest(TaskGraph((), (op,), ()).to_json())
    if name not in draft.same:
        draft.same[name] = len(draft.ops)
        draft.ops.append(op)
        draft.origins.append(origin_of(node))
    draft.place[node] = Ref(base + draft.same[name])


def _short_reshape(op: Op, draft: _Draft, base: int) -> Op:
    """A reshape of a reshape is one reshape."""
    while op.target == RESHAPE and isinstance(op.args[0], Ref) and op.args[0].index >= base:
        before = draft.ops[op.args[0].index - base]
        if before.target != RESHAPE:
            break
        op = replace(op, args=(before.args[0], *op.args[1:]))
    return op


def _arg(value: Any, draft: _Draft, naming: _Naming) -> Arg:
    if isinstance(value, fx.Node):
        if value in draft.place:
            return draft.place[value]
        held = value.meta.get("val")
        if isinstance(held, torch.SymInt):
            return naming.size(held)
        raise RegionRefused("argument", f"{value.name} is neither a tensor nor a size")
    if isinstance(value, list | tuple):
        return tuple(_arg(each, draft, naming) for each in value)
    if isinstance(value, torch.SymInt):
        return naming.size(value)
    if isinstance(value, torch.dtype):
        return DType(str(value).removeprefix("torch."))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.device | torch.layout | torch.memory_format):
        return str(value)
    raise RegionRefused("argument", f"{type(value).__name__} has no form in a task")


class _Naming:
    """Sizes of the shape environment -> sizes of the task."""

    def __init__(self) -> None:
        self._alone: dict[sympy.Symbol, sympy.Symbol] = {}
        self._whole: dict[sympy.Expr, sympy.Symbol] = {}
        self._known: dict[str, torch.SymInt] = {}

    @classmethod
    def of(cls, inputs: Sequence[fx.Node]) -> _Naming:
        """Names for every size that stands in an input's shape: symbols first, then products of other symbols."""
        naming = cls()
        tensors = [t for node in inputs for t in tensors_of(node.meta["val"])]
        sizes: list[Any] = [s for t in tensors for s in t.shape if isinstance(s, torch.SymInt)]
        sizes = [s for s in sizes if not s.node.expr.is_number]
        for size in sizes:
            if size.node.expr.is_Symbol:
                naming._alone.setdefault(size.node.expr, naming._new(size))
        for size in sizes:
            expr = size.node.expr
            if not expr.free_symbols <= set(naming._alone) and expr not in naming._whole:
                naming._whole[expr] = naming._new(size)
        return naming

    def _new(self, size: torch.SymInt) -> sympy.Symbol:
        made = symbol(f"raw{len(self._known)}")
        self._known[made.name] = size
        return made

    def size(self, size: Any) -> Size:
        """Raises RegionRefused for a size that the inputs' shapes do not give."""
        if isinstance(size, int):
            return size
        expr = size.node.expr
        for whole, name in self._whole.items():
            expr = expr.subs(whole, name)
        expr = expr.xreplace(self._alone)
        if {s.name for s in expr.free_symbols} - set(self._known):
            raise RegionRefused("symbols", f"{size} cannot be read off the region's inputs")
        encode(simplify(expr))
        return simplify(expr)

    def spec(self, t: torch.Tensor) -> TensorSpec:
        return TensorSpec(
            str(t.dtype).removeprefix("torch."), tuple(map(self.size, t.shape)), tuple(map(self.size, t.stride()))
        )

    def ranges(
        self, names: dict[str, str], buckets: Buckets | None
    ) -> tuple[tuple[Symbol, ...], dict[str, int], dict[str, sympy.Expr]]:
        """Symbols with their ranges, this call's sizes, and the shape environment's expression, by canonical name."""
        rows, binding, exprs = [], {}, {}
        for raw, name in sorted(names.items(), key=lambda pair: int(pair[1][1:])):
            size = self._known[raw]
            bounds = (buckets.bounds if buckets else size.node.shape_env.bound_sympy)(size.node.expr)
            rows.append(Symbol(name, max(0, _finite(bounds.lower, 0)), _finite(bounds.upper, None)))
            hint = size.node.hint
            if not isinstance(hint, int):
                raise RegionRefused("unbacked", f"{size} has no size in this call")
            binding[name], exprs[name] = hint, size.node.expr
        return tuple(rows), binding, exprs


def _finite(bound: Any, other: Any) -> Any:
    # int_oo answers False to is_Integer; bounds above 2**48 are as good as none.
    return int(bound) if getattr(bound, "is_Integer", False) and abs(int(bound)) < 2**48 else other


def _output_order(graph: TaskGraph) -> list[int]:
    """Outputs sorted by what they compute, so that the order of the graph's nodes leaves no trace."""
    names: list[str] = [digest(["in", *_shape_text(spec)]) for spec in graph.inputs]
    for op in graph.ops:
        bare = replace(op, outs=(), args=_blind(op.args), kwargs=())
        parts = [bare.target, repr(bare.args), repr([(k, _blind((v,))) for k, v in op.kwargs])]
        parts += [f"{names[ref.index]}.{ref.item}" for ref in op.refs()]
        parts += [text for spec in op.outs for text in _shape_text(spec)]
        names.append(digest(parts))
    keys = [f"{names[ref.index]}.{ref.item}" for ref in graph.outputs]
    return sorted(range(len(keys)), key=lambda i: keys[i])


def _shape_text(spec: TensorSpec) -> list[str]:
    return [spec.dtype, str(spec.frozen), *(str(s) if isinstance(s, int) else "s" for s in sizes_of(spec))]


def _blind(args: tuple[Arg, ...]) -> tuple[Arg, ...]:
    def hide(arg: Arg) -> Arg:
        if isinstance(arg, tuple):
            return _blind(arg)
        return "v" if isinstance(arg, Ref) else "s" if isinstance(arg, sympy.Expr) else arg

    return tuple(hide(arg) for arg in args)


def _kept_ops(graph: TaskGraph) -> list[int]:
    """Old places of the operators in the canonical order (the walk of `canonical`, repeated for their origins)."""
    base, done, order = len(graph.inputs), set[int](), list[int]()
    for out in graph.outputs:
        stack = [(out.index, False)]
        while stack:
            index, closed = stack.pop()
            if closed:
                order.append(index - base)
            elif index not in done and index >= base:
                done.add(index)
                stack.append((index, True))
                stack.extend((ref.index, False) for ref in reversed(list(graph.ops[index - base].refs())))
    return order
