"""Column writer: the C++ body of a row program, reduced axes outside.

The innermost axis is not reduced: its elements are the lanes. A strip of U vectors walks down the reduced axes once per
stage; all reductions that need nothing of each other share a stage. Row values are vectors too, one per u. With PIECES
above 1 the threads share the rows of a strip: where there are few columns, strips are too few or too narrow for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch_kevolve.sizes import Size, numel, simplify
from torch_kevolve.task import Op, Ref
from torch_kevolve.templates.column_sums import Part, finish, held_by, join, parts_of, start, step
from torch_kevolve.templates.cpp_text import Unwritable, held, size_text
from torch_kevolve.templates.expr import Term, express, kind_of
from torch_kevolve.templates.rows import GATHER, IOTA, REDUCTIONS, VIEWS, Output, RowProgram

SMALL = 16384
"""Elements below which a second thread costs more than it brings."""


class ColumnWriter:
    """Writes one body. An element value is `v7`, a row value `v7[u]`, a value that is one for all lanes `v7`."""

    def __init__(self, program: RowProgram, lanes: int, point: Mapping[str, Any]) -> None:
        self.program, self.graph, self.lanes = program, program.graph, lanes
        self.base = len(self.graph.inputs)
        self.lane = len(program.axes) - 1
        self.unroll, self.block, self.stream = int(point["U"]), int(point["BLOCK"]), bool(point["NT"])
        self.pieces = int(point["PIECES"])
        self.stages = _stages(program)
        self.lines: list[str] = []
        self.made: set[int] = set()
        self.u, self.tail = 1, ""

    @staticmethod
    def splits(program: RowProgram) -> bool:
        """Whether the rows can be shared: all reductions are made in one walk, and no element is written."""
        return len(_stages(program)) == 1 and all(program.level(out.ref.index) == "row" for out in program.outputs)

    def text(self) -> str:
        """The body. Raises Unwritable."""
        program = self.program
        outer = [a for a in program.parallel if a != self.lane]
        self._values([i for i in range(self.base + len(self.graph.ops)) if program.level(i) == "scalar"])
        wide, inner = self.unroll * self.lanes, size_text(program.axes[self.lane])
        total = size_text(simplify(numel(program.axes)))
        self.lines += [
            f"const int64_t inner = {inner}, strips = (inner + {wide - 1}) / {wide};",
            f"const int64_t outer = {size_text(numel(program.axes[a] for a in outer))};",
            f"const bool many = {total} > {SMALL}; (void)many;",
            *(["#pragma omp parallel for schedule(static) if (many)"] if self.pieces == 1 else []),
            "for (int64_t t = 0; t < outer * strips; t++) {",
            f"int64_t rest = t / strips, from = t % strips * {wide}; (void)rest;",
            f"const int64_t end = from + {wide} < inner ? from + {wide} : inner;",
        ]
        for axis in reversed(outer):
            size = size_text(program.axes[axis])
            self.lines.append(f"const int64_t i{axis} = rest % ({size}); rest /= ({size}); (void)i{axis};")
        self._variant(f"if (from + {wide} <= end)", self.unroll, "")
        if self.unroll > 1:
            self._variant(f"for (; from + {self.lanes} <= end; from += {self.lanes})", 1, "")
        self._variant("if (from < end)", 1, "n")
        self.lines += ["kv::fence();"] if self.stream else []
        return "\n".join([*self.lines, "}"]) + "\n"

    def _variant(self, condition: str, u: int, tail: str) -> None:
        """The whole work of `u` vectors of columns from column `from`."""
        keep, self.u, self.tail = self.made.copy(), u, tail
        self.lines.append(f"{condition} {{")
        self.lines += ["const int n = (int)(end - from);"] if tail else []
        for parts in self.stages:
            self._stage(parts)
        rows = [out for out in self.program.outputs if self.program.level(out.ref.index) == "row"]
        elements = [out for out in self.program.outputs if self.program.level(out.ref.index) == "element"]
        wanted = self._needs([out.ref.index for out in self.program.outputs])
        self._values([i for i in wanted if self.program.level(i) != "element"])
        for out in rows:
            if self.lane in self.program.varies[out.ref.index]:
                self._over_u(self._store(out))
            else:
                self.lines.append(f"kv::store_one(y{out.place} + {self._address(out.strides)}, {self._name(out.ref)});")
        if elements:
            inside = [line for i in self._needs([o.ref.index for o in elements]) for line in self._element(i)]
            self._walk([*inside, *(line for out in elements for line in self._store(out))])
        # The strip with all vectors is done here: nothing is left for the narrower loops.
        self.lines += ["from = end;"] if u == self.unroll and not tail and u > 1 else []
        self.lines += [f"from += {self.lanes};"] if u == self.unroll and not tail and u == 1 else []
        self.lines.append("}")
        self.made = keep

    def _stage(self, parts: Sequence[Part]) -> None:
        """One walk for reductions that need nothing of each other."""
        sources = self._needs([part.reduce.source.index for part in parts])
        self._values([i for i in sources if self.program.level(i) != "element"])
        for part in parts:
            numbers = kind_of(self._kind(part.reduce.source)) == "float" or part.kind in ("sum", "any", "all")
            if not numbers or self.lane not in self.program.varies[part.reduce.source.index]:
                raise Unwritable
            self.lines += start(part, self._kind(part.reduce.source), self.u)
        inside = [line for i in sources for line in self._element(i)]
        axis = self.program.reduced[-1]
        flush: list[str] = []
        for part in parts:
            lines, after = step(part, self._kind(part.reduce.source), self._name(part.reduce.source), axis)
            inside += lines
            flush += after
        if self.pieces == 1:
            self._walk(inside, flush)
        else:
            self._shared(parts, inside, flush)
        for part in parts:
            op = self.graph.ops[part.reduce.op]
            result, dtype, count = f"v{self.base + part.reduce.op}", op.outs[0].dtype, size_text(part.reduce.count)
            self.lines += finish(part, self._kind(part.reduce.source), result, dtype, self.u, count)
            if part.last:
                self.made.add(self.base + part.reduce.op)

    def _shared(self, parts: Sequence[Part], inside: Sequence[str], flush: Sequence[str]) -> None:
        """The walk in PIECES of the first reduced axis, one for a thread; then their values joined in order."""
        kinds = {part: self._kind(part.reduce.source) for part in parts}
        kept = [each for part in parts for each in held_by(part, kinds[part])]
        size = size_text(self.program.axes[self.program.reduced[0]])
        self.lines += [f"{kind} {name}_all[{self.pieces * self.u}];" for kind, name in kept]
        self.lines += [
            "#pragma omp parallel for schedule(static) if (many)",
            f"for (int64_t piece = 0; piece < {self.pieces}; piece++) {{",
            f"const int64_t first = ({size}) * piece / {self.pieces}, past = ({size}) * (piece + 1) / {self.pieces};",
        ]
        for part in parts:
            self.lines += start(part, kinds[part], self.u)
        self._walk(inside, flush, ("first", "past"))
        self._over_u([f"{name}_all[piece * {self.u} + u] = {name}[u];" for _, name in kept])
        self.lines += ["}", f"for (int64_t piece = 0; piece < {self.pieces}; piece++)"]
        self._over_u([line for part in parts for line in join(part, kinds[part], f"piece * {self.u} + u")])

    def _walk(self, inside: Sequence[str], flush: Sequence[str] = (), part: tuple[str, str] | None = None) -> None:
        """Loops over the reduced axes around a loop over the vectors; `flush` every BLOCK steps. `part`: where the walk
        over the first reduced axis begins and ends."""
        *outer, last = self.program.reduced
        ends = {axis: ("0", f"({size_text(self.program.axes[axis])})") for axis in self.program.reduced}
        ends[self.program.reduced[0]] = part or ends[self.program.reduced[0]]
        for axis in outer:
            self.lines.append(f"for (int64_t c{axis} = {ends[axis][0]}; c{axis} < {ends[axis][1]}; c{axis}++) {{")
        begin, size = ends[last]
        if flush:
            self.lines += [
                f"for (int64_t block = {begin}; block < {size}; block += {self.block}) {{",
                f"const int64_t stop = block + {self.block} < {size} ? block + {self.block} : {size};",
                f"for (int64_t c{last} = block; c{last} < stop; c{last}++)",
            ]
        else:
            self.lines.append(f"for (int64_t c{last} = {begin}; c{last} < {size}; c{last}++)")
        self._over_u(inside)
        if flush:
            self._over_u(flush)
            self.lines.append("}")
        self.lines.append("}" * len(outer))

    def _over_u(self, inside: Sequence[str]) -> None:
        lanes = f"const int64_t i{self.lane} = from + u * {self.lanes}; (void)i{self.lane};"
        self.lines += [
            "{",
            f"#pragma GCC unroll {self.u}",
            f"for (int u = 0; u < {self.u}; u++) {{ {lanes}",
            *inside,
            "} }",
        ]

    # Values

    def _needs(self, wanted: Iterable[int]) -> list[int]:
        return sorted(i for i in closure(self.program, wanted, self.made) if i not in self.made)

    def _values(self, indices: Iterable[int]) -> None:
        """Write values above the element level, in order; those behind a reduction that is not there yet wait."""
        for index in sorted(indices):
            if index in self.made or self._waits(index):
                continue
            text = self._text(index)
            if text is None:
                continue
            dtype = self._dtype(index)
            if self.lane in self.program.varies[index]:
                self.lines.append(f"{held(dtype)} v{index}[{self.u}];")
                self._over_u([f"v{index}[u] = {text};"])
            else:
                self.lines.append(f"const {held(dtype)} v{index} = {text};")
            self.made.add(index)

    def _waits(self, index: int) -> bool:
        """Whether a value hangs on a reduction that is not written yet, or is one."""
        if index < self.base:
            return self.program.level(index) == "element"
        op = self.graph.ops[index - self.base]
        if op.target in REDUCTIONS:
            return True
        return any(ref.index not in self.made and self._waits(ref.index) for ref in op.refs())

    def _element(self, index: int) -> list[str]:
        if self.program.level(index) != "element":
            return []
        text = self._text(index)
        return [] if text is None else [f"const {held(self._dtype(index))} v{index} = {text};"]

    def _text(self, index: int) -> str | None:
        """The expression of a value at the loops' coordinates; None for a reduction."""
        if index < self.base:
            load = self.program.loads[index]
            where = f"x{index} + {self._address(load.strides)}"
            step = load.strides[self.lane]
            if step == 0:
                return f"kv::load_one({where})"
            if step != 1:
                return f"kv::load_step({where}, {size_text(step)}, {self.tail or 'kv::L'})"
            return f"kv::load_n({where}, n)" if self.tail else f"kv::load({where})"
        op = self.graph.ops[index - self.base]
        if op.target in REDUCTIONS:
            return None
        if op.target in VIEWS:
            ref = op.args[0]
            assert isinstance(ref, Ref)
            return self._name(ref)
        if op.target == IOTA:
            return self._iota(op, index)
        if op.target == GATHER:
            raise Unwritable
        term = express(op, lambda ref: Term(self._name(ref), self.graph.spec(ref).dtype), "cpp")
        if term is None:
            raise Unwritable
        return term.text

    def _iota(self, op: Op, index: int) -> str:
        kwargs = dict(op.kwargs)
        first, by = kwargs.get("start", 0), kwargs.get("step", 1)
        axes = self.program.varies[index]
        if (
            len(axes) != 1
            or not isinstance(first, int)
            or not isinstance(by, int)
            or op.outs[0].dtype not in ("int64", "int32")
        ):
            raise Unwritable
        (axis,) = axes
        if axis == self.lane:
            return f"kv::vi::seq(i{axis}) * kv::vi((int64_t){by}) + kv::vi((int64_t){first})"
        return f"kv::vi((int64_t)({first} + {by} * {self._coordinate(axis)}))"

    def _store(self, out: Output) -> list[str]:
        where, name = f"y{out.place} + {self._address(out.strides)}", self._name(out.ref)
        step = out.strides[self.lane]
        if step != 1:
            return [f"kv::store_step({where}, {size_text(step)}, {name}, {self.tail or 'kv::L'});"]
        if self.tail:
            return [f"kv::store_n({where}, {name}, n);"]
        call = "stream" if self.stream and out.dtype == "float32" else "store"
        return [f"kv::{call}({where}, {name});"]

    def _address(self, strides: Sequence[Size]) -> str:
        words = [f"{self._coordinate(a)} * ({size_text(s)})" for a, s in enumerate(strides) if s != 0]
        return " + ".join(words) or "0"

    def _coordinate(self, axis: int) -> str:
        return f"c{axis}" if axis in self.program.reduced else f"i{axis}"

    def _name(self, ref: Ref) -> str:
        name = f"v{ref.index}" if ref.item == 0 else f"v{ref.index}_{ref.item}"
        row = self.program.level(ref.index) == "row" and self.lane in self.program.varies[ref.index]
        return f"{name}[u]" if row else name

    def _kind(self, ref: Ref) -> str:
        return self.graph.spec(ref).dtype

    def _dtype(self, index: int) -> str:
        return self.graph.spec(Ref(index)).dtype


def closure(program: RowProgram, wanted: Iterable[int], stop: set[int]) -> set[int]:
    """All values that these need, themselves included; nothing behind one in `stop` or behind a reduction."""
    base, seen, stack = len(program.graph.inputs), set[int](), list(wanted)
    while stack:
        index = stack.pop()
        if index in seen or index in stop:
            continue
        seen.add(index)
        if index >= base and program.graph.ops[index - base].target not in REDUCTIONS:
            stack.extend(ref.index for ref in program.graph.ops[index - base].refs())
    return seen


def _stages(program: RowProgram) -> list[list[Part]]:
    """Parts of reductions by the walk in which they can be done."""
    base = len(program.graph.inputs)
    walk: dict[int, int] = {}
    out: list[list[Part]] = []
    for reduce in program.reduces:
        behind = closure(program, [reduce.source.index], set())
        first = max((walk[i] + 1 for i in behind if i in walk), default=0)
        for number, part in enumerate(parts_of(reduce)):
            while len(out) <= first + number:
                out.append([])
            out[first + number].append(part)
            walk[base + reduce.op] = first + number
    return out
