"""Scan writer: the C++ body of a scan, along rows or down columns."""

from __future__ import annotations

from dataclasses import dataclass

from torch_kevolve.plan import PlanBuilder, Tensor
from torch_kevolve.sizes import Size, numel, simplify
from torch_kevolve.templates.anchor_cpp import SMALL, Args, statements, stores
from torch_kevolve.templates.around import Body
from torch_kevolve.templates.base import Point
from torch_kevolve.templates.expr import kind_of


@dataclass(frozen=True)
class Scan:
    """The scan over (outer, length, inner), the work that makes its operand and what is done with its result."""

    domain: tuple[Size, Size, Size]
    sign: str
    unit: str
    source: str
    whole: bool
    head: Body
    tail: Body

    @property
    def lane(self) -> int:
        return 1 if self.domain[2] == 1 else 2


class _Writer:
    def __init__(self, found: Scan, builder: PlanBuilder, args: Args, outs: list[Tensor], point: Point) -> None:
        self.found, self.builder, self.args, self.outs = found, builder, args, outs
        self.unroll, self.stream, self.algorithm = int(point["U"]), bool(point["NT"]), str(point["algorithm"])
        self.pieces = int(point["PIECES"])
        self.early = int(point["AHEAD"])
        self.outer, self.length, self.inner = (args.size(size) for size in found.domain)
        self.total = args.size(simplify(numel(found.domain)))
        self.scalar = "int64_t" if found.whole else "double"
        self.vector = "kv::lv" if found.whole else "kv::dv"

    def operand(self, names: tuple[str, str, str], tail: str = "") -> list[str]:
        """`in`: the operand's vector, in the kind that is scanned."""
        found = self.found
        dtype = found.head.stores[0].dtype
        kind, lift = kind_of(dtype), ""
        if found.whole and kind == "mask":
            lift = "kv::to_int"
        elif not found.whole and kind != "float":
            lift = "kv::to_float"
        lines = statements(self.args, found.head, names, found.lane, tail)
        return [*lines, f"const auto in = {lift}({found.source});"]

    def result(self, names: tuple[str, str, str], tail: str = "") -> list[str]:
        lines = statements(self.args, self.found.tail, names, self.found.lane, tail)
        return lines + stores(self.args, self.found.tail, names, self.found.lane, self.outs, tail, self.stream)


class Strips(_Writer):
    """Vectors along the inner dimension; one strip of U vectors walks down the length."""

    def text(self) -> str:
        u, lanes = self.unroll, "kv::L"
        fill = f"for (int u = 0; u < {u}; u++) d[u] = {self.vector}{{}} + {self.found.unit};"
        lines = [
            f"constexpr int64_t wide = {u} * {lanes};",
            f"const int64_t strips = ({self.inner} + wide - 1) / wide;",
            f"#pragma omp parallel for schedule(static) if ({self.total} > {SMALL})",
            f"for (int64_t t = 0; t < {self.outer} * strips; t++) {{",
            "const int64_t i0 = t / strips, from = t % strips * wide; (void)i0;",
            f"const int64_t rest = {self.inner} - from;",
            f"const int full = rest >= wide ? {u}",
            f": (int)(rest / {lanes}), n = rest >= wide ? 0 : (int)(rest % {lanes});",
            f"{self.vector} d[{u}]; {fill}",
            f"if (full == {u}) {{",
            f"for (int64_t i1 = 0; i1 < {self.length}; i1++) {{",
            f"#pragma GCC unroll {u}",
            f"for (int u = 0; u < {u}; u++) {{",
            *self.step(""),
            "} } } else {",
            f"for (int64_t i1 = 0; i1 < {self.length}; i1++) {{",
            "for (int u = 0; u < full; u++) {",
            *self.step(""),
            "}",
            "if (n) { const int u = full;",
            *self.step("n"),
            "} } }",
            *(["kv::fence();"] if self.stream else []),
            "}",
        ]
        return "\n".join(lines)

    def step(self, tail: str) -> list[str]:
        names = ("i0", "i1", "c")
        # acc is made in one scope and used in another: the operand's names may return behind it.
        value = "in.v" if self.found.whole else "kv::wide(in)"
        shown = "kv::vi acc(d[u]);" if self.found.whole else "const kv::vf acc = kv::narrow(d[u]);"
        return [
            "const int64_t c = from + u * kv::L;",
            *("{", *self.operand(names, tail), f"d[u] = d[u] {self.found.sign} {value};", "}"),
            *(shown, *self.result(names, tail)),
        ]


class Rows(_Writer):
    """Vectors along the rows. Virtual rows: every row's pieces one after the other."""

    def text(self) -> str:
        p, lines = self.pieces, []
        if p > 1:
            carry = self.args.tensor(
                self.builder.empty((simplify(self.found.domain[0] * p),), "int64" if self.found.whole else "float64")
            )
            lines += [
                f"const int64_t piece = (({self.length} + {p} - 1) / {p} + kv::L - 1) / kv::L * kv::L;",
                f"#define KV_FROM(v) std::min<int64_t>({self.length}, (v) % {p} * piece)",
                f"#define KV_END(v) std::min<int64_t>({self.length}, KV_FROM(v) + piece)",
                f"#define KV_ROW(v) ((v) / {p})",
                *self.totals(carry),
            ]
        else:
            carry = ""
            lines += ["#define KV_FROM(v) (int64_t)0", f"#define KV_END(v) {self.length}", "#define KV_ROW(v) (v)"]
        wide = "kv::L" if self.algorithm == "transpose" else str(self.unroll)
        init = f"{carry}[v + k]" if carry else self.found.unit
        lines += [
            f"const int64_t rows = {self.outer} * {p};",
            f"#pragma omp parallel for schedule(static) if ({self.total} > {SMALL})",
            f"for (int64_t v = 0; v < rows; v += {wide}) {{",
            f"const int many = rows - v < {wide} ? (int)(rows - v) : {wide};",
            f"{self.scalar} d[{wide}]; for (int k = 0; k < many; k++) d[k] = {init};",
            "int64_t done = 0;",
            f"if (many == {wide}) {{",
            "int64_t least = KV_END(v) - KV_FROM(v);",
            f"for (int k = 1; k < {wide}; k++) least = std::min(least, KV_END(v + k) - KV_FROM(v + k));",
            *(self.transposed() if self.algorithm == "transpose" else self.interleaved()),
            "}",
            "for (int k = 0; k < many; k++) {",
            "const int64_t i0 = KV_ROW(v + k), end = KV_END(v + k), i2 = 0; (void)i0; (void)i2;",
            "for (int64_t c = KV_FROM(v + k) + done; c < end; c += kv::L) {",
            "const int n = end - c < kv::L ? (int)(end - c) : kv::L;",
            f"{'int64_t' if self.found.whole else 'float'} b[kv::L];",
            *("{", *self.operand(("i0", "c", "i2"), "n"), "kv::store(b, in); }"),
            f"for (int j = 0; j < n; j++) {{ d[k] = d[k] {self.found.sign} b[j]; b[j] = d[k]; }}",
            "const auto acc = kv::load(b);",
            *self.result(("i0", "c", "i2"), "n"),
            "} }",
            *(["kv::fence();"] if self.stream else []),
            "}",
        ]
        return "\n".join(lines)

    def transposed(self) -> list[str]:
        """L rows, a cache line of columns at a time; the carry is a vector over the rows."""
        names = ("i0", "c", "i2")
        place = "const int64_t i0 = KV_ROW(v + k), i2 = 0, at = KV_FROM(v + k) + done; (void)i0; (void)i2;"
        return [
            "constexpr int parts = 16 / kv::L;",
            "kv::dv s; for (int k = 0; k < kv::L; k++) s[k] = d[k];",
            "for (; done + parts * kv::L <= least; done += parts * kv::L) {",
            "kv::vf x[parts][kv::L];",
            "#pragma GCC unroll 16",
            f"for (int k = 0; k < kv::L; k++) {{ {place}",
            *("{ const int64_t c = at;", *self.ahead(names), "}"),
            "#pragma GCC unroll 2",
            "for (int p = 0; p < parts; p++) { const int64_t c = at + p * kv::L;",
            *(*self.operand(names), "x[p][k] = in; } }"),
            "#pragma GCC unroll 2",
            "for (int p = 0; p < parts; p++) {",
            "kv::transpose(x[p]);",
            "#pragma GCC unroll 16",
            "for (int k = 0; k < kv::L; k++) {",
            f"s = s {self.found.sign} kv::wide(x[p][k]); x[p][k] = kv::narrow(s); }}",
            "kv::transpose(x[p]); }",
            "#pragma GCC unroll 16",
            f"for (int k = 0; k < kv::L; k++) {{ {place}",
            "#pragma GCC unroll 2",
            "for (int p = 0; p < parts; p++) { const int64_t c = at + p * kv::L;",
            "const kv::vf acc = x[p][k];",
            *(*self.result(names), "} } }"),
            "for (int k = 0; k < kv::L; k++) d[k] = s[k];",
        ]

    def ahead(self, names: tuple[str, str, str]) -> list[str]:
        """Prefetches of what the operand reads, so many elements early; behind a row's end the next rows follow."""
        wide = [load for load in self.found.head.loads if load.strides[self.found.lane] == 1]
        return [
            f"kv::ahead({self.args.input(load.leaf.index)} + {self.args.address(load.strides, names)}, {self.early});"
            for load in wide
        ]

    def interleaved(self) -> list[str]:
        """U rows side by side, element by element: U dependent chains instead of one."""
        u, names = self.unroll, ("i0", "c", "i2")
        place = "const int64_t i0 = KV_ROW(v + k), i2 = 0, c = KV_FROM(v + k) + done; (void)i0; (void)i2;"
        return [
            "for (; done + kv::L <= least; done += kv::L) {",
            f"{'int64_t' if self.found.whole else 'float'} b[{u}][kv::L];",
            f"for (int k = 0; k < {u}; k++) {{ {place}",
            *self.operand(names),
            "kv::store(b[k], in); }",
            "#pragma GCC unroll 16",
            "for (int j = 0; j < kv::L; j++)",
            f"#pragma GCC unroll {u}",
            f"for (int k = 0; k < {u}; k++) {{ d[k] = d[k] {self.found.sign} b[k][j]; b[k][j] = d[k]; }}",
            f"for (int k = 0; k < {u}; k++) {{ {place}",
            "const auto acc = kv::load(b[k]);",
            *self.result(names),
            "} }",
        ]

    def totals(self, carry: str) -> list[str]:
        """What every piece starts from."""
        p, sign, unit = self.pieces, self.found.sign, self.found.unit
        value = "in.v" if self.found.whole else "kv::wide(in)"
        return [
            f"#pragma omp parallel for schedule(static) if ({self.total} > {SMALL})",
            f"for (int64_t v = 0; v < {self.outer} * {p}; v++) {{",
            "const int64_t i0 = KV_ROW(v), end = KV_END(v), i2 = 0; (void)i0; (void)i2;",
            f"{self.vector} s[4]; for (int u = 0; u < 4; u++) s[u] = {self.vector}{{}} + {unit};",
            "int64_t at = KV_FROM(v);",
            "for (; at + 4 * kv::L <= end; at += 4 * kv::L)",
            "for (int u = 0; u < 4; u++) { const int64_t c = at + u * kv::L;",
            *self.operand(("i0", "c", "i2")),
            f"s[u] = s[u] {sign} {value}; }}",
            f"{self.scalar} whole = {unit};",
            "for (; at < end; at += kv::L) { const int64_t c = at;",
            "const int n = end - c < kv::L ? (int)(end - c) : kv::L;",
            *self.operand(("i0", "c", "i2"), "n"),
            f"for (int k = 0; k < n; k++) whole = whole {sign} in.v[k]; }}",
            f"for (int u = 0; u < 4; u++) for (int k = 0; k < kv::L; k++) whole = whole {sign} s[u][k];",
            f"{carry}[v] = whole;",
            "}",
            f"for (int64_t r = 0; r < {self.outer}; r++) {{ {self.scalar} s = {unit};",
            f"for (int64_t q = 0; q < {p}; q++) {{ const auto next = s {sign} {carry}[r * {p} + q];",
            f"{carry}[r * {p} + q] = s; s = next; }} }}",
        ]
