"""Row writer: the C++ body of a row program, reduced axes innermost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch_kevolve.sizes import Size
from torch_kevolve.task import DTYPE_BYTES, Op, Ref
from torch_kevolve.templates.cpp_text import Unwritable, held, size_text, statement
from torch_kevolve.templates.expr import INTS, Term
from torch_kevolve.templates.row_levels import behind, low_exps, online_pairs, shift_form
from torch_kevolve.templates.rows import GATHER, IOTA, REDUCTIONS, VIEWS, Output, Reduce, RowProgram

START = {"sum": "0.0f", "mean": "0.0f", "var": "0.0f", "var_mean": "0.0f", "max": "-__builtin_inff()",
         "min": "__builtin_inff()",          "prod": "1.0f"}  # fmt: skip
EXPS = ("aten.exp.default", "aten.sigmoid.default", "aten.silu.default")
SMALL = 16384
"""Elements below which a second thread costs more than it brings (OpenMP's fork and join is about 5 us)."""


class RowWriter:
    """Writes one body. Values are named `v<index>` (`_<item>` for further results), the same at every level."""

    def __init__(self, program: RowProgram, lanes: int, point: Mapping[str, Any]) -> None:
        self.program, self.graph = program, program.graph
        self.base = len(self.graph.inputs)
        self.lanes, self.unroll, self.block = lanes, int(point["U"]), int(point["BLOCK"])
        self.stream = bool(point["NT"])
        self.pairs = self.online(program) if point["ONLINE"] else {}
        self.stash = self._stash_of(program) if point["STASH"] and not point["ONLINE"] else None
        self.prefetch = bool(point["PF"])
        self.widened = self.shared_halves(program) if point["WIDEN"] else ()
        self.low = low_exps(program)
        # Once it is filled, later passes load the stash instead of computing the value again.
        self.stashed = False
        self.lines: list[str] = []
        self.made: set[int] = set()

    @staticmethod
    def can_stash(program: RowProgram) -> bool:
        return RowWriter._stash_of(program) is not None

    @staticmethod
    def shared_halves(program: RowProgram) -> tuple[int, ...]:
        """Inputs in a half type that all rows share, as the weights of a norm: worth widening once per thread. Up to
        4096 elements, of which a few still lie in the first-level cache beside the row."""
        size = program.row_size
        if len(program.reduced) != 1 or not isinstance(size, int) or size > 4096:
            return ()
        last = program.reduced[-1]
        return tuple(
            index
            for index, load in program.loads.items()
            if load.dtype in ("bfloat16", "float16")
            and [a for a, stride in enumerate(load.strides) if stride != 0] == [last]
            and load.strides[last] == 1
        )

    @staticmethod
    def online(program: RowProgram) -> dict[int, Reduce]:
        """For each maximum the sum of exponentials that is made in the same walk."""
        rows = [r for r in program.reduces if not r.final]
        pairs = online_pairs(program, rows) if len(program.reduced) == 1 else {}
        return {top: total for top, total in pairs.items() if program.graph.spec(total.source).dtype == "float32"}

    @staticmethod
    def shows_exp(program: RowProgram) -> bool:
        """Whether an exponential goes into an element of a result other than through a reduction."""
        elements = [o.ref.index for o in program.outputs if program.level(o.ref.index) == "element"]
        behind_them = _closure(program, elements, stop=set())
        base = len(program.graph.inputs)
        return any(i >= base and program.graph.ops[i - base].target in EXPS for i in behind_them)

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
        if not any(i < base and program.level(i) == "element" for i in _closure(program, [index], stop=set())):
            return None  # made of places alone, which costs less than a walk through the stash
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
        for index in self.widened:
            size, lanes = size_text(program.row_size), self.lanes
            self.lines += [
                f"float* wide{index} = (float*)aligned_alloc(64, (({size}) * 4 + 127) / 64 * 64);",
                f"for (int64_t c = 0; c < ({size}); c += {lanes}) {{",
                f"const int n = ({size}) - c < {lanes} ? (int)(({size}) - c) : {lanes};",
                f"kv::store(wide{index} + c, kv::load_n(x{index} + c, n)); }}",
            ]
        self.lines.append("#pragma omp for schedule(static)")
        self.lines.append("for (int64_t r = 0; r < rows; r++) {")
        self._coordinates()
        for reduce in program.reduces:
            if reduce.final or self.base + reduce.op in self.made:
                continue
            self._rows_for([reduce.source.index])
            if reduce.op in self.pairs:
                self._online(reduce, self.pairs[reduce.op])
            else:
                self._reduce(reduce)
        outs = [o for o in program.outputs if program.level(o.ref.index) == "element"]
        for out in program.outputs:
            if program.level(out.ref.index) == "row":
                self._rows_for([out.ref.index])
                self.lines.append(f"kv::store_one(y{out.place} + {self._offset(out.strides)}, {self._name(out.ref)});")
        if outs:
            self._rows_for([self._unrounded(o).index for o in outs])
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
        self.lines += [f"free(wide{index});" for index in self.widened]
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
        if reduce.kind == "sum" and spec.dtype == "float32" and self._one_hot_sum(reduce):
            return
        # Of var_mean, item 0 is the variance and item 1 the mean.
        for kind in ["mean", "var"] if reduce.kind in ("var_mean", "var") else [reduce.kind]:
            self._one_pass(reduce, index, kind)
        self.made.add(index)

    def _one_hot_sum(self, reduce: Reduce) -> bool:
        """A sum of what takes one value at one place of the row and another elsewhere, without a walk."""
        index, last = self.base + reduce.op, self.program.reduced[-1]
        hot = self._one_hot(reduce.source.index)
        if hot is None:
            return False
        size = size_text(self.program.axes[last])
        needs = sorted(_closure(self.program, [reduce.source.index], stop=self.made | {hot}))
        for each, mask in (("hit", "all"), ("miss", "none")):
            self.lines += [f"double {each}{index};", f"{{ const kv::vm v{hot} = kv::vm::{mask}();"]
            for i in needs:
                if i != hot and i not in self.made:
                    self._element(i, {}, tail="one")
            self.lines.append(f"{each}{index} = {self._name(reduce.source)}.v[0]; }}")
        place = self._place(self.graph.ops[hot - self.base])
        inside = f"{place} >= 0 && {place} < ({size})"
        self.lines.append(
            f"const kv::vf v{index} = kv::splat((float)({inside} ? hit{index} + miss{index} * (({size}) - 1) "
            f": miss{index} * ({size})));"
        )
        self.made.add(index)
        return True

    def _one_hot(self, index: int) -> int | None:
        """The `iota == number` that alone makes this value differ along the row."""
        behind_it = [i for i in _closure(self.program, [index], stop=set()) if i >= self.base]
        hot = [i for i in behind_it if self._place(self.graph.ops[i - self.base]) is not None]
        return hot[0] if len(hot) == 1 and self._follows(index, hot[0]) else None

    def _follows(self, index: int, hot: int) -> bool:
        """Whether a value varies along the row through `hot` only."""
        if index == hot:
            return True
        if index < self.base:
            return False
        op = self.graph.ops[index - self.base]
        if op.target == IOTA or op.target in REDUCTIONS or op.target == GATHER:
            return False
        wide = [ref.index for ref in op.refs() if self.program.level(ref.index) == "element"]
        return all(i == hot or self._follows(i, hot) for i in wide)

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
        if any(out.strides[axis] != 1 for out in outs):
            raise Unwritable
        # Two vectors of bfloat16 are rounded and packed at once.
        paired = {out.place for out in outs if out.dtype == "bfloat16" and self.unroll > 1}
        self.lines += [f"kv::vf first{place};" for place in sorted(paired)]
        number = 0

        def step(acc: str, tail: str) -> list[str]:
            nonlocal number
            rows = []
            for out in outs:
                name = self._name(self._unrounded(out))
                where = f"y{out.place} + {self._offset(out.strides)}"
                call = "stream" if self.stream and self._aligned(out) else "store"
                if tail:
                    rows.append(f"kv::store_n({where}, {name}, n);")
                elif out.place not in paired:
                    rows.append(f"kv::{call}({where}, {name});")
                elif number % 2 == 0:
                    rows.append(f"first{out.place} = {name};")
                else:
                    rows.append(f"kv::{call}_pair({where} - {self.lanes}, first{out.place}, {name});")
            number += 1
            return rows

        self._loop([self._unrounded(o).index for o in outs], step, "", "", ahead=self.prefetch)

    def _unrounded(self, out: Output) -> Ref:
        """What is stored for an output: a cast to its half type is left to the store, which rounds anyway."""
        index = out.ref.index
        op = self.graph.ops[index - self.base] if index >= self.base else None
        if op is None or op.target != "prims.convert_element_type.default" or out.dtype not in ("bfloat16", "float16"):
            return out.ref
        source = _source(op)
        fits = (
            self.graph.spec(source).dtype == "float32"
            and self.program.varies[source.index] == self.program.varies[index]
        )
        return source if fits else out.ref

    def _aligned(self, out: Output) -> bool:
        """Streaming stores need whole vectors from an aligned start: every outer stride a multiple of the lanes."""
        axis = self.program.reduced[-1]
        return all(isinstance(s, int) and s % self.lanes == 0 for a, s in enumerate(out.strides) if a != axis)

    def _loop(self, wanted: list[int], step: Any, accumulators: str, flush: str, ahead: bool = False) -> None:
        """Nested loops over the reduced axes; the last one in vectors, unrolled, with a tail.

        `ahead`: ask for what the next rows read.
        """
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
        width, u = self.lanes, self.unroll
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
            self.lines += self._ahead(inner, number, self._next_rows()) if ahead else []
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

    def _next_rows(self) -> str:
        """How far ahead to read: a row, or as many as 1024 elements take (one is done before memory answers)."""
        size = size_text(self.program.row_size)
        return f"(({size}) < 1024 ? INT64_C(1024) : (int64_t)({size}))"

    def _ahead(self, needs: Iterable[int], number: int, distance: str) -> list[str]:
        """Prefetches of the inputs among `needs`, one per cache line, before vector `number` of the unrolled ones.

        The processor's own prefetchers stop at page ends and follow the loads, so they are idle while a row is
        computed on in cache: a pass over exp, prefetching, runs at the memory's full rate.
        """
        program, out = self.program, []
        last = program.reduced[-1]
        outer = [a for a in program.parallel if program.axes[a] != 1]
        for index in needs:
            load = program.loads.get(index)
            if load is None or load.strides[last] != 1:
                continue
            # Rows that do not follow each other in memory would be asked for in vain; broadcast ones are in cache.
            if outer and load.strides[outer[-1]] != program.row_size:
                continue
            line = max(1, 64 // (DTYPE_BYTES[load.dtype] * self.lanes))
            if number % min(line, self.unroll) == 0:
                out.append(f"kv::ahead(x{index} + {self._offset(load.strides)}, {distance});")
        return out

    def _online(self, top: Reduce, total: Reduce) -> None:
        """The row's maximum and its sum of exponentials in one walk over memory: blocks that stay in L1 are walked
        twice, and what was summed is scaled when a block's maximum is above all before it. NaNs are left out of that
        maximum, since they show in the sum; then the row is looked at again."""
        program, u, last = self.program, self.unroll, self.program.reduced[-1]
        index, x, low = self.base + total.op, self._name(top.source), "kv::splat(-__builtin_inff())"
        needs = sorted(_closure(program, [top.source.index], stop=self.made))
        inner = [i for i in needs if last in program.varies[i]]
        for each in needs:
            if each not in inner and each not in self.made:
                self._element(each, {}, tail="one")
        step = u * self.lanes
        self.lines += [
            f"float t{index} = -__builtin_inff(); double s{index} = 0;",
            f"{{ const int64_t end = {size_text(program.axes[last])}, full = end - end % {step};",
            "for (int64_t from = 0; from < end;) {",
            f"const int64_t next = from + {step * self.block}, stop = from >= full ? end : next < full ? next : full;",
            f"kv::vf a[{u}], b[{u}]; for (int u = 0; u < {u}; u++) {{ a[u] = {low}; b[u] = kv::vf(0.0f); }}",
        ]
        self._block(inner, f"a[{{0}}] = kv::max({x}, a[{{0}}]);", f"a[0] = kv::max({self._first(x, low)}, a[0]);")
        self.lines += [
            f"for (int u = 1; u < {u}; u++) a[0] = kv::max(a[0], a[u]);",
            "const float high = kv::hmax(a[0]);",
            f"if (high > t{index}) {{ s{index} *= __builtin_exp((double)t{index} - (double)high); t{index} = high; }}",
            # Taking -inf off would make NaN of the row's -inf, of which exp is 0.
            f"const kv::vf shift = kv::vf(t{index} > -__builtin_inff() ? t{index} : 0.0f);",
        ]
        power = f"kv::exp_low({x} - shift)"
        rest = f"b[0] = b[0] + {self._first(power, 'kv::vf(0.0f)')};"
        self._block(inner, f"b[{{0}}] = b[{{0}}] + {power};", rest, self.prefetch)
        self.lines += [
            f"for (int u = 1; u < {u}; u++) b[0] = b[0] + b[u];",
            f"s{index} += kv::hsum(kv::wide(b[0])); from = stop; }}",
        ]
        self._online_ends(top, total, inner)

    def _online_ends(self, top: Reduce, total: Reduce, inner: list[int]) -> None:
        """Maximum and sum as eager has them where a row holds NaN, or infinities only."""
        index, x = self.base + total.op, self._name(top.source)
        self.lines += [
            f"if (s{index} != s{index}) {{",
            f"kv::vf a[1] = {{kv::splat(t{index})}}; const int64_t from = 0, stop = end, full = 0;",
        ]
        self._block(inner, f"a[0] = kv::max_nan(a[0], {x});", f"a[0] = kv::max_nan(a[0], {self._first(x, 'a[0]')});")
        infinite = f"t{index} > 0 ? __builtin_inf() : 0.0" if self._guarded(top, total) else '__builtin_nan("")'
        self.lines += [
            f"t{index} = kv::hmax_nan(a[0]); }} }}",
            f"if (t{index} - t{index} != 0 && t{index} == t{index}) s{index} = {infinite};",
            f"const kv::vf v{self.base + top.op} = kv::splat(t{index});",
            f"const kv::vf v{index} = kv::splat((float)s{index});",
        ]
        self.made |= {self.base + top.op, index}

    @staticmethod
    def _first(value: str, other: str) -> str:
        """A part of a vector: `other` in the lanes from n on."""
        return f"kv::select(kv::first(n), {value}, {other})"

    def _guarded(self, top: Reduce, total: Reduce) -> bool:
        """Whether the program takes off 0 where the maximum is infinite, as logsumexp does."""
        power = behind(self.program, total.source)
        assert power is not None
        less = behind(self.program, self.graph.ops[power].args[0])
        assert less is not None
        return shift_form(self.program, self.graph.ops[less].args[1], top) == "guarded"

    def _block(self, inner: list[int], step: str, rest: str, ahead: bool = False) -> None:
        """Walk from `from` to `stop`: below `full` U vectors at a time, `step` with their number; then single ones,
        `rest`, of which the last may be a part."""
        last, u, width = self.program.reduced[-1], self.unroll, self.lanes
        self.lines += [f"{{ int64_t c{last} = from;", f"if (stop <= full) for (; c{last} < stop;) {{"]
        for number in range(u):
            self.lines.append("{")
            self.lines += self._ahead(inner, number, str(2 * u * width * self.block)) if ahead else []
            self._elements_at(inner, "")
            self.lines += [step.format(number), f"}} c{last} += {width};"]
        self.lines.append(
            f"}} else for (; c{last} < stop; c{last} += {width}) {{ "
            f"const int n = stop - c{last} < {width} ? (int)(stop - c{last}) : {width};"
        )
        self._elements_at(inner, "n")
        self.lines += [rest, "} }"]

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
            if index in self.widened and tail != "one":
                where = f"wide{index} + {self._coordinate(last, at)}"
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
        elif tail != "one" and (place := self._place(op)) is not None:
            self.lines.append(f"const kv::vm v{index} = kv::place({place} - c{last});")
        else:
            self.lines.append(self._pointwise(op, index))

    def _place(self, op: Op) -> str | None:
        """The row's int64 number, for `iota == number` with an iota from 0 along the row; None for another operator."""
        if op.target != "aten.eq.Tensor" or len(self.program.reduced) != 1:
            return None
        for one, other in (op.args[:2], op.args[1::-1]):
            place = behind(self.program, one)
            made = self.graph.ops[place] if place is not None else None
            if made is None or made.target != IOTA or not isinstance(other, Ref):
                continue
            start, step = (dict(made.kwargs).get(name, default) for name, default in (("start", 0), ("step", 1)))
            along = self.program.varies[self.base + (place or 0)] == set(self.program.reduced)
            if (start, step) == (0, 1) and along and self.graph.spec(other).dtype == "int64":
                root = self._root(other)
                if self.program.level(root) == "row":
                    return f"v{root}.v[0]"
        return None

    def _root(self, ref: Ref) -> int:
        """The value behind views: an input's too."""
        while ref.index >= self.base and self.graph.ops[ref.index - self.base].target in VIEWS:
            ref = _source(self.graph.ops[ref.index - self.base])
        return ref.index

    def _pointwise(self, op: Op, index: int) -> str:
        line = statement(op, index, lambda ref: Term(self._name(ref), self.graph.spec(ref).dtype))
        if line is None:
            raise Unwritable
        return line.replace("kv::exp(", "kv::exp_low(") if index - self.base in self.low else line

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
