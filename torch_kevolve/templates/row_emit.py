"""Row emit: the values of a RowProgram as Triton statements.

A tile is [ROWS, BLOCK]: rows down, a piece of the row across. Row values are [ROWS, 1]. `Scope` is one place where
statements stand; a value is written at most once in a scope, and row values always in the row scope.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch_kevolve.errors import PlanError
from torch_kevolve.sizes import Size, numel, simplify
from torch_kevolve.task import Op, Ref
from torch_kevolve.templates.dialects import HELPERS
from torch_kevolve.templates.expr import Term, express
from torch_kevolve.templates.kernel_text import HELD, Params
from torch_kevolve.templates.rows import GATHER, IOTA, REDUCTIONS, VIEWS, Reduce, RowProgram

COMBINE = """
@triton.jit
def kv_mul(a, b):
    return a * b


@triton.jit
def kv_add(total, rest, x):
    t = total + x
    lost = tl.where(tl.abs(total) >= tl.abs(x), (total - t) + x, (x - t) + total)
    return t, rest + lost


@triton.jit
def kv_first_max(a, i, b, j):
    better = (a > b) | ((a != a) & (b == b))
    take = better | (((a == b) | ((a != a) & (b != b))) & (i < j))
    return tl.where(take, a, b), tl.where(take, i, j)


@triton.jit
def kv_first_min(a, i, b, j):
    better = (a < b) | ((a != a) & (b == b))
    take = better | (((a == b) | ((a != a) & (b != b))) & (i < j))
    return tl.where(take, a, b), tl.where(take, i, j)
"""
"""Combining functions of tl.reduce: as eager's argmax, a NaN wins, and of equals the first. `kv_add` keeps what a sum
over many pieces rounds off."""
FIRST, KEEP = ', eviction_policy="evict_first"', ', eviction_policy="evict_last"'
"""Cache hints of a load: what is not read again, and what is."""

assert "kv_max" in HELPERS and "kv_min" in HELPERS


@dataclass
class Scope:
    """`column`: the index tensor along the row; `mask`: text of the tile's mask or empty; `policy`: cache hint for
    what belongs to a row (what rows share is kept); `stream`: what is stored is not read again here.

    `first`: the tile's first column and its width, where that column is a multiple of the width: what is constant
    over a tile is then one number.
    """

    column: str
    mask: str
    lines: list[str] = field(default_factory=list)
    memo: dict[tuple[int, int], Term] = field(default_factory=dict)
    policy: str = ""
    tag: str = ""
    stream: bool = False
    first: tuple[str, int] | None = None


class Emitter:
    """Writes values into scopes. `rows` is the scope of row values, whose column does not exist."""

    def __init__(self, program: RowProgram, params: Params, rows: Scope, wide: bool) -> None:
        self.program, self.params, self.rows = program, params, rows
        self.wide = ".to(tl.int64)" if wide else ""
        self.base = len(program.graph.inputs)
        self.count = 0

    def value(self, ref: Ref, scope: Scope) -> Term:
        """The atom of a value in a scope, writing what it needs first. Raises PlanError where there is no text."""
        if self.program.level(ref.index) != "element":
            scope = self.rows
        known = scope.memo.get((ref.index, ref.item))
        if known is None:
            known = scope.memo[ref.index, ref.item] = self._make(ref, scope)
        return known

    def bind(self, term: Term, scope: Scope) -> Term:
        """A name for an expression."""
        if term.number is not None:
            return term
        self.count += 1
        name = f"v{self.count}"
        scope.lines.append(f"{name} = {term.text}")
        return Term(name, term.dtype)

    def _make(self, ref: Ref, scope: Scope) -> Term:
        if ref.index < self.base:
            return self._load(ref.index, scope)
        op = self.program.graph.ops[ref.index - self.base]
        source = op.args[0] if op.args else None
        if op.target in REDUCTIONS:
            raise PlanError(detail=f"{op.target} is read before it is made")
        if op.target in VIEWS and isinstance(source, Ref):
            return self.value(source, scope)
        if op.target == GATHER:
            return self._gather(op)
        if op.target == IOTA:
            return self._iota(ref, op, scope)
        scaled = self._over_softmax_sum(op, scope)
        if scaled is not None:
            return scaled
        term = express(op, lambda each: self.value(each, scope), "triton", self.program.graph)
        if term is None:
            raise PlanError(detail=f"{op.target} has no Triton text")
        return self.bind(term, scope)

    def _over_softmax_sum(self, op: Op, scope: Scope) -> Term | None:
        """x / sum(exp) as x * (1 / sum(exp)): a division per row, not per element.

        Such a sum is 0, NaN, inf or at least the smallest exp, so its reciprocal is not cut off as others' may be.
        """
        if op.target != "aten.div.Tensor" or op.kwargs or scope is self.rows or not isinstance(op.args[1], Ref):
            return None
        below = self._behind(op.args[1])
        above = self._behind(below.args[0]) if below is not None and below.target == "aten.sum.dim_IntList" else None
        if above is None or above.target != "aten.exp.default" or self.program.level(op.args[1].index) != "row":
            return None
        value = self.value(op.args[0], scope) if isinstance(op.args[0], Ref) else None
        if value is None:
            return None
        total = self.value(op.args[1], self.rows)
        inverse = self.bind(Term(f"kv_div(1.0, {total.text})", "float32"), self.rows)
        return self.bind(Term(f"{value.text} * {inverse.text}", op.outs[0].dtype), scope)

    def _behind(self, value: object) -> Op | None:
        while isinstance(value, Ref) and value.index >= self.base:
            op = self.program.graph.ops[value.index - self.base]
            if op.target not in VIEWS:
                return op
            value = op.args[0]
        return None

    def _load(self, index: int, scope: Scope) -> Term:
        load = self.program.loads[index]
        where = self.address(load.strides, scope)
        pointer = self.params.input(index)
        held = HELD.get(load.dtype, "")
        if where == "0":
            return self.bind(Term(f"tl.load({pointer}){held}", load.dtype), scope)
        along = any(load.strides[a] != 0 for a in self.program.reduced)
        mask = scope.mask if along else self.rows.mask
        guard = f", mask={mask}, other=0" if mask else ""
        policy = scope.policy if along else ""
        if policy and any(load.strides[a] == 0 for a in self.program.parallel):
            policy = KEEP
        return self.bind(Term(f"tl.load({pointer} + {where}{guard}{policy}){held}", load.dtype), scope)

    def _gather(self, op: Op) -> Term:
        source, index = op.args[0], op.args[2]
        assert isinstance(source, Ref) and isinstance(index, Ref)
        place = self.value(index, self.rows)
        column = self.bind(Term(f"{place.text}.to(tl.int64)", "int64"), self.rows)
        self.count += 1
        inner = Scope(column.text, self.rows.mask, self.rows.lines)
        return self.value(source, inner)

    def _iota(self, ref: Ref, op: Op, scope: Scope) -> Term:
        known = dict(op.kwargs)
        start, step = known.get("start", 0), known.get("step", 1)
        axes = sorted(self.program.varies[ref.index])
        index = self.index(axes[0], scope) if axes else "0"
        if not isinstance(start, int) or not isinstance(step, int):
            raise PlanError(detail="an iota with a symbolic start")
        text = f"{index} * {step} + {start}" if (start, step) != (0, 1) else index
        return Term(text if text.isidentifier() else f"({text})", op.outs[0].dtype)

    def axes_of(self, reduced: bool) -> list[int]:
        program = self.program
        return [a for a in range(len(program.axes)) if (a in program.reduced) == reduced]

    def index(self, axis: int, scope: Scope) -> str:
        """The index along one atomic axis."""
        mine = self.axes_of(axis in self.program.reduced)
        name = scope.column if axis in self.program.reduced else "r"
        below = simplify(numel(self.program.axes[a] for a in mine if a > axis))
        text = name if below == 1 else self._over(name, below, scope)
        if mine[0] != axis:
            text = f"({text} % {self.params.size(self.program.axes[axis])})"
        return text

    def _over(self, name: str, below: Size, scope: Scope) -> str:
        """A coordinate along outer axes: name // below."""
        if name == scope.column and scope.first is not None and "inside" not in scope.mask:
            start, width = scope.first
            if isinstance(below, int) and below % width == 0:
                return f"(({start}) // {below})"
        return f"({name} // {self.params.size(below)})"

    def address(self, strides: Sequence[Size], scope: Scope) -> str:
        """The offset of an element; axes whose strides run on are one term."""
        parts: list[str] = []
        for reduced in (False, True):
            mine = self.axes_of(reduced)
            name = scope.column if reduced else "r"
            for run in self._runs(mine, strides):
                step = strides[run[-1]]
                if step == 0:
                    continue
                below = simplify(numel(self.program.axes[a] for a in mine if a > run[-1]))
                text = name if below == 1 else self._over(name, below, scope)
                if run[0] != mine[0]:
                    text = f"({text} % {self.params.size(simplify(numel(self.program.axes[a] for a in run)))})"
                parts.append(text if step == 1 else f"{text} * {self.params.size(step)}")
        return " + ".join(parts) or "0"

    def _runs(self, axes: Sequence[int], strides: Sequence[Size]) -> list[list[int]]:
        runs: list[list[int]] = []
        for axis in axes:
            if runs:
                last = runs[-1][-1]
                if strides[last] == simplify(strides[axis] * self.program.axes[axis]):
                    runs[-1].append(axis)
                    continue
            runs.append([axis])
        return runs


def kinds(reduce: Reduce, dtype: str) -> list[tuple[str, str]]:
    """(identity, dtype) of the accumulators of a reduction of values of a dtype."""
    whole = dtype not in ("float32", "bfloat16", "float16")
    if reduce.kind in ("sum", "mean"):
        return [("0", "tl.int64" if whole else "tl.float32")]
    if reduce.kind == "prod":
        return [("1", "tl.int64" if whole else "tl.float32")]
    if reduce.kind in ("any", "all"):
        return [("0" if reduce.kind == "any" else "1", "tl.int32")]
    if reduce.kind in ("var", "var_mean"):
        return [("0", "tl.float32")] * 3
    low = 'float("-inf")' if reduce.kind in ("max", "argmax") else 'float("inf")'
    if whole:
        low = str(-(2**62)) if reduce.kind in ("max", "argmax") else str(2**62)
    held = "tl.int64" if whole else "tl.float32"
    return [(low, held), (str(2**31 - 1), "tl.int32")] if reduce.kind.startswith("arg") else [(low, held)]


def joined(reduce: Reduce, names: Sequence[str], values: Sequence[str]) -> list[str]:
    """Statements that take values into accumulators of the same shape."""
    kind, name, value = reduce.kind, names[0], values[0]
    if kind in ("sum", "mean"):
        return [f"{name} += {value}"]
    if kind == "prod":
        return [f"{name} = {name} * {value}"]
    if kind in ("any", "all", "max", "min"):
        call = "kv_max" if kind in ("any", "max") else "kv_min"
        if kind in ("any", "all"):
            call = f"tl.{call[3:]}imum"
        return [f"{name} = {call}({name}, {value})"]
    call = "kv_first_max" if kind == "argmax" else "kv_first_min"
    return [f"{names[0]}, {names[1]} = {call}({names[0]}, {names[1]}, {values[0]}, {values[1]})"]


def finished(reduce: Reduce, names: Sequence[str], out: str, axis: int = 1) -> list[str]:
    """Statements that reduce accumulators along an axis to `out` (for arg kinds also `out`_at)."""
    kind, name = reduce.kind, names[0]
    if kind in ("sum", "mean"):
        return [f"{out} = tl.sum({name}, {axis}, keep_dims=True)"]
    if kind in ("any", "all"):
        return [f"{out} = tl.{'max' if kind == 'any' else 'min'}({name}, {axis}, keep_dims=True)"]
    if kind.startswith("arg"):
        call = "kv_first_max" if kind == "argmax" else "kv_first_min"
        return [f"{out}, {out}_at = tl.reduce(({name}, {names[1]}), {axis}, {call}, keep_dims=True)"]
    call = {"prod": "kv_mul", "max": "kv_max", "min": "kv_min"}[kind]
    return [f"{out} = tl.reduce({name}, {axis}, {call}, keep_dims=True)"]
