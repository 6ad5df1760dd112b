"""Row writer: the C++ body of a row program, reduced axes innermost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch_kevolve.sizes import Size
from torch_kevolve.task import Op, Ref
from torch_kevolve.templates.cpp_text import Unwritable, held, size_text, statement
from torch_kevolve.templates.expr import INTS, Term
from torch_kevolve.templates.rows import GATHER, IOTA, REDUCTIONS, VIEWS, Output, Reduce, RowProgram

START = {"sum": "0.0f", "mean": "0.0f", "var": "0.0f", "var_mean": "0.0f", "max": "-__builtin_inff()",
         "min": "__builtin_inff()",          "prod": "1.0f"}  # fmt: skip
SMALL = 16384
"""Elements below which a second thread costs more than it brings (OpenMP's fork and join is about 5 us)."""


class RowWriter:
    """Writes one body. Values are named `v<index>` (`_<item>` for further results), the same at every level."""

    def __init__(self, program: RowProgram, lanes: int, point: Mapping[str, Any]) -> None:
        self.program, self.graph = program, program.graph
        self.base = len(self.graph.inputs)
        self.lanes, self.unroll, self.block = lanes, int(point["U"]), int(point["BLOCK"])
        self.stream = bool(point["NT"])
        self.stash = self._stash_of(program) if point["STASH"] else None
        # Once it is filled, later passes load the stash instead of computing the value again.
        self.stashed = False
        self.lines: list[str] = []
        self.made: set[int] = set()

    @staticmethod
    def can_stash(program: RowProgram) -> bool:
        return RowWriter._stash_of(program) is not None

    @staticmethod
    def source(program: RowProgram, lanes: int, point: Mapping[str, Any]) -> str | None:
        """The body, or None where some value has no C++ text."""
        try:
            return RowWriter(program, lanes, point).write()
        except Unwritable:
            return None

    @staticmethod
    def _stash_of(program: RowProgram) -> int | None:
        """The element value of the last per-row reduction, when an output needs it again and it is worth keeping."""
        last = [r for r in program.reduces if not r.final]
        if not last:
            return None
        index = last[-1].source.index
        base = len(program.graph.inputs)
        if index < base or program.graph.ops[index - base].outs[0].dtype != "float32":
            return None
        needed: set[int] = set()
        for out in program.outputs:
            if program.level(out.ref.index) == "element":
                needed |= _closure(program, [out.ref.index], stop=set())
        return index if index in needed and len(program.reduced) == 1 else None

    def write(self) -> str:
        program = self.program
        rows = size_text(program.rows)
        self._scalars_before()
        before = self.made.copy()
        self.lines.append(f"const int64_t rows = {rows};")
        total = f"rows * ({size_text(program.row_size)})"
        self.lines.append(f"#pragma omp parallel if ({total} > {SMALL})")
        self.lines.append("{")
        if self.stash is not None:
            size = size_text(program.row_size)
            self.lines.append(f"float* stash = (float*)aligned_alloc(64, (({size}) * 4 + 127) / 64 * 64);")
        self.lines.append("#pragma omp for schedule(static)")
        self.lines.append("for (int64_t r = 0; r < rows; r++) {")
        self._coordinates()
        for reduce in program.reduces:
            if not reduce.final:
                self._rows_for([reduce.source.index])
                self._reduce(reduce)
        outs = [o for o in program.outputs if program.level(o.ref.index) == "element"]
        for out in program.outputs:
            if program.level(out.ref.index) == "row":
                self._rows_for([out.ref.index])
                self.lines.append(f"kv::store_one(y{out.place} + {self._offset(out.strides)}, {self._name(out.ref)});")
        if outs:
            self._rows_for([o.ref.index for o in outs])
            self._elements(outs)
        for reduce in program.reduces:
            if reduce.final:
                self._rows_for([reduce.source.index])
                self._keep(reduce)
        self.lines.append("}")
        if self.stream:
            self.lines.append("kv::fence();")
        if self.stash is not None:
            self.lines.append("free(stash);")
        self.lines.append("}")
        self.made = before
        self._after()
        return "\n".join(self.lines) + "\n"

    # Levels above the element

    def _scalars_before(self) -> None:
        """Values that vary over no axis and need no final reduction: once, before the rows."""
        finals = {self.base + r.op for r in self.program.reduces if r.final}
        for index in range(self.base + len(self.graph.ops)):
            if self.program.level(index) == "scalar":
                needs = _closure(self.program, [index], stop=set())
                if not needs & finals and all(self.program.level(n) == "scalar" for n in needs):
                    self._one(index)

    def _coordinates(self) -> None:
        axes = self.program.parallel
        self.lines.append("int64_t rest = r; (void)rest;")
        for place, axis in enumerate(reversed(axes)):
            if place == len(axes) - 1:
                self.lines.append(f"const int64_t i{axis} = rest; (void)i{axis};")
            else:
                size = size_text(self.program.axes[axis])
                self.lines.append(f"const int64_t i{axis} = rest % ({size}); rest /= ({size}); (void)i{axis};")

    def _rows_for(self, wanted: Iterable[int]) -> None:
        """Write the row values that these values need and that are not there yet."""
        needs = _closure(self.program, list(wanted), stop=self.made)
        for index in sorted(needs):
            if index not in self.made and self.program.level(index) != "element":
                self._one(index)

    def _one(self, index: int) -> None:
        """Write one value that does not vary along the row."""
        if index in self.made:
            return
        self.made.add(index)
        if index < self.base:
            load = self.program.loads[index]
            self.lines.append(f"const auto v{index} = kv::load_one(x{index} + {self._offset(load.strides)});")
            return
        op = self.graph.ops[index - self.base]
        if op.target == GATHER:
            self._gather(op, index)
        elif op.target in VIEWS:
            self.lines.append(f"const auto v{index} = {self._name(_source(op))};")
        elif op.target == IOTA:
            self.lines.append(f"const kv::vi v{index} = kv::vi({self._iota(op, index)});")
        elif op.target not in REDUCTIONS:
            self.lines.append(self._pointwise(op, index))

    def _gather(self, op: Op, index: int) -> None:
        """The row's expression at one place. An index outside the row is clamped: eager raises there."""
        source, target = _source(op), op.args[2]
        assert isinstance(target, Ref)
        axis = self.program.reduced[0]
        size = size_text(self.program.axes[axis])
        self.lines.append(f"int64_t g{index} = {self._name(target)}.v[0];")
        self.lines.append(f"g{index} = g{index} < 0 ? 0 : g{index} >= ({size}) ? ({size}) - 1 : g{index};")
        needs = _closure(self.program, [source.index], stop=self.made)
        for row in sorted(needs):
            if row not in self.made and self.program.level(row) != "element":
                self._one(row)
        self.lines.append(f"{held(op.outs[0].dtype)} v{index};")
        self.lines.append("{")
        for each in sorted(needs):
            if self.program.level(each) == "element":
                self._element(each, {axis: f"g{index}"}, tail="one")
        self.lines.append(f"v{index} = {self._name(source)};")
        self.lines.append("}")

    def _after(self) -> None:
        finals = [r for r in self.program.reduces if r.final]
        for reduce in finals:
            index = self.base + reduce.op
            whole = self.graph.ops[reduce.op].outs[0].dtype
            start = {"max": "-__builtin_inf()", "min": "__builtin_inf()"}.get(reduce.kind, "0.0")
            row = f"f{reduce.op}[r]"
            step = {
                "max": f"s{index} = ({row} > s{index} || {row} != {row}) ? {row} : s{index};",
                "min": f"s{index} = ({row} < s{index} || {row} != {row}) ? {row} : s{index};",
            }.get(reduce.kind, f"s{index} += f{reduce.op}[r];")
            if reduce.kind == "all":
                start, step = "1.0", f"s{index} = s{index} != 0 && f{reduce.op}[r] != 0;"
            self.lines.append(f"double s{index} = {start};")
            self.lines.append(f"for (int64_t r = 0; r < rows; r++) {{ {step} }}")
            value = f"s{index} / (double)({size_text(reduce.count)})" if reduce.kind == "mean" else f"s{index}"
            self.lines.append(f"const {held(whole)} v{index} = {_wrap(whole, value)};")
            self.made.add(index)
        for index in range(self.base, self.base + len(self.graph.ops)):
            if self.program.level(index) == "scalar" and index not in self.made:
                self._one(index)
        for out in self.program.outputs:
            if self.program.level(out.ref.index) == "scalar":
                self.lines.append(f"kv::store_one(y{out.place}, {self._name(out.ref)});")

    def _keep(self, reduce: Reduce) -> None:
        kind = self.graph.spec(reduce.source).dtype
        if kind in INTS and reduce.kind not in ("any", "all"):
            raise Unwritable  # kept per row in fp64, which holds integers to 2^53 only
        name = self._name(reduce.source)
        value = f"(double){name}.v[0]" if kind != "bool" else f"(double)({name}.v[0] != 0)"
        self.lines.append(f"f{reduce.op}[r] = {value};")

    # The element level

    def _reduce(self, reduce: Reduce) -> None:
        index = self.base + reduce.op
        spec = self.graph.spec(reduce.source)
        if reduce.kind in ("argmax", "argmin"):
            self._arg_reduce(reduce, index)
            return
        # Partial sums are fp32: counts of a mask are exact, sums of integers above 2^24 would not be.
        if spec.dtype == "bool" and reduce.kind not in ("sum", "any", "all"):
            raise Unwritable
        if spec.dtype in INTS and reduce.kind not in ("any", "all"):
            raise Unwritable
        # Of var_mean, item 0 is the variance and item 1 the mean.
        for kind in ["mean", "var"] if reduce.kind in ("var_mean", "var") else [reduce.kind]:
            self._one_pass(reduce, index, kind)
        self.made.add(index)

    def _one_pass(self, reduce: Reduce, index: int, kind: str) -> None:
        spec, out = self.graph.spec(reduce.source), self.graph.ops[reduce.op].outs[0].dtype
        u, count = self.unroll, f"(double)({size_text(reduce.count)})"
        summing = kind in ("sum", "mean", "var", "any", "all")
        start = START.get(kind, "0.0f")
        if kind == "var":
            self.lines.append(f"d{index} = kv::dv{{}};")
        else:
            self.lines.append(f"kv::vf a{index}[{u}];")
        self.lines.append(f"for (int u = 0; u < {u}; u++) a{index}[u] = kv::splat({start});")
        if summing:
            self.lines.append("" if kind == "var" else f"kv::dv d{index} = {{}};")

        def step(acc: str, tail: str) -> list[str]:
            value = self._name(reduce.source)
            if spec.dtype == "bool" or spec.dtype not in ("float32", "bfloat16", "float16"):
                value = f"kv::to_float({value})"
            if kind == "all":
                value = f"(kv::vf(1.0f) - {value})"
            if kind == "var":
                value = "kv_c * kv_c; }"
                head = f"{{ kv::vf kv_c = {self._name(reduce.source)} - m{index};"
                if tail:
                    return [f"{head} kv_c = kv::select(kv::first(n), kv_c, kv::vf(0.0f)); {acc} = {acc} + {value}"]
                return [f"{head} {acc} = {acc} + {value}"]
            if tail:
                value = f"kv::select(kv::first(n), {value}, kv::splat({start}))"
            if summing:
                return [f"{acc} = {acc} + {value};"]
            if kind == "prod":
                return [f"{acc} = {acc} * {value};"]
            return [f"{acc} = kv::{kind}_nan({acc}, {value});"]

        flush = f"for (int u = 0; u < {u}; u++) {{ d{index} += kv::wide(a{index}[u]); a{index}[u] = kv::vf(0.0f); }}"
        self._loop([reduce.source.index], step, f"a{index}", flush if summing else "")
        name = f"v{index}"
        if summing:
            total = f"kv::hsum(d{index})"
            if kind in ("any", "all"):
                self.lines.append(
                    f"const kv::vm {name} = {'kv::not_' if kind == 'all' else ''}"
                    f"(kv::ne(kv::vf((float){total}), kv::vf(0.0f)));"
                )
            elif kind == "sum":
                self.lines.append(f"const {held(out)} {name} = {_wrap(out, total)};")
            elif kind == "mean" and reduce.kind == "mean":
                self.lines.append(f"const kv::vf {name} = kv::splat((float)({total} / {count}));")
            elif kind == "mean":
                self.lines.append(f"const double md{index} = {total} / {count};")
                self.lines.append(f"const kv::vf m{index} = kv::splat((float)md{index});")
                if reduce.kind == "var_mean":
                    self.lines.append(f"const kv::vf v{index}_1 = m{index}; (void)v{index}_1;")
            else:
                free = f"({count} - {reduce.correction})"
                self.lines.append(f"const kv::vf {name} = kv::splat((float)({total} / ({free} > 0 ? {free} : 0.0)));")
        elif kind == "prod":
            self.lines.append(f"for (int u = 1; u < {u}; u++) a{index}[0] = a{index}[0] * a{index}[u];")
            self.lines.append(f"float p{index} = 1; for (int k = 0; k < kv::L; k++) p{index} *= a{index}[0].v[k];")
            self.lines.append(f"const kv::vf {name} = kv::splat(p{index});")
        else:
            self.lines.append(f"for (int u = 1; u < {u}; u++) a{index}[0] = kv::{kind}_nan(a{index}[0], a{index}[u]);")
            self.lines.append(f"const kv::vf {name} = kv::splat(kv::h{kind}_nan(a{index}[0]));")

    def _arg_reduce(self, reduce: Reduce, index: int) -> None:
        """The first place of the best value; NaN is best, as in eager."""
        spec = self.graph.spec(reduce.source)
        if spec.dtype not in ("float32", "bfloat16", "float16") or len(self.program.reduced) != 1:
            raise Unwritable
        better = "gt" if reduce.kind == "argmax" else "lt"
        start = START["max" if reduce.kind == "argmax" else "min"]
        self.lines.append(f"kv::vf a{index}[1] = {{kv::splat({start})}}; kv::iv b{index} = kv::iv{{}} + INT32_MAX;")
        axis = self.program.reduced[-1]

        def step(acc: str, tail: str) -> list[str]:
            value = self._name(reduce.source)
            mask = f"kv::or_(kv::{better}({value}, {acc}), kv::and_(kv::ne({value}, {value}), kv::eq({acc}, {acc})))"
            # The very first elements win over the start value even when they equal it.
            mask = f"kv::and_(kv::eq({acc}, {acc}), kv::or_({mask}, kv::vm{{b{index} == INT32_MAX}}))"
            if tail:
                mask = f"kv::and_(kv::first(n), {mask})"
            return [
                f"{{ kv::vm k = {mask}; {acc} = kv::select(k, {value}, {acc});",
                f"kv::iv at; for (int k2 = 0; k2 < kv::L; k2++) at[k2] = (int32_t)c{axis} + k2; "
                f"b{index} = k.v ? at : b{index}; }}",
            ]

        keep, self.unroll = self.unroll, 1
        self._loop([reduce.source.index], step, f"a{index}", "")
        self.unroll = keep
        sign = ">" if reduce.kind == "argmax" else "<"
        self.lines += [
            f"float w{index} = a{index}[0].v[0]; int64_t j{index} = b{index}[0];",
            f"for (int k = 1; k < kv::L; k++) {{ float q = a{index}[0].v[k]; int64_t at = b{index}[k]; "
            "if (at == INT32_MAX) continue;",
            f"bool nq = q != q, nw = w{index} != w{index};",
            f"if ((nq && (!nw || at < j{index})) || (!nq && !nw && (q {sign} w{index} || "
            f"(q == w{index} && at < j{index})))) {{ w{index} = q; j{index} = at; }} }}",
            f"const kv::vi v{index} = kv::vi(j{index});",
        ]
        self.made.add(index)

    def _elements(self, outs: list[Output]) -> None:
        axis = self.program.reduced[-1]

        def step(acc: str, tail: str) -> list[str]:
            rows = []
            for out in outs:
                name = self._name(out.ref)
                where = f"y{out.place} + {self._offset(out.strides)}"
                if out.strides[axis] != 1:
                    raise Unwritable
                if tail:
                    rows.append(f"kv::store_n({where}, {name}, n);")
                else:
                    rows.append(f"kv::{'stream' if self.stream and self._aligned(out) else 'store'}({where}, {name});")
            return rows

        self._loop([o.ref.index for o in outs], step, "", "")

    def _aligned(self, out: Output) -> bool:
        """Streaming stores need whole vectors from an aligned start: every outer stride a multiple of the lanes."""
        axis = self.program.reduced[-1]
        return all(isinstance(s, int) and s % self.lanes == 0 for a, s in enumerate(out.strides) if a != axis)

    def _loop(self, wanted: list[int], step: Any, accumulators: str, flush: str) -> None:
        """Nested loops over the reduced axes; the last one in vectors, unrolled, with a tail."""
        program = self.program
        *outer, last = program.reduced
        needs = sorted(_closure(program, wanted, stop=self.made))
        for axis in outer:
            self.lines.append(f"for (int64_t c{axis} = 0; c{axis} < ({size_text(program.axes[axis])}); c{axis}++) {{")
        inner = [i for i in needs if last in program.varies[i] or i == self.stash]
        hoisted = [i for i in needs if i not in inner and i not in self.made]
        for index in hoisted:
            self._element(index, {}, tail="one")
        size = size_text(program.axes[last])
        width, u = self.lanes, self.unroll if accumulators else 1
        self.lines.append(
            f"const int64_t end = {size}; int64_t c{last} = 0;"
            if outer
            else f"{{ const int64_t end = {size}; int64_t c{last} = 0;"
        )
        if flush:
            reach = u * width * self.block
            self.lines.append(f"while (c{last} + {u * width} <= end) {{")
            self.lines.append(f"const int64_t stop = c{last} + {reach} < end ? c{last} + {reach} : end;")
            self.lines.append(f"for (; c{last} + {u * width} <= stop; ) {{")
        else:
            self.lines.append(f"for (; c{last} + {u * width} <= end; ) {{")
        for number in range(u):
            self.lines.append("{")
            self._elements_at(inner, "")
            self.lines += step(f"{accumulators}[{number}]" if accumulators else "", "")
            self.lines.append(f"}} c{last} += {width};")
        self.lines.append("}")
        if flush:
            self.lines += [flush, "}"]
        self.lines.append(
            f"for (; c{last} < end; c{last} += {width}) {{ "
            f"const int n = end - c{last} < {width} ? (int)(end - c{last}) : {width};"
        )
        self._elements_at(inner, "n")
        self.lines += step(f"{accumulators}[0]" if accumulators else "", "n")
        self.lines.append("}")
        if flush:
            self.lines.append(flush)
        self.lines.append("}" * (len(outer) or 1))
        if self.stash is not None and self.stash in needs:
            self.stashed = True

    def _elements_at(self, needs: list[int], tail: str) -> None:
        last = self.program.reduced[-1]
        kept = self.stash if self.stashed else None
        if kept is not None and kept in needs:
            below = _closure(self.program, [kept], stop=self.made) - {kept}
            others = {index for index in needs if index != kept and index not in below}
            still = _closure(self.program, sorted(others), stop=self.made | {kept})
            needs = [i for i in needs if i in still or i == kept]
        for index in needs:
            if index == kept:
                self.lines.append(f"const kv::vf v{index} = kv::load(stash + c{last});")
            else:
                self._element(index, {}, tail)
        if self.stash is not None and not self.stashed and self.stash in needs:
            self.lines.append(f"kv::store(stash + c{last}, v{self.stash});")

    def _element(self, index: int, at: Mapping[int, str], tail: str) -> None:
        """Write one element value at the loops' coordinates; `tail`: "" a whole vector, "n" a part, "one" a single."""
        last = self.program.reduced[-1]
        if index < self.base:
            load = self.program.loads[index]
            where = f"x{index} + {self._offset(load.strides, at)}"
            if tail == "one" or load.strides[last] == 0:
                self.lines.append(f"const auto v{index} = kv::load_one({where});")
            elif tail == "n":
                self.lines.append(f"const auto v{index} = kv::load_n({where}, n);")
            else:
                self.lines.append(f"const auto v{index} = kv::load({where});")
            return
        op = self.graph.ops[index - self.base]
        if op.target in VIEWS:
            self.lines.append(f"const auto v{index} = {self._name(_source(op))};")
        elif op.target == IOTA:
            start = self._iota(op, index, at)
            (axis,) = self.program.varies[index]
            step = dict(op.kwargs).get("step", 1)
            if axis == last and tail != "one" and step != 1:
                raise Unwritable
            make = "seq" if axis == last and tail != "one" else ""
            self.lines.append(f"const kv::vi v{index} = kv::vi{'::' + make if make else ''}((int64_t)({start}));")
        elif op.target in REDUCTIONS or op.target == GATHER:
            raise Unwritable
        else:
            self.lines.append(self._pointwise(op, index))

    def _pointwise(self, op: Op, index: int) -> str:
        line = statement(op, index, lambda ref: Term(self._name(ref), self.graph.spec(ref).dtype))
        if line is None:
            raise Unwritable
        return line

    def _iota(self, op: Op, index: int, at: Mapping[int, str] | None = None) -> str:
        axes = self.program.varies[index]
        if len(axes) != 1:
            raise Unwritable
        (axis,) = axes
        kwargs = dict(op.kwargs)
        start, step = kwargs.get("start", 0), kwargs.get("step", 1)
        if not isinstance(start, int) or not isinstance(step, int):
            raise Unwritable
        return f"{start} + {step} * {self._coordinate(axis, at or {})}"

    def _coordinate(self, axis: int, at: Mapping[int, str]) -> str:
        return at.get(axis, f"c{axis}" if axis in self.program.reduced else f"i{axis}")

    def _offset(self, strides: tuple[Size, ...], at: Mapping[int, str] | None = None) -> str:
        at = at or {}
        words = [f"{self._coordinate(a, at)} * ({size_text(s)})" for a, s in enumerate(strides) if s != 0]
        return " + ".join(words) or "0"

    @staticmethod
    def _name(ref: Ref) -> str:
        return f"v{ref.index}" if ref.item == 0 else f"v{ref.index}_{ref.item}"


def _wrap(dtype: str, value: str) -> str:
    if dtype == "bool":
        return f"kv::ne(kv::vf((float)({value})), kv::vf(0.0f))"
    return f"kv::vi((int64_t)({value}))" if dtype in ("int64", "int32") else f"kv::splat((float)({value}))"


def _source(op: Op) -> Ref:
    ref = op.args[0]
    assert isinstance(ref, Ref)
    return ref


def _closure(program: RowProgram, wanted: Iterable[int], stop: set[int]) -> set[int]:
    """All values that these need, themselves included; nothing behind a value in `stop`, a reduction or a gather."""
    base = len(program.graph.inputs)
    seen: set[int] = set()
    stack = list(wanted)
    while stack:
        index = stack.pop()
        if index in seen or index in stop:
            continue
        seen.add(index)
        if index < base:
            continue
        op = program.graph.ops[index - base]
        if op.target in REDUCTIONS:
            continue
        if op.target == GATHER:
            where = op.args[2]
            assert isinstance(where, Ref)
            stack.append(where.index)
            continue
        stack.extend(ref.index for ref in op.refs())
    return seen
