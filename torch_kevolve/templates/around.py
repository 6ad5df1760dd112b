"""Around: the pointwise work behind an anchor operator, as statements.

A family owns one anchor (a matmul, a pool, a scan ...) whose result lives on a domain of sizes. What follows it, view
or pointwise, is evaluated per element of that domain: `Body` holds the loads of further inputs with their strides over
the domain, the statements, and the stores of the outputs. No family needs to know what the epilogue is.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch_kevolve.sizes import Size, numel, simplify
from torch_kevolve.task import Op, Ref, TaskGraph
from torch_kevolve.templates.expr import Term, express, is_pointwise, kind_of

VIEWS = ("view", "expand", "permute", "unsqueeze", "squeeze", "t", "transpose", "_unsafe_view", "alias", "reshape")
Strides = tuple[Size, ...]


@dataclass(frozen=True)
class Leaf:
    """An input as it is seen through views: index of the input, sizes, strides, dtype."""

    index: int
    shape: tuple[Size, ...]
    strides: Strides
    dtype: str


@dataclass(frozen=True)
class Load:
    """`name = input[index]` at strides over the domain."""

    name: str
    leaf: Leaf
    strides: Strides


@dataclass(frozen=True)
class Store:
    """Output `place` takes the atom `text`, at strides over the domain."""

    place: int
    text: str
    strides: Strides
    dtype: str


@dataclass(frozen=True)
class Body:
    """Loads, then statements in order, then stores. `plain`: nothing is done between anchor and stores."""

    loads: tuple[Load, ...]
    statements: tuple[str, ...]
    stores: tuple[Store, ...]

    @property
    def plain(self) -> bool:
        return not self.statements


def name_of(op: Op) -> str:
    return op.target.split(".")[1]


def leaf(graph: TaskGraph, ref: Ref) -> Leaf | None:
    """The input behind a chain of views without offset; None where a value is computed."""
    spec = graph.spec(ref)
    shape, strides, dtype = spec.shape, spec.strides, spec.dtype
    op = graph.op(ref)
    while op is not None:
        source = op.args[0] if op.args else None
        if name_of(op) not in VIEWS or not isinstance(source, Ref):
            return None
        inner = graph.spec(source)
        # A reshape copies what is not dense, unless it changes nothing.
        if name_of(op) == "reshape" and inner.shape != op.outs[0].shape and not dense(inner.shape, inner.strides):
            return None
        ref, op = source, graph.op(source)
    return Leaf(ref.index, shape, strides, dtype)


def dense(shape: Sequence[Size], strides: Sequence[Size]) -> bool:
    """Row-major without gaps."""
    step: Size = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step = simplify(step * size)
    return True


def spread(shape: Sequence[Size], strides: Sequence[Size], domain: Sequence[Size]) -> Strides | None:
    """Strides over the domain of a tensor whose sizes regroup to it; None where the address is no such sum."""
    out: list[Size] = [0] * len(domain)
    try:
        for places, dims in groups(shape, domain):
            _spread(places, dims, shape, domain, list(strides), out)
    except _Unfit:
        return None
    return tuple(out)


def after(
    graph: TaskGraph, values: Mapping[tuple[int, int], str], domain: Sequence[Size], language: str = "triton"
) -> Body | None:
    """What is done with the anchor's results `values` ((index, item) -> variable) until the outputs.

    Without values it is what is done with the inputs alone: the work before an anchor.
    None where an operator is neither a view nor pointwise, or an address is no sum of strides over the domain.
    """
    try:
        return _Walk(graph, dict(values), tuple(domain), language).body()
    except _Unfit:
        return None


class _Unfit(Exception):
    pass


class _Walk:
    def __init__(
        self, graph: TaskGraph, values: dict[tuple[int, int], str], domain: tuple[Size, ...], language: str
    ) -> None:
        self.graph, self.domain, self.values, self.language = graph, domain, values, language
        self.numel = numel(domain)
        self.anchors = {index for index, _ in values}
        self.loads: dict[tuple[Leaf, Strides], Load] = {}
        self.statements: list[str] = []

    def body(self) -> Body:
        base = len(self.graph.inputs)
        for place, op in enumerate(self.graph.ops):
            index = base + place
            if index not in self.anchors and leaf(self.graph, Ref(index)) is None and self.needed(index):
                self.visit(index, op)
        stores = []
        for place, ref in enumerate(self.graph.outputs):
            spec = self.graph.spec(ref)
            strides = self.over_domain(spec.shape, spec.strides, spec.shape)
            stores.append(Store(place, self.read(ref, spec.shape).text, strides, spec.dtype))
        return Body(tuple(self.loads.values()), tuple(self.statements), tuple(stores))

    def needed(self, index: int) -> bool:
        """Whether an operator hangs on an output other than through the anchor."""
        seen: set[int] = set()
        stack = [ref.index for ref in self.graph.outputs]
        while stack:
            at = stack.pop()
            if at == index:
                return True
            if at in seen or at in self.anchors or at < len(self.graph.inputs):
                continue
            seen.add(at)
            stack.extend(ref.index for ref in self.graph.ops[at - len(self.graph.inputs)].refs())
        return False

    def visit(self, index: int, op: Op) -> None:
        frame = op.outs[0].shape
        if name_of(op) in VIEWS and name_of(op) not in ("permute", "t", "transpose", "expand"):
            source = op.args[0]
            if not isinstance(source, Ref) or (source.index, source.item) not in self.values:
                raise _Unfit
            groups(frame, self.domain)  # raises where the shape is no regrouping
            self.values[index, 0] = self.values[source.index, source.item]
            return
        if not is_pointwise(op.target) or len(op.outs) != 1:
            raise _Unfit
        if numel(frame) != self.numel:
            raise _Unfit
        term = express(op, lambda ref: self.read(ref, frame), self.language, self.graph)
        if term is None:
            raise _Unfit
        name = f"v{index}"
        self.statements.append(f"{name} = {term.text}")
        self.values[index, 0] = name

    def read(self, ref: Ref, frame: tuple[Size, ...]) -> Term:
        dtype = self.graph.spec(ref).dtype
        if (ref.index, ref.item) in self.values:
            if numel(self.graph.spec(ref).shape) != self.numel:
                raise _Unfit
            return Term(self.values[ref.index, ref.item], dtype)
        found = leaf(self.graph, ref)
        if found is None or not kind_of(dtype):
            raise _Unfit
        strides = self.over_domain(found.shape, found.strides, frame)
        key = (found, strides)
        if key not in self.loads:
            self.loads[key] = Load(f"e{len(self.loads)}", found, strides)
        return Term(self.loads[key].name, dtype)

    def over_domain(self, shape: tuple[Size, ...], strides: Strides, frame: tuple[Size, ...]) -> Strides:
        pad = len(frame) - len(shape)
        if pad < 0:
            raise _Unfit
        wide: list[Size] = [0] * pad
        for size, stride, full in zip(shape, strides, frame[pad:], strict=True):
            if size != full and size != 1:
                raise _Unfit
            wide.append(0 if size == 1 else stride)
        out: list[Size] = [0] * len(self.domain)
        for places, dims in groups(frame, self.domain):
            _spread(places, dims, frame, self.domain, wide, out)
        return tuple(out)


def groups(frame: Sequence[Size], domain: Sequence[Size]) -> list[tuple[list[int], list[int]]]:
    """Matching runs (dimensions of `frame`, dimensions of `domain`) with equal products, sizes of 1 left out."""
    a = [i for i, size in enumerate(frame) if size != 1]
    b = [i for i, size in enumerate(domain) if size != 1]
    out: list[tuple[list[int], list[int]]] = []
    while a and b:
        left, right = [a.pop(0)], [b.pop(0)]
        while numel(frame[i] for i in left) != numel(domain[i] for i in right):
            x, y = numel(frame[i] for i in left), numel(domain[i] for i in right)
            grow_left = (isinstance(x, int) and isinstance(y, int) and x < y) or len(left) <= len(right)
            if isinstance(x, int) and isinstance(y, int):
                grow_left = x < y
            if not (a if grow_left else b):
                raise _Unfit
            (left if grow_left else right).append((a if grow_left else b).pop(0))
        out.append((left, right))
    if a or b:
        raise _Unfit
    return out


def _spread(
    places: list[int], dims: list[int], frame: Sequence[Size], domain: Sequence[Size], wide: list[Size], out: list[Size]
) -> None:
    if len(places) > 1:
        if len(dims) > 1:
            raise _Unfit
        for one, other in itertools.pairwise(places):
            if simplify(wide[other] * frame[other]) != wide[one]:
                raise _Unfit
        out[dims[0]] = wide[places[-1]]
        return
    step = wide[places[0]]
    for dim in reversed(dims):
        out[dim] = step
        step = simplify(step * domain[dim])
