"""Pooling writer: the C++ body of a pool."""

from __future__ import annotations

from dataclasses import dataclass

from torch_kevolve.plan import Tensor
from torch_kevolve.sizes import Size, numel, simplify
from torch_kevolve.templates.anchor_cpp import SMALL, Args, index_of, statements, stores
from torch_kevolve.templates.around import Body, Leaf
from torch_kevolve.templates.base import Point
from torch_kevolve.templates.prelude import TYPES

D = ("d0", "d1", "d2")
"""Names of the output coordinates, outermost spatial dimension first."""


@dataclass(frozen=True)
class Pool:
    """A pool over `rank` trailing dimensions of `input`; `lead` are the sizes in front of them. `divisor`: where it is
    the same for all windows. `rounded`: windows may start so late that they leave the padded input."""

    kind: str
    rank: int
    window: tuple[int, ...]
    stride: tuple[int, ...]
    pad: tuple[int, ...]
    dilation: tuple[int, ...]
    whole: bool
    divisor: int | None
    offsets: bool
    rounded: bool
    input: Leaf
    lead: tuple[Size, ...]
    outs: tuple[Size, ...]
    body: Body

    @property
    def channels(self) -> bool:
        """Whether channels, the last of the leading dimensions, are innermost in memory."""
        return bool(self.lead) and self.input.strides[len(self.lead) - 1] == 1 and self.input.strides[-1] != 1

    @property
    def sizes(self) -> tuple[Size, ...]:
        return self.input.shape[len(self.lead) :]

    @property
    def steps(self) -> tuple[Size, ...]:
        return self.input.strides[len(self.lead) :]


class PoolWriter:
    """Writes one body; see the family for its three forms."""

    def __init__(self, found: Pool, args: Args, outs: list[Tensor], point: Point, lane: int) -> None:
        self.found, self.args, self.outs, self.lane = found, args, outs, lane
        self.stream, self.rows, self.buffered = bool(point["NT"]), int(point["ROWS"]), bool(point["BUFFER"])
        self.names = (*(f"l{i}" for i in range(len(found.lead))), *D[: found.rank])
        self.in_sizes = [args.size(size) for size in found.sizes]
        self.out_sizes = [args.size(size) for size in found.outs]
        self.total = args.size(simplify(numel((*found.lead, *found.outs)) * numel(found.window)))
        self.low = "0.0f" if found.kind == "avg" else "-__builtin_inff()"
        self.source = args.input(found.input.index)
        lead = [f"l{i}" for i in range(len(found.lead))]
        self.base = f"{self.source} + {args.address(found.input.strides[: len(lead)], lead)}"

    def join(self, a: str, b: str) -> str:
        return f"kv::max_nan({a}, {b})" if self.found.kind == "max" else f"{a} + {b}"

    def finish(self, tail: str) -> list[str]:
        lines = statements(self.args, self.found.body, self.names, self.lane, tail)
        return lines + stores(self.args, self.found.body, self.names, self.lane, self.outs, tail, self.stream)

    def window_loops(self, dims: range) -> tuple[list[str], str]:
        """Loops over the window's places inside the input in these dimensions, and their address."""
        found, lines, words = self.found, [], []
        for a in dims:
            place = f"{D[a]} * {found.stride[a]} - {found.pad[a]} + k{a} * {found.dilation[a]}"
            lines.append(f"for (int64_t k{a} = 0; k{a} < {found.window[a]}; k{a}++) {{ const int64_t p{a} = {place};")
            lines.append(f"if (p{a} < 0 || p{a} >= {self.in_sizes[a]}) continue;")
            words.append(f"p{a} * {self.args.size(found.steps[a])}")
        return lines, " + ".join(words) or "0"

    def count(self, dims: range) -> str:
        """Places that a window's sum is divided by, over these dimensions."""
        found = self.found
        words = [f"kv::places({D[a]} * {found.stride[a]} - {found.pad[a]}, {found.window[a]}, {self.in_sizes[a]}, "
                 f"{found.pad[a]}, {'true' if found.whole else 'false'})" for a in dims]  # fmt: skip
        return " * ".join(words) or "1"

    # Planes

    def planes(self) -> str:
        """One thread takes ROWS rows of the output. With BUFFER its buffer holds one reduced input row with padding."""
        found, args = self.found, self.args
        last = found.rank - 1
        outer = [*(args.size(s) for s in found.lead), *self.out_sizes[:last]]
        row_names = self.names[:-1]
        counts = found.kind == "avg" and not found.divisor
        high = [f"const float high = (float)({self.count(range(last))});"] if counts else []
        lines = [
            f"const int64_t rows = {' * '.join(outer) or '1'};",
            f"#pragma omp parallel if ({self.total} > {SMALL})",
            "{",
            *(self.make_buffer() if self.buffered else []),
            *(self.width_counts() if counts else []),
            f"#pragma omp for schedule(static, {self.rows})",
            "for (int64_t r = 0; r < rows; r++) {",
            *(index_of(args, (*found.lead, *found.outs[:last]), row_names, "r") if row_names else []),
            *self.find_rows(),
            *high,
            f"auto line_of = [&](auto all) {{ const int m = all ? {numel(found.window[:last])} : many; (void)m;",
            *(self.reduce_rows() if self.buffered else []),
            f"int64_t {D[last]} = 0;",
            f"for (; {D[last]} + kv::L <= {self.out_sizes[last]}; {D[last]} += kv::L) {{",
            *self.along_width(""),
            *self.finish(""),
            "}",
            f"if ({D[last]} < {self.out_sizes[last]}) {{ const int n = (int)({self.out_sizes[last]} - {D[last]});",
            *self.along_width("n"),
            *self.finish("n"),
            "} };",
            f"if (many == {numel(found.window[:last])}) line_of(std::true_type()); else line_of(std::false_type());",
            "}",
            *(["free(buffer);"] if self.buffered else []),
            *(["free(across);"] if counts else []),
            *(["kv::fence();"] if self.stream else []),
            "}",
        ]
        return "\n".join(lines)

    def make_buffer(self) -> list[str]:
        found, last = self.found, self.found.rank - 1
        span = (found.window[last] - 1) * found.dilation[last]
        width, out_width = self.in_sizes[last], self.out_sizes[last]
        return [
            f"const int64_t room = ({out_width} + 2 * kv::L) * {found.stride[last]} + {span} + {width}",
            f"+ 2 * {found.pad[last]};",
            "float* buffer = (float*)aligned_alloc(64, (room * 4 + 63) / 64 * 64);",
            f"for (int64_t k = 0; k < room; k++) buffer[k] = {self.low};",
            f"float* line = buffer + {found.pad[last]};",
        ]

    def width_counts(self) -> list[str]:
        last, out_width = self.found.rank - 1, self.out_sizes[self.found.rank - 1]
        return [
            f"float* across = (float*)aligned_alloc(64, (({out_width} + kv::L) * 4 + 63) / 64 * 64);",
            f"for (int64_t {D[last]} = 0; {D[last]} < {out_width} + kv::L; {D[last]}++)",
            f"across[{D[last]}] = (float)std::max<int64_t>(1, {self.count(range(last, last + 1))});",
        ]

    def find_rows(self) -> list[str]:
        """`from`: the `many` input rows of this row of windows."""
        found, last = self.found, self.found.rank - 1
        loops, where = self.window_loops(range(last))
        kind = TYPES[found.input.dtype]
        head = f"const {kind}* from[{numel(found.window[:last])}]; int many = 0;"
        return [head, *loops, f"from[many++] = {self.base} + {where};", "}" * last]

    def over_rows(self, call: str) -> list[str]:
        """`v`: the join over the rows; `call` reads `q`."""
        again = call.replace("from[0]", "from[q]")
        return [f"kv::vf v = {call};", f"for (int q = 1; q < m; q++) v = {self.join('v', again)};"]

    def reduce_rows(self) -> list[str]:
        """Fill `line` with the join of the window's input rows."""
        last = self.found.rank - 1
        width, step = self.in_sizes[last], self.found.steps[last]
        s = self.args.size(step)
        load = "kv::load(from[0] + x)" if step == 1 else f"kv::load_step(from[0] + x * {s}, {s}, kv::L)"
        part = "kv::load_n(from[0] + x, n)" if step == 1 else f"kv::load_step(from[0] + x * {s}, {s}, n)"
        return [
            f"if (!m) for (int64_t x = 0; x < {width}; x++) line[x] = {self.low};",
            "else { int64_t x = 0;",
            f"for (; x + kv::L <= {width}; x += kv::L) {{",
            *self.over_rows(load),
            "kv::store(line + x, v); }",
            f"if (x < {width}) {{ const int n = (int)({width} - x);",
            *self.over_rows(part),
            "kv::store_n(line + x, v, n); } }",
        ]

    def along_width(self, tail: str) -> list[str]:
        """`acc`: L neighbouring windows; stride 2 takes even and odd places apart by shuffles."""
        found, last = self.found, self.found.rank - 1
        s, k, dilation = found.stride[last], found.window[last], found.dilation[last]
        lines = [f"const int64_t at = {D[last]} * {s}; (void)at;", f"kv::vf {', '.join(f'w{b}' for b in range(k))};"]

        def vector(name: str, offset: int | str) -> list[str]:
            if self.buffered:
                return [f"const kv::vf {name} = kv::load(buffer + at + {offset});"]
            return [f"kv::vf {name}; {{", *self.over_rows(f"kv::load(from[0] + at + {offset})"), f"{name} = v; }}"]

        if s == 2 and (self.buffered or not tail):
            done: set[int | None] = set()
            for b in range(k):
                if b in done:
                    continue
                odd = b + 1 if dilation == 1 and b + 1 < k else None
                other = f"w{odd}" if odd is not None else f"spare{b}"
                lines += [] if odd is not None else [f"kv::vf {other};"]
                lines += [
                    *vector(f"low{b}", b * dilation),
                    *vector(f"high{b}", f"{b * dilation} + kv::L"),
                    f"kv::halves(low{b}, high{b}, w{b}, {other});",
                ]
                done |= {b, odd}
        elif s == 1 and not tail:
            for b in range(k):
                lines += [*vector(f"whole{b}", b * dilation), f"w{b} = whole{b};"]
        else:
            for b in range(k):
                if self.buffered:
                    lines.append(f"w{b} = kv::load_step(buffer + at + {b * dilation}, {s}, {tail or 'kv::L'});")
                else:
                    call = f"kv::load_step(from[0] + at + {b * dilation}, {s}, {tail or 'kv::L'})"
                    lines += ["{", *self.over_rows(call), f"w{b} = v; }}"]
        total = "w0"
        for b in range(1, k):
            total = self.join(total, f"w{b}")
        if found.kind == "avg":
            by = f"{found.divisor}.0f" if found.divisor else f"kv::load(across + {D[last]}) * kv::vf(high)"
            total = f"({total}) / " + (f"kv::vf({by})" if found.divisor else f"({by})")
        return [*lines, f"const kv::vf acc = {total};"]

    # Channels

    def channels(self) -> str:
        """Vectors over channels; one output place at a time, its window straight from the input."""
        found, args = self.found, self.args
        channel = f"l{len(found.lead) - 1}"
        size = args.size(found.lead[-1])
        row_sizes, row_names = (*found.lead[:-1], *found.outs), (*self.names[: len(found.lead) - 1], *D[: found.rank])
        flat = " * ".join(args.size(s) for s in row_sizes)
        loops, where = self.window_loops(range(found.rank))
        divide = []
        if found.kind == "avg":
            by = (
                f"{found.divisor}.0f"
                if found.divisor
                else f"(float)std::max<int64_t>(1, {self.count(range(found.rank))})"
            )
            divide = [f"const kv::vf by = kv::vf({by});"]

        def vector(tail: str) -> list[str]:
            load = f"kv::load_n(from, {tail})" if tail else "kv::load(from)"
            shown = "sum / by" if found.kind == "avg" else "sum"
            return [
                f"kv::vf sum = kv::splat({self.low});",
                *loops,
                f"const auto* from = {self.base} + {where};",
                f"sum = {self.join('sum', load)};",
                "}" * found.rank,
                f"const kv::vf acc = {shown};",
                *self.finish(tail),
            ]

        return "\n".join([
            f"const int64_t rows = {flat};",
            f"#pragma omp parallel for schedule(static) if ({self.total} > {SMALL})",
            "for (int64_t r = 0; r < rows; r++) {",
            *index_of(args, row_sizes, row_names, "r"),
            *divide,
            f"int64_t {channel} = 0;",
            f"for (; {channel} + kv::L <= {size}; {channel} += kv::L) {{",
            *vector(""),
            "}",
            f"if ({channel} < {size}) {{ const int n = (int)({size} - {channel});",
            *vector("n"),
            "}",
            *(["kv::fence();"] if self.stream else []),
            "}",
        ])  # fmt: skip

    # Offsets

    def offsets(self) -> str:
        """Value and place: later places win where they are greater or NaN, the first place inside where none is."""
        found, args = self.found, self.args
        if found.channels:
            channel, size = f"l{len(found.lead) - 1}", args.size(found.lead[-1])
            row_sizes, row_names = (*found.lead[:-1], *found.outs), (*self.names[: len(found.lead) - 1], *D[:2])
        else:
            channel, size = D[1], self.out_sizes[1]
            row_sizes, row_names = (*found.lead, found.outs[0]), (*self.names[: len(found.lead)], D[0])
        flat = " * ".join(args.size(s) for s in row_sizes)
        first = [
            f"const int64_t first{a} = kv::inside({D[a]} * {found.stride[a]} - {found.pad[a]}, {found.dilation[a]});"
            for a in range(2)
        ]

        def vector(tail: str) -> list[str]:
            return [
                "kv::vf best = kv::splat(-__builtin_inff());",
                *(self.offset_channels(tail) if found.channels else self.offset_width(tail or "kv::L")),
                "const kv::vf acc = best;",
                "const kv::vi off = kv::vi(__builtin_convertvector(place, kv::lv)); (void)off;",
                *self.finish(tail),
            ]

        return "\n".join([
            f"const int64_t rows = {flat};",
            f"#pragma omp parallel for schedule(static) if ({self.total} > {SMALL})",
            "for (int64_t r = 0; r < rows; r++) {",
            *index_of(args, row_sizes, row_names, "r"),
            *(first if found.channels else first[:1]),
            f"int64_t {channel} = 0;",
            f"for (; {channel} + kv::L <= {size}; {channel} += kv::L) {{",
            *vector(""),
            "}",
            f"if ({channel} < {size}) {{ const int n = (int)({size} - {channel});",
            *vector("n"),
            "}",
            *(["kv::fence();"] if self.stream else []),
            "}",
        ])  # fmt: skip

    def offset_channels(self, tail: str) -> list[str]:
        found = self.found
        loops, where = self.window_loops(range(2))
        load = f"kv::load_n({self.base} + {where}, {tail})" if tail else f"kv::load({self.base} + {where})"
        return [
            f"kv::iv place = kv::iv{{}} + (int32_t)(first0 * {found.window[1]} + first1);",
            *loops,
            f"kv::newer({load}, (int32_t)(k0 * {found.window[1]} + k1), best, place);",
            "} }",
        ]

    def offset_width(self, many: str) -> list[str]:
        """Lanes are neighbouring windows of one row; a place outside counts as -inf, which never wins."""
        found = self.found
        s, pad, dilation, k = found.stride[1], found.pad[1], found.dilation[1], found.window[1]
        step = self.args.size(found.steps[1])
        loops, where = self.window_loops(range(1))
        start = f"({D[1]} * {s} - {pad} + k1 * {dilation})"
        return [
            f"kv::iv place; for (int q = 0; q < kv::L; q++) place[q] = (int32_t)(first0 * {k}",
            f"+ kv::inside(({D[1]} + q) * {s} - {pad}, {dilation}));",
            *loops,
            f"for (int64_t k1 = 0; k1 < {k}; k1++) {{",
            f"kv::newer(kv::edge({self.base}",
            f"+ {where}, {start}, {s}, {step}, {self.in_sizes[1]}, {many}), (int32_t)(k0 * {k} + k1), best, place);",
            "} }",
        ]
