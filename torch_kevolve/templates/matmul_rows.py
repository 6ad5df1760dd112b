"""Matmul rows: what follows a product row by row, so that the product itself need not be written.

A row's maximum, its sum of exponentials and the value in one picked column are enough for logsumexp, for log_softmax at
a label and for cross-entropy. `row_tail` cuts a task in three: the value `x` whose rows are reduced, the work per row,
and the work on sums over all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch_kevolve.sizes import Size, contiguous_strides, numel
from torch_kevolve.task import Arg, Op, Ref, TaskGraph, TensorSpec
from torch_kevolve.templates.around import VIEWS, Body, after, name_of
from torch_kevolve.templates.expr import HELD_FLOATS, is_pointwise

_RESHAPES = ("squeeze", "unsqueeze", "view", "reshape", "_unsafe_view", "alias")


@dataclass(frozen=True)
class Sum:
    """A sum over all rows of the atom `text`, held as `dtype` (float32 or int64); `mean`: divided by the rows."""

    text: str
    dtype: str
    mean: bool


@dataclass(frozen=True)
class RowTail:
    """`x`: the value whose rows are reduced.

    `rows`: over (M,), from `top` (finite: 0 where the maximum is infinite), `total` = sum(exp(x - top)) and `picked`,
    with its stores at the task's outputs. `guarded` False: a row with an infinite maximum is NaN, as x - max is there.
    `column`: over (M,), the column of `picked` as the text of its one store. `last`: from `f0`, `f1` ..., the `sums`.
    """

    x: Ref
    rows: Body
    guarded: bool
    column: Body | None = None
    sums: tuple[Sum, ...] = ()
    last: Body | None = None


class _Unfit(Exception):
    pass


def row_tail(graph: TaskGraph, anchor: int, sizes: tuple[Size, Size], language: str) -> RowTail | None:
    """The tail of a task whose product is value `anchor` of [M, N]; None where something does not fit."""
    try:
        return _Tail(graph, anchor, sizes, language).made()
    except _Unfit:
        return None


class _Tail:
    """Writes the graph of the rows. Its first operators stand for top, total and picked; a wide value is there at one
    column alone."""

    def __init__(self, graph: TaskGraph, anchor: int, sizes: tuple[Size, Size], language: str) -> None:
        self.graph, self.anchor, self.language = graph, anchor, language
        self.m, self.n = sizes
        self.base = len(graph.inputs)
        self.x, self.top, self.total, self.guarded = self._pair()
        self.ops = self._given()
        self.copies: dict[Ref, Arg] = {}
        self.narrow: dict[Ref, Arg] = {}
        self.index: Ref | None = None

    def made(self) -> RowTail:
        if self.n == 1 or any(_same(self.graph, out, Ref(self.top)) for out in self.graph.outputs):
            raise _Unfit
        outputs = [self.copy(ref) for ref in self.graph.outputs]
        column = None if self.index is None else self.copy(self.index)
        graph = TaskGraph(self.graph.inputs, tuple(self.ops), ())
        refs = [out for out in outputs if isinstance(out, Ref)]
        if len(refs) != len(outputs) or not (column is None or isinstance(column, Ref)):
            raise _Unfit
        finals, late = self._finals(graph)
        values = {(self.base, 0): "top", (self.base + 1, 0): "total", (self.base + 2, 0): "picked"}
        here = [place for place, ref in enumerate(refs) if ref.index not in late]
        sources = [self._source(graph, index) for index in finals]
        rows = self._body(graph, values, [*sources, *(refs[place] for place in here)], (self.m,))
        places = dict(enumerate(here, len(sources)))
        sums = tuple(self._sum(graph, i, rows.stores[k].text) for k, i in enumerate(finals))
        kept = tuple(replace(s, place=places[s.place]) for s in rows.stores if s.place in places)
        last = None
        if finals:
            there = [place for place in range(len(refs)) if place not in here]
            names = {(index, 0): f"f{k}" for k, index in enumerate(finals)}
            last = self._body(graph, names, [refs[place] for place in there], (1,))
            last = replace(last, stores=tuple(replace(s, place=there[s.place]) for s in last.stores))
        picks = None if column is None else self._body(graph, {}, [column], (self.m,))
        return RowTail(self.x, replace(rows, stores=kept), self.guarded, picks, sums, last)

    def _pair(self) -> tuple[Ref, int, int, bool]:
        """(x, the maximum, the sum, guarded) of sum(exp(x - f(max(x)))) over the last dimension."""
        for place, total in enumerate(self.graph.ops):
            power = _made(self.graph, total.args[0], "exp") if name_of(total) == "sum" and total.args else None
            less = _made(self.graph, power.args[0], "sub") if power is not None else None
            if less is None or dict(less.kwargs) or not self._over_row(total) or not isinstance(less.args[0], Ref):
                continue
            shift, guarded = _strip(self.graph, less.args[1]), False
            if _made(self.graph, shift, "where") is not None:
                shift, guarded = self._guarded(shift), True
            top = _made(self.graph, shift, "amax")
            if top is None or not isinstance(shift, Ref) or not self._over_row(top):
                continue
            if _same(self.graph, top.args[0], less.args[0]):
                return less.args[0], shift.index, self.base + place, guarded
        raise _Unfit

    def _guarded(self, shift: object) -> object:
        """The maximum in `where(abs(max) == inf, 0, max)`."""
        choice = _made(self.graph, shift, "where")
        test = _made(self.graph, choice.args[0], "eq") if choice is not None else None
        size = _made(self.graph, test.args[0], "abs") if test is not None and test.args[1] == float("inf") else None
        if choice is None or size is None or self._number(choice.args[1]) != 0:
            return None
        top = _strip(self.graph, choice.args[2])
        return top if _strip(self.graph, size.args[0]) == top else None

    def _number(self, arg: Arg) -> Arg:
        """The value of a constant of one element; anything else as it is."""
        op = self.graph.op(arg) if isinstance(arg, Ref) else None
        if op is not None and name_of(op) == "full" and numel(op.outs[0].shape) == 1:
            return op.args[1]
        return arg

    def _over_row(self, op: Op) -> bool:
        source = op.args[0]
        shape = self.graph.spec(source).shape if isinstance(source, Ref) else ()
        dims = op.args[1] if len(op.args) > 1 else None
        return isinstance(dims, tuple) and dims in ((-1,), (len(shape) - 1,)) and shape[-1] == self.n

    def _given(self) -> list[Op]:
        shape = (*self.graph.spec(self.x).shape[:-1], 1)
        specs = [_dense(dtype, shape) for dtype in ("float32", "float32", self.graph.spec(self.x).dtype)]
        return [Op("aten.empty.memory_format", (shape,), (spec,)) for spec in specs]

    # Values

    def copy(self, ref: Ref) -> Arg:
        """A value of one element per row (or of all rows) in the new graph."""
        if ref not in self.copies:
            self.copies[ref] = self._copy(ref)
        return self.copies[ref]

    def _copy(self, ref: Ref) -> Arg:
        op = self.graph.op(ref)
        if op is None:
            return ref
        if ref.index == self.top:
            return Ref(self.base)
        if ref.index == self.total:
            return Ref(self.base + 1)
        if name_of(op) == "gather":
            return self._gather(op)
        number = self._number(ref)
        if number is not ref:
            return number
        if self._is_wide(ref) or ref.index == self.anchor or len(op.outs) != 1:
            raise _Unfit
        return self._add(op, op.outs[0], self.copy)

    def _gather(self, op: Op) -> Arg:
        source, dim, index = op.args[:3]
        if not isinstance(source, Ref) or not isinstance(index, Ref) or not isinstance(dim, int):
            raise _Unfit
        rank = len(self.graph.spec(source).shape)
        if dim % rank != rank - 1 or not self._is_wide(source) or numel(op.outs[0].shape) != self.m:
            raise _Unfit
        if self.index is not None and not _same(self.graph, index, self.index):
            raise _Unfit
        self.index = index
        return self.pick(source)

    def pick(self, ref: Ref) -> Arg:
        """A wide value in the picked column."""
        if ref not in self.narrow:
            self.narrow[ref] = self._pick(ref)
        return self.narrow[ref]

    def _pick(self, ref: Ref) -> Arg:
        if _same(self.graph, ref, self.x):
            return Ref(self.base + 2)
        if not self._is_wide(ref):
            shape = self.graph.spec(ref).shape
            if shape and shape[-1] != 1:
                raise _Unfit  # one value per column
            return self.copy(ref)
        op = self.graph.op(ref)
        if op is None or ref.index == self.anchor or len(op.outs) != 1:
            raise _Unfit
        if not is_pointwise(op.target) and name_of(op) not in ("expand", *_RESHAPES):
            raise _Unfit
        shape = op.outs[0].shape
        spec = _dense(op.outs[0].dtype, (*shape[:-1], 1))
        args = tuple(spec.shape if arg == tuple(shape) else arg for arg in op.args)
        return self._add(replace(op, args=args), spec, self.pick)

    def _add(self, op: Op, spec: TensorSpec, read: Callable[[Ref], Arg]) -> Ref:
        def arg(value: Arg) -> Arg:
            if isinstance(value, tuple):
                return tuple(arg(each) for each in value)
            return read(value) if isinstance(value, Ref) else value

        kwargs = tuple((name, arg(value)) for name, value in op.kwargs)
        made = Op(op.target, tuple(arg(a) for a in op.args), (spec,), kwargs, op.written)
        self.ops.append(made)
        return Ref(self.base + len(self.ops) - 1)

    def _is_wide(self, ref: Ref) -> bool:
        shape = self.graph.spec(ref).shape
        return bool(shape) and shape[-1] == self.n and numel(shape) == numel((self.m, self.n))

    # Sums over the rows

    def _finals(self, graph: TaskGraph) -> tuple[list[int], set[int]]:
        """Values that are sums over all rows, and all values that hang on them."""
        base = len(graph.inputs)
        finals: list[int] = []
        late: set[int] = set()
        for index, op in enumerate(graph.ops, base):
            if name_of(op) in ("sum", "mean"):
                finals.append(index)
            elif name_of(op) != "empty" and not is_pointwise(op.target) and name_of(op) not in VIEWS:
                raise _Unfit
            if index in finals or any(ref.index in late for ref in op.refs()):
                late.add(index)
        return finals, late

    def _source(self, graph: TaskGraph, index: int) -> Ref:
        op = graph.ops[index - len(graph.inputs)]
        source = op.args[0]
        if not isinstance(source, Ref) or numel(graph.spec(source).shape) != self.m or op.outs[0].numel != 1:
            raise _Unfit
        return source

    def _sum(self, graph: TaskGraph, index: int, text: str) -> Sum:
        op = graph.ops[index - len(graph.inputs)]
        dtype = op.outs[0].dtype
        if dtype not in (*HELD_FLOATS, "int64"):
            raise _Unfit
        source = op.args[0]
        assert isinstance(source, Ref)
        if (graph.spec(source).dtype in HELD_FLOATS) != (dtype in HELD_FLOATS):
            raise _Unfit
        return Sum(text, "float32" if dtype in HELD_FLOATS else "int64", name_of(op) == "mean")

    def _body(
        self, graph: TaskGraph, values: dict[tuple[int, int], str], outputs: list[Ref], domain: tuple[Size, ...]
    ) -> Body:
        body = after(replace(graph, outputs=tuple(outputs)), values, domain, self.language)
        if body is None:
            raise _Unfit
        return body


def _dense(dtype: str, shape: tuple[Size, ...]) -> TensorSpec:
    return TensorSpec(dtype, shape, contiguous_strides(shape))


def _op(graph: TaskGraph, value: object) -> Op | None:
    return graph.op(value) if isinstance(value, Ref) else None


def _made(graph: TaskGraph, value: object, name: str) -> Op | None:
    op = _op(graph, _strip(graph, value))
    return op if op is not None and name_of(op) == name else None


def _strip(graph: TaskGraph, value: object) -> object:
    op = _op(graph, value)
    while op is not None and name_of(op) in (*_RESHAPES, "expand"):
        value = op.args[0]
        op = _op(graph, value)
    return value


def _same(graph: TaskGraph, one: object, other: object) -> bool:
    """One value but for its shape, and for casts that a decomposition put in (which round nothing here)."""
    return _bare(graph, one) == _bare(graph, other)


def _bare(graph: TaskGraph, value: object) -> object:
    while True:
        op = _op(graph, value)
        if op is None:
            return value
        source = op.args[0] if op.args else None
        cast = name_of(op) == "convert_element_type" and not op.written and isinstance(source, Ref)
        floats = cast and isinstance(source, Ref) and {graph.spec(source).dtype, op.outs[0].dtype} <= set(HELD_FLOATS)
        if name_of(op) not in _RESHAPES and not floats:
            return value
        value = source
