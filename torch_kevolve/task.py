"""Task: what must be computed, and nothing about how.

A `TaskGraph` is a straight-line program of ATen operators in canonical form: inputs and operators are numbered in
the order of a depth-first walk from the outputs, symbols are renamed `s0, s1, ...` in the order in which the inputs
show them, arguments are filled in from the operator's schema with trailing defaults dropped. Node names, paths and
the order of independent operators leave no trace, so equal work has an equal key in every process and torch version.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

from torch_kevolve.errors import TaskError
from torch_kevolve.sizes import Json, Size, Symbol, decode, encode, evaluate, numel, symbol

FORM = 1
"""Version of the canonical form: a change of it changes every key."""

DTYPE_BYTES: dict[str, int] = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
FLOATS = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: dtype name without `torch.`, sizes, strides in elements, byte alignment of its start.

    `frozen`: a weight that does not change between calls. `low`, `high`: closed bounds of an index input, if known.
    """

    dtype: str
    shape: tuple[Size, ...]
    strides: tuple[Size, ...]
    frozen: bool = False
    low: int | None = None
    high: Size | None = None

    @property
    def numel(self) -> Size:
        return numel(self.shape)

    @property
    def nbytes(self) -> Size:
        return self.numel * DTYPE_BYTES[self.dtype]

    def to_json(self) -> Json:
        out: dict[str, Json] = {
            "dtype": self.dtype,
            "shape": [encode(s) for s in self.shape],
            "strides": [encode(s) for s in self.strides],
        }
        if self.frozen:
            out["frozen"] = True
        if self.low is not None:
            out["low"] = self.low
        if self.high is not None:
            out["high"] = encode(self.high)
        return out

    @classmethod
    def from_json(cls, data: Json) -> TensorSpec:
        if data["dtype"] not in DTYPE_BYTES:
            raise TaskError(detail=f"dtype {data['dtype']!r} is not supported")
        return cls(
            dtype=data["dtype"],
            shape=tuple(decode(s) for s in data["shape"]),
            strides=tuple(decode(s) for s in data["strides"]),
            frozen=bool(data.get("frozen", False)),
            low=data.get("low"),
            high=None if data.get("high") is None else decode(data["high"]),
        )


@dataclass(frozen=True)
class Ref:
    """A value of the graph: input `index` if below the number of inputs, else output `item` of an operator."""

    index: int
    item: int = 0


@dataclass(frozen=True)
class DType:
    """A dtype as an operator's argument, by name."""

    name: str


Arg: TypeAlias = "Ref | DType | Size | float | bool | str | tuple[Arg, ...] | None"


@dataclass(frozen=True)
class Op:
    """One operator. `target` is `aten.mul.Tensor`; `outs` are its results (several for var_mean and the like).

    `written`: a cast that the program asked for (it rounds in the reference); a cast that a decomposition put in
    is `False` (it is the identity there).
    """

    target: str
    args: tuple[Arg, ...]
    outs: tuple[TensorSpec, ...]
    kwargs: tuple[tuple[str, Arg], ...] = ()
    written: bool = False

    def refs(self) -> Iterable[Ref]:
        """All values that the operator reads, in the order of its arguments."""
        yield from _refs(self.args)
        yield from _refs(tuple(value for _, value in self.kwargs))


@dataclass(frozen=True)
class TaskGraph:
    """Inputs, operators in execution order, outputs. Value `i` is input `i`, or operator `i - len(inputs)`."""

    inputs: tuple[TensorSpec, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Ref, ...]

    def spec(self, ref: Ref) -> TensorSpec:
        if ref.index < len(self.inputs):
            return self.inputs[ref.index]
        return self.ops[ref.index - len(self.inputs)].outs[ref.item]

    @property
    def output_specs(self) -> tuple[TensorSpec, ...]:
        return tuple(self.spec(ref) for ref in self.outputs)

    def op(self, ref: Ref) -> Op | None:
        """The operator that makes a value; None for an input."""
        place = ref.index - len(self.inputs)
        return None if place < 0 else self.ops[place]

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(op.target for op in self.ops)

    def to_json(self) -> Json:
        ops = []
        for op in self.ops:
            row: dict[str, Json] = {
                "op": op.target,
                "args": [_encode_arg(a) for a in op.args],
                "outs": [spec.to_json() for spec in op.outs],
            }
            if op.kwargs:
                row["kwargs"] = {name: _encode_arg(a) for name, a in op.kwargs}
            if op.written:
                row["written"] = True
            ops.append(row)
        return {
            "inputs": [spec.to_json() for spec in self.inputs],
            "ops": ops,
            "outputs": [[ref.index, ref.item] for ref in self.outputs],
        }

    @classmethod
    def from_json(cls, data: Json) -> TaskGraph:
        """Raises TaskError for a text that is no graph."""
        try:
            graph = cls(
                inputs=tuple(TensorSpec.from_json(row) for row in data["inputs"]),
                ops=tuple(
                    Op(
                        target=row["op"],
                        args=tuple(_decode_arg(a) for a in row["args"]),
                        outs=tuple(TensorSpec.from_json(spec) for spec in row["outs"]),
                        kwargs=tuple((name, _decode_arg(a)) for name, a in sorted(row.get("kwargs", {}).items())),
                        written=bool(row.get("written", False)),
                    )
                    for row in data["ops"]
                ),
                outputs=tuple(Ref(int(i), int(item)) for i, item in data["outputs"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise TaskError(detail=f"cannot be read: {error!r}") from None
        graph.check()
        return graph

    def check(self) -> None:
        """Raises TaskError unless every value is made before it is read and no target leaves ATen and prims."""
        for place, op in enumerate(self.ops):
            if not op.target.startswith(("aten.", "prims.")):
                raise TaskError(detail=f"operator {op.target!r} is neither aten nor prims")
            for ref in op.refs():
                self._check_ref(ref, len(self.inputs) + place)
        for ref in self.outputs:
            self._check_ref(ref, len(self.inputs) + len(self.ops))

    def _check_ref(self, ref: Ref, limit: int) -> None:
        if not 0 <= ref.index < limit or ref.item < 0:
            raise TaskError(detail=f"value {ref} is read before it is made")
        made = self.op(ref)
        if ref.item >= (1 if made is None else len(made.outs)):
            raise TaskError(detail=f"value {ref} does not exist")


@dataclass(frozen=True)
class KernelTask:
    """A graph with its symbols' ranges, numerics level and flags. The content of `key`, except for `twin`.

    `flags`: torch switches that change what is right (`deterministic`, `tf32`, `bf16_reduction`), by name.
    `twin`: the same inputs and outputs in the library operators that eager calls. It says how a kernel is judged,
    not what it computes, so it is not in the key; None where no twin could be proven.
    No device, path or node name is in a task.
    """

    graph: TaskGraph
    symbols: tuple[Symbol, ...] = ()
    numerics: str = "default"
    flags: tuple[tuple[str, str], ...] = ()
    twin: TaskGraph | None = field(default=None, compare=False)

    def to_json(self, twin: bool = True) -> Json:
        out: dict[str, Json] = {
            "form": FORM,
            "graph": self.graph.to_json(),
            "symbols": [[s.name, s.lo, s.hi] for s in self.symbols],
            "numerics": self.numerics,
            "flags": dict(self.flags),
        }
        if twin:
            out["twin"] = None if self.twin is None else self.twin.to_json()
        return out

    @classmethod
    def from_json(cls, data: Json) -> KernelTask:
        """Raises TaskError for a text that is no task or is of another form."""
        if not isinstance(data, dict) or data.get("form") != FORM:
            raise TaskError(detail=f"form {data.get('form') if isinstance(data, dict) else data!r} is not {FORM}")
        twin = data.get("twin")
        return cls(
            graph=TaskGraph.from_json(data["graph"]),
            symbols=tuple(Symbol(name, lo, hi) for name, lo, hi in data["symbols"]),
            numerics=data["numerics"],
            flags=tuple(sorted(data["flags"].items())),
            twin=None if twin is None else TaskGraph.from_json(twin),
        )

    @cached_property
    def key(self) -> str:
        """sha256 of the canonical JSON, 64 hex digits. The screen shows 12."""
        return digest(self.to_json(twin=False))

    def at(self, binding: Mapping[str, int]) -> KernelTask:
        """The task with numbers for its symbols."""
        if not self.symbols:
            return self
        twin = None if self.twin is None else _bind_graph(self.twin, binding)
        return replace(self, graph=_bind_graph(self.graph, binding), symbols=(), twin=twin)

    @property
    def hint(self) -> dict[str, int]:
        """A middling size for every symbol, where no real one is known."""
        return {s.name: max(s.lo, min(s.upper, 64)) for s in self.symbols}


def digest(data: Json) -> str:
    """sha256, in hex, of the canonical JSON of plain data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def canonical(graph: TaskGraph) -> tuple[TaskGraph, tuple[int, ...], dict[str, str]]:
    """The canonical form of a graph, the old index of each of its inputs, and the new name of each symbol.

    Dead inputs and operators are dropped; the order of the outputs is kept (a caller that is free to choose sorts
    them first). Numbering: depth first from the outputs, arguments left to right.
    """
    order: list[int] = []
    inputs: list[int] = []
    seen: set[int] = set()
    base = len(graph.inputs)
    for out in graph.outputs:
        _visit(graph, out.index, seen, inputs, order)
    names: dict[str, str] = {}
    for index in inputs:
        shown = graph.inputs[index]
        for each in (*shown.shape, *shown.strides):
            for name in _symbol_names(each):
                names.setdefault(name, f"s{len(names)}")
    place = {old: new for new, old in enumerate(inputs)}
    place.update({old: len(inputs) + new for new, old in enumerate(order)})
    table = {symbol(old): symbol(new) for old, new in names.items()}

    def size(value: Size) -> Size:
        return value if isinstance(value, int) else value.xreplace(table)

    def spec(s: TensorSpec) -> TensorSpec:
        high = None if s.high is None else size(s.high)
        return replace(s, shape=tuple(map(size, s.shape)), strides=tuple(map(size, s.strides)), high=high)

    def arg(value: Arg) -> Arg:
        if isinstance(value, Ref):
            return Ref(place[value.index], value.item)
        if isinstance(value, tuple):
            return tuple(arg(each) for each in value)
        return size(value) if _is_expr(value) else value  # type: ignore[arg-type]

    ops = []
    for old in order:
        op = graph.ops[old - base]
        kwargs = tuple(sorted((name, arg(value)) for name, value in op.kwargs))
        ops.append(replace(op, args=tuple(map(arg, op.args)), kwargs=kwargs, outs=tuple(map(spec, op.outs))))
    made = TaskGraph(
        inputs=tuple(spec(graph.inputs[index]) for index in inputs),
        ops=tuple(ops),
        outputs=tuple(Ref(place[ref.index], ref.item) for ref in graph.outputs),
    )
    return made, tuple(inputs), names


def _visit(graph: TaskGraph, start: int, seen: set[int], inputs: list[int], order: list[int]) -> None:
    # A stack of its own: unrolled loops make chains longer than Python's recursion limit.
    stack = [(start, False)]
    while stack:
        index, done = stack.pop()
        if done:
            order.append(index)
            continue
        if index in seen:
            continue
        seen.add(index)
        if index < len(graph.inputs):
            inputs.append(index)
            continue
        stack.append((index, True))
        reads = list(graph.ops[index - len(graph.inputs)].refs())
        stack.extend((ref.index, False) for ref in reversed(reads))


def _bind_graph(graph: TaskGraph, binding: Mapping[str, int]) -> TaskGraph:
    def spec(s: TensorSpec) -> TensorSpec:
        high = None if s.high is None else evaluate(s.high, binding)
        shape = tuple(evaluate(x, binding) for x in s.shape)
        return replace(s, shape=shape, strides=tuple(evaluate(x, binding) for x in s.strides), high=high)

    def arg(value: Arg) -> Arg:
        if isinstance(value, tuple):
            return tuple(arg(each) for each in value)
        return evaluate(value, binding) if _is_expr(value) else value  # type: ignore[arg-type]

    ops = tuple(
        replace(
            op,
            args=tuple(map(arg, op.args)),
            kwargs=tuple((name, arg(value)) for name, value in op.kwargs),
            outs=tuple(map(spec, op.outs)),
        )
        for op in graph.ops
    )
    return TaskGraph(inputs=tuple(map(spec, graph.inputs)), ops=ops, outputs=graph.outputs)


def _is_expr(value: object) -> bool:
    import sympy

    return isinstance(value, sympy.Expr)


def _symbol_names(size: Size) -> list[str]:
    return [] if isinstance(size, int) else sorted(s.name for s in size.free_symbols)


def _refs(args: tuple[Arg, ...]) -> Iterable[Ref]:
    for arg in args:
        if isinstance(arg, Ref):
            yield arg
        elif isinstance(arg, tuple):
            yield from _refs(arg)


def _encode_arg(arg: Arg) -> Json:
    if isinstance(arg, Ref):
        return {"v": arg.index} if arg.item == 0 else {"v": arg.index, "item": arg.item}
    if isinstance(arg, DType):
        return {"dtype": arg.name}
    if isinstance(arg, tuple):
        return [_encode_arg(each) for each in arg]
    if isinstance(arg, float):
        # JSON has no inf and nan; the text form of a float is exact.
        return {"f": repr(arg)}
    if _is_expr(arg):
        return {"size": encode(arg)}  # type: ignore[arg-type]
    return arg


def _decode_arg(data: Json) -> Arg:
    if isinstance(data, list):
        return tuple(_decode_arg(each) for each in data)
    if isinstance(data, dict):
        if "v" in data:
            return Ref(int(data["v"]), int(data.get("item", 0)))
        if "dtype" in data:
            return DType(str(data["dtype"]))
        if "f" in data:
            return float(data["f"])
        return decode(data["size"])
    if data is None or isinstance(data, bool | int | str):
        return data
    raise TaskError(detail=f"{data!r} is no argument")
