"""Rows: pointwise work and reductions over one set of axes, analysed.

`analyse` turns a TaskGraph into a RowProgram. Its domain is a list of atomic axes: the finest common refinement of all
full-size shapes, so that the view pairs of a GroupNorm are one domain. Every value varies over some of the axes; one
that varies over a reduced axis is made per element, one over none of them per row, one over no axis at all per call.
Renderers for any language read the program; none of them looks at shapes again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy

from torch_kevolve.sizes import Size, numel, simplify, upper_bound
from torch_kevolve.task import KernelTask, Op, Ref, TaskGraph, TensorSpec
from torch_kevolve.templates.expr import is_pointwise
from torch_kevolve.templates.shapes import Groups, Refusal, propagate

REDUCTIONS = {
    "aten.sum.dim_IntList": "sum", "aten.mean.dim": "mean", "aten.amax.default": "max", "aten.amin.default": "min",
    "aten.prod.dim_int": "prod", "aten.any.dim": "any", "aten.all.dim": "all", "aten.var_mean.correction": "var_mean",
    "aten.argmax.default": "argmax", "aten.argmin.default": "argmin", "aten.any.dims": "any",
    "aten.var.correction": "var",
}  # fmt: skip
VIEWS = ("aten.reshape.default", "aten.view.default", "aten.expand.default", "aten.permute.default",
         "aten.unsqueeze.default",          "aten.squeeze.dim", "aten.squeeze.dims", "aten.alias.default")  # fmt: skip
GATHER = "aten.gather.default"
IOTA = "prims.iota.default"


@dataclass(frozen=True)
class Load:
    """An input over the atomic axes: `strides[a]` elements per step of axis `a`, 0 where it does not vary."""

    input: int
    dtype: str
    strides: tuple[Size, ...]


@dataclass(frozen=True)
class Reduce:
    """Operator number `op` reduces `source` by `kind`. `count`: elements reduced. `final`: over rows, to one number.

    `correction`: of var_mean. Integer sums stay integers.
    """

    op: int
    kind: str
    source: Ref
    count: Size
    final: bool
    correction: float = 0.0


@dataclass(frozen=True)
class Output:
    """Output `place` is the value `ref`, at strides over the atomic axes."""

    place: int
    ref: Ref
    strides: tuple[Size, ...]
    dtype: str


@dataclass(frozen=True)
class RowProgram:
    """`axes`: sizes of the atomic axes, outermost first; `reduced`: which of them are reduced.

    `varies[index]`: the axes over which value `index` varies. `loads` by input index. `reduces` in dependency order,
    per-row ones before final ones. Values are computed by the graph's own operators (`task.graph.ops`).
    """

    task: KernelTask
    axes: tuple[Size, ...]
    reduced: tuple[int, ...]
    varies: tuple[frozenset[int], ...]
    loads: dict[int, Load]
    reduces: tuple[Reduce, ...]
    outputs: tuple[Output, ...]

    @property
    def parallel(self) -> tuple[int, ...]:
        """The axes that are not reduced, outermost first."""
        return tuple(a for a in range(len(self.axes)) if a not in self.reduced)

    @property
    def rows(self) -> Size:
        return numel(self.axes[a] for a in self.parallel)

    @property
    def row_size(self) -> Size:
        return numel(self.axes[a] for a in self.reduced)

    def level(self, index: int) -> str:
        """`element`, `row` or `scalar`: how often value `index` is made."""
        axes = self.varies[index]
        if axes & set(self.reduced):
            return "element"
        return "row" if axes else "scalar"

    @property
    def graph(self) -> TaskGraph:
        return self.task.graph


def analyse(task: KernelTask) -> RowProgram | str:
    """The program, or why the task is none."""
    try:
        return _analyse(task)
    except Refusal as why:
        return str(why)


def _analyse(task: KernelTask) -> RowProgram:
    graph = task.graph
    for op in graph.ops:
        known = op.target in REDUCTIONS or op.target in VIEWS or op.target in (GATHER, IOTA)
        if not known and not is_pointwise(op.target):
            raise Refusal(f"{op.target} is neither pointwise, view nor reduction")
    for spec in (*graph.inputs, *(o for op in graph.ops for o in op.outs)):
        if spec.dtype == "float64":
            raise Refusal("float64 is left to the library")
    sizes, groups = propagate(graph, VIEWS, REDUCTIONS, GATHER, IOTA)
    program = _program(task, sizes, groups)
    return _merge(program)


def _program(task: KernelTask, sizes: tuple[Size, ...], groups: Groups) -> RowProgram:
    graph = task.graph
    base = len(graph.inputs)
    varies = tuple(frozenset(a for dim in groups[i] for a in dim) for i in range(base + len(graph.ops)))
    reduced = _reduced(graph, groups, varies)
    if not reduced:
        raise Refusal("no axis is reduced")
    reduces = []
    for number, op in enumerate(graph.ops):
        if op.target in REDUCTIONS:
            reduces.append(_reduce(graph, number, op, groups, varies, reduced))
        elif op.target == GATHER:
            _check_gather(graph, op, groups, varies, reduced)
        elif op.target == IOTA and (len(groups[base + number]) != 1 or len(groups[base + number][0]) > 1):
            raise Refusal("an iota over a split axis")
    loads = {i: Load(i, spec.dtype, _strides(spec, groups[i], sizes)) for i, spec in enumerate(graph.inputs)}
    outputs = tuple(
        Output(place, ref, _strides(graph.spec(ref), groups[ref.index], sizes), graph.spec(ref).dtype)
        for place, ref in enumerate(graph.outputs)
    )
    if any(ref.index < base for ref in graph.outputs):
        raise Refusal("an output is an input")
    _check_finals(graph, reduces, varies)
    ordered = tuple(sorted(reduces, key=lambda r: (r.final, r.op)))
    return RowProgram(task, sizes, tuple(sorted(reduced)), varies, loads, ordered, outputs)


def _reduced(graph: TaskGraph, groups: Groups, varies: Sequence[frozenset[int]]) -> frozenset[int]:
    """The one set of axes that reductions of full values take away; `_reduce` checks all others against it."""
    full = max(varies, key=len, default=frozenset())
    found = set()
    for op in graph.ops:
        if op.target in REDUCTIONS and isinstance(op.args[0], Ref) and varies[op.args[0].index] == full:
            source = op.args[0].index
            found.add(frozenset(a for dim in _dims(op, len(groups[source])) for a in groups[source][dim]))
    found.discard(frozenset())
    if len(found) > 1:
        raise Refusal("reductions over different axes")
    reduced = next(iter(found), frozenset())
    if reduced == full:
        raise Refusal("everything is reduced to one number")
    return reduced


def _reduce(
    graph: TaskGraph, number: int, op: Op, groups: Groups, varies: Sequence[frozenset[int]], reduced: frozenset[int]
) -> Reduce:
    source = op.args[0]
    assert isinstance(source, Ref)
    dims = _dims(op, len(groups[source.index]))
    taken = frozenset(a for dim in dims for a in groups[source.index][dim])
    kind = REDUCTIONS[op.target]
    final = not (taken & reduced)
    if final and taken and varies[source.index] != taken:
        raise Refusal("a reduction over some of the rows")
    if final and kind not in ("sum", "mean", "max", "min", "any", "all"):
        raise Refusal(f"{kind} over rows")
    if not final and taken != reduced:
        raise Refusal("a reduction over some of the reduced axes")
    if kind in ("argmax", "argmin") and (len(taken) != 1 or len(dims) != 1):
        raise Refusal(f"{kind} over several axes")
    shape = graph.spec(source).shape
    correction = dict(op.kwargs).get("correction", 1 if kind in ("var", "var_mean") else 0)
    if not isinstance(correction, int | float):
        raise Refusal("a symbolic correction")
    return Reduce(number, kind, source, numel(shape[d] for d in dims), final, float(correction))


def _check_finals(graph: TaskGraph, reduces: Sequence[Reduce], varies: Sequence[frozenset[int]]) -> None:
    """What is reduced over all rows is known when the rows are done: no row may ask for it (smoothed cross-entropy's
    gradient does, where the count of the rows that matter divides each of them)."""
    base = len(graph.inputs)
    late = {base + r.op for r in reduces if r.final}
    for number, op in enumerate(graph.ops, base):
        if any(ref.index in late for ref in op.refs()):
            if varies[number]:
                raise Refusal("a row needs a reduction over all rows")
            late.add(number)


def _dims(op: Op, rank: int) -> list[int]:
    given = op.args[1] if len(op.args) > 1 else None
    if given is None:
        return list(range(rank))
    dims = given if isinstance(given, tuple) else (given,)
    if not dims:
        return list(range(rank))
    return [int(d) % rank for d in dims] if rank else []  # type: ignore[arg-type]


def _check_gather(
    graph: TaskGraph, op: Op, groups: Groups, varies: Sequence[frozenset[int]], reduced: frozenset[int]
) -> None:
    source, dim, index = op.args[0], op.args[1], op.args[2]
    if not isinstance(source, Ref) or not isinstance(index, Ref) or not isinstance(dim, int):
        raise Refusal("a gather that is not along the row")
    axes = groups[source.index][dim % len(groups[source.index])]
    if set(axes) != set(reduced) or len(axes) != 1 or varies[index.index] & reduced:
        raise Refusal("a gather that is not along the row")


def _strides(spec: TensorSpec, dims: Sequence[Sequence[int]], sizes: Sequence[Size]) -> tuple[Size, ...]:
    out: list[Size] = [0] * len(sizes)
    for axes, stride in zip(dims, spec.strides, strict=True):
        step: Size = stride
        for axis in reversed(axes):
            out[axis] = step
            step = simplify(step * sizes[axis])
    return tuple(out)


def _merge(program: RowProgram) -> RowProgram:
    """Join neighbouring axes that no value and no tensor tells apart: longer loops, fewer of them."""
    for a in range(len(program.axes) - 1):
        b = a + 1
        if (a in program.reduced) != (b in program.reduced):
            continue
        if any((a in axes) != (b in axes) for axes in program.varies):
            continue
        tensors = [load.strides for load in program.loads.values()] + [out.strides for out in program.outputs]
        if any(sympy.expand(s[a] - s[b] * program.axes[b]) != 0 for s in tensors):
            continue
        if any(
            op.target == IOTA and b in program.varies[len(program.graph.inputs) + n]
            for n, op in enumerate(program.graph.ops)
        ):
            continue
        return _merge(_joined(program, a))
    return program


def _joined(program: RowProgram, a: int) -> RowProgram:
    def axis(old: int) -> int:
        return old if old <= a else old - 1

    def strides(old: tuple[Size, ...]) -> tuple[Size, ...]:
        return (*old[:a], *old[a + 1 :])

    size = simplify(program.axes[a] * program.axes[a + 1])
    return RowProgram(
        task=program.task,
        axes=(*program.axes[:a], size, *program.axes[a + 2 :]),
        reduced=tuple(sorted({axis(each) for each in program.reduced})),
        varies=tuple(frozenset(axis(each) for each in axes) for axes in program.varies),
        loads={i: Load(i, load.dtype, strides(load.strides)) for i, load in program.loads.items()},
        reduces=program.reduces,
        outputs=tuple(Output(o.place, o.ref, strides(o.strides), o.dtype) for o in program.outputs),
    )


def places_fit(program: RowProgram) -> bool:
    """Whether every argmax and argmin of the program stays below 2^31: writers may then keep places in 32 bits."""
    counts = [r.count for r in program.reduces if r.kind in ("argmax", "argmin")]
    bounds = [upper_bound(count, program.task.symbols) for count in counts]
    return all(bound is not None and bound < 2**31 - 1 for bound in bounds)
