"""Matmul (C++): register tiles with what follows them.

`tiles`: blocks of MC x NC; K is summed in blocks of KC, which costs 1-2 % and takes the error from 1.9 to 0.85 of
eager's; B is packed per block, or read in place where its columns are contiguous. `skinny`: few rows against a weight
whose rows are contiguous, which is then read once. A row logsumexp keeps a maximum and a sum per row: the product is
never written.
"""

from __future__ import annotations

from torch_kevolve.devices.base import DeviceFacts
from torch_kevolve.plan import PlanBuilder, Tensor
from torch_kevolve.sizes import numel, simplify
from torch_kevolve.task import KernelTask
from torch_kevolve.templates.anchor_cpp import Args, cpp_space, lanes_of, load_text, statements, stores
from torch_kevolve.templates.around import Body
from torch_kevolve.templates.base import Point, Space
from torch_kevolve.templates.expr import HELD_FLOATS
from torch_kevolve.templates.matmul_parts import Matmul, find
from torch_kevolve.templates.matmul_text import SKINNY, TILES
from torch_kevolve.templates.vector_text import TRANSPOSE

NAME = "matmul_cpp"
SMALL = 200_000
"""Multiplications below which a second thread costs more than it brings."""
CHUNKS = 16
"""Parts of a row whose logsumexps are found apart, so that few rows still give every thread work."""


class MatmulCpp:
    """`mm`, `addmm`, `bmm`, `baddbmm` with a pointwise epilogue, row logsumexp or cross-entropy."""

    name = NAME
    language = "cpp"

    def match(self, task: KernelTask, device: DeviceFacts) -> Space | None:
        found = find(task, "cpp") if device.type == "cpu" else None
        if found is None or found.left.dtype not in HELD_FLOATS or found.right.dtype not in HELD_FLOATS:
            return None
        if any(size == 0 for size in found.sizes) or (found.bias is not None and found.bias.dtype not in HELD_FLOATS):
            return None
        return _space(task, found, lanes_of(device))


def _space(task: KernelTask, found: Matmul, lanes: int) -> Space | None:
    rows = found.sizes[1]
    contiguous = found.first[2] == 1 and found.second[1] == 1
    skinny = isinstance(rows, int) and rows <= 8 and contiguous and found.tail is None
    straight = found.left.dtype == "float32" and found.first[2] == 1
    direct = found.second[2] == 1 and found.right.dtype == "float32"
    axes: dict[str, tuple[int | float | bool | str, ...]] = {
        "algorithm": ("tiles", "skinny") if skinny else ("tiles",),
        "MR": (1, 2, 4, 6, 8, 12, 14),
        "NV": (1, 2, 4),
        "KC": (128, 256),
        "MC": (64, 128, 256, 512, 1024),
        "PANELS": (2, 4, 8, 16),
        "LEFT": (0, 1, 2) if straight else (1, 2),
        "PACK": (1, 0) if direct else (1,),
        "DEGREE": (7, 6) if found.tail is None else (7, 6, 5),
    }

    def valid(point: Point) -> bool:
        mr, nv = int(point["MR"]), int(point["NV"])
        registers = 32 if lanes == 16 else 16
        if point["algorithm"] == "skinny":
            rest = tuple(point[name] for name in ("KC", "MC", "PANELS", "LEFT", "PACK", "DEGREE"))
            return (mr, *rest) == (1, 128, 64, 2, 1, 1, 7)
        return mr * nv + nv < registers and (not isinstance(rows, int) or mr < 2 * rows)

    big = [(8, 2), (12, 2), (6, 4)] if lanes == 16 else [(6, 2), (4, 2)]
    near = int(axes["LEFT"][0])
    good = [("tiles", mr, nv, 128, mc, panels, 2, 1) for mr, nv in big for mc, panels in ((512, 8), (512, 4))]
    good += [("tiles", mr, nv, 128, 128, 4, near, 0) for mr, nv in big]
    good += [("tiles", mr, nv, 128, 64, 2, near, 1) for mr, nv in ((4, 2), (2, 4), (1, 4))]
    degree = 5 if found.tail and found.body.plain else 7
    if skinny:
        good = [("skinny", 1, nv, 128, 64, 2, 1, 1) for nv in (4, 2, 1)] + good
    start: list[Point] = [dict(zip(axes, (*row, degree), strict=True)) for row in good if row[-1] in axes["PACK"]]

    def make(builder: PlanBuilder, args: Args, point: Point) -> tuple[str, list[Tensor]]:
        outs = [builder.empty_output(place) for place in range(len(task.graph.outputs))]
        writer = _Writer(found, builder, args, outs, point, lanes)
        return (writer.skinny() if point["algorithm"] == "skinny" else writer.tiles()), outs

    def moves(point: Point) -> tuple[str, ...]:
        if point["algorithm"] == "skinny":
            return ("read-weight-once",)
        tail = ["row-logsumexp-epilogue"] if found.tail else ["pointwise-epilogue"] if not found.body.plain else []
        return (
            f"register-tile-{point['MR']}x{point['NV']}",
            "block-summation",
            *(["pack-operand"] if point["PACK"] else []),
            *tail,
        )

    def helpers(point: Point) -> str:
        return TRANSPOSE + TILES + (SKINNY if point["algorithm"] == "skinny" else "")

    return cpp_space(
        NAME, task, lanes, axes, [point for point in start if valid(point)][:8], make, valid, moves, helpers
    )


def _room(floats: str) -> str:
    """An aligned block of so many floats."""
    return f"(float*)aligned_alloc(64, ({floats} + 15) / 16 * 64)"


class _Writer:
    def __init__(
        self, found: Matmul, builder: PlanBuilder, args: Args, outs: list[Tensor], point: Point, lanes: int
    ) -> None:
        self.lanes = lanes
        self.found, self.builder, self.args, self.outs, self.point = found, builder, args, outs, point
        self.batch, self.m, self.n, self.k = (args.size(size) for size in found.sizes)
        self.names = ("i0", "i1", "c") if len(found.left.shape) == 3 else ("i1", "c")
        self.a = f"{args.input(found.left.index)} + {args.address(found.first[:1], ('i0',))}"
        self.b = f"{args.input(found.right.index)} + {args.address(found.second[:1], ('i0',))}"
        self.sa, self.sb = ([args.size(s) for s in side[1:]] for side in (found.first, found.second))
        self.work = args.size(simplify(numel(found.sizes)))

    def value(self, tail: str) -> list[str]:
        """The product's vector `sum` with the bias as `acc`, and the statements behind it."""
        found, added = self.found, "sum"
        if found.bias is not None:
            where = f"{self.args.input(found.bias.index)} + {self.args.address(found.bias_strides, ('i0', 'i1', 'c'))}"
            added = f"sum + {load_text(self.args, where, found.bias_strides[2], tail)}"
        return [
            f"const kv::vf acc = {added};",
            *statements(self.args, found.body, self.names, len(self.names) - 1, tail),
        ]

    def finish(self, tail: str) -> list[str]:
        return [
            *self.value(tail),
            *stores(self.args, self.found.body, self.names, len(self.names) - 1, self.outs, tail),
        ]

    # Tiles

    def tiles(self) -> str:
        p, tail = self.point, self.found.tail
        chunks = str(CHUNKS) if tail else "cut" if p["LEFT"] == 1 else "blocks"
        part = self.args.tensor(self.builder.empty((2, CHUNKS, self.found.sizes[1]), "float64")) if tail else ""
        a_size, own = "strips * MR * deep * kblocks", "tall * MR * deep * kblocks"
        lines = [
            f"constexpr int MR = {p['MR']}, NV = {p['NV']}, NR = NV * kv::L;",
            f"constexpr int64_t STRIPS = ({p['MC']} + MR - 1) / MR, PANELS = {p['PANELS']};",
            *self.cuts(),
            *([] if tail else self.share()),
            f"const int64_t chunks = {chunks}, items = {self.batch} * mblocks * chunks;",
            *([f"float* const lefts = {_room(f'{self.batch} * {a_size}')};"] if p["LEFT"] == 2 else []),
            f"#pragma omp parallel if ({self.work} > {SMALL})",
            "{",
            f"float* const packed = {_room('deep * NR')};",
            *([f"float* const lefts = {_room(own)};"] if p["LEFT"] == 1 else []),
            f"float* const held = {'true' if tail else 'kblocks > 1'} ? {_room('tall * MR * PANELS * NR')} : nullptr;",
            *(["kv::Row* const state = (kv::Row*)aligned_alloc(64, tall * MR * sizeof(kv::Row));"] if tail else []),
            *(self.pack_all() if p["LEFT"] == 2 else []),
            "#pragma omp for schedule(dynamic)",
            "for (int64_t item = 0; item < items; item++) {",
            "const int64_t i0 = item / (mblocks * chunks), chunk = item / mblocks % chunks; (void)i0;",
            "const int64_t strip0 = item % mblocks * tall, high = std::min<int64_t>(tall, strips - strip0);",
            *(self.pack_own() if p["LEFT"] == 1 else []),
            *(["for (int64_t m = 0; m < high * MR; m++) state[m].clear();"] if tail else []),
            "const int64_t begin = chunk * panels / chunks, end = (chunk + 1) * panels / chunks;",
            "for (int64_t p0 = begin; p0 < end; p0 += PANELS)",
            *self.block(),
            *(self.parts(part) if tail else []),
            "}",
            "free(packed); free(held);",
            *(["free(lefts);"] if p["LEFT"] == 1 else []),
            *(["free(state);"] if tail else []),
            "}",
            *(["free(lefts);"] if p["LEFT"] == 2 else []),
        ]
        return "\n".join([*lines, *(self.joined(part) if tail else [])])

    def cuts(self) -> list[str]:
        """Strips of MR rows in blocks of `tall`, panels of NR columns, K in blocks of `deep`: all cut evenly."""
        return [
            f"const int64_t strips = ({self.m} + MR - 1) / MR, panels = ({self.n} + NR - 1) / NR;",
            "const int64_t tall = (strips + (strips + STRIPS - 1) / STRIPS - 1) / ((strips + STRIPS - 1) / STRIPS);",
            "const int64_t mblocks = (strips + tall - 1) / tall;",
            f"const int64_t pieces = ({self.k} + {self.point['KC']} - 1) / {self.point['KC']};",
            f"const int64_t deep = (({self.k} + pieces - 1) / pieces + kv::L - 1) / kv::L * kv::L;",
            f"const int64_t kblocks = ({self.k} + deep - 1) / deep, threads = omp_get_max_threads();",
        ]

    def share(self) -> list[str]:
        """Items for all threads: as many blocks of columns for each; where an item packs its rows, few."""
        if self.point["LEFT"] == 1:
            some = f"(8 * threads + {self.batch} * mblocks - 1) / ({self.batch} * mblocks)"
            return [f"const int64_t cut = std::min<int64_t>(panels, {some});"]
        even = "((panels + PANELS - 1) / PANELS + threads - 1) / threads * threads"
        return [f"const int64_t blocks = std::min<int64_t>(panels, {even});"]

    def pack_left(self, rows: str, to: str) -> str:
        """One strip of A, one block of K."""
        at = f"{self.a} + ({rows}) * MR * {self.sa[0]} + kb * deep * {self.sa[1]}"
        return (
            f"kv::pack_rows<MR>({at}, {self.sa[0]}, {self.sa[1]}, std::min<int64_t>(MR, {self.m} - ({rows}) * MR), "
            f"std::min<int64_t>(deep, {self.k} - kb * deep), lefts + ({to}) * MR * deep);"
        )

    def pack_all(self) -> list[str]:
        """A for all threads; a strip's blocks of K one after the other, so that its rows are read straight on."""
        return [
            "#pragma omp for schedule(static)",
            f"for (int64_t t = 0; t < {self.batch} * strips; t++)",
            "for (int64_t kb = 0; kb < kblocks; kb++) {",
            "const int64_t i0 = t / strips; (void)i0;",
            self.pack_left("t % strips", "(i0 * kblocks + kb) * strips + t % strips"),
            "}",
        ]

    def pack_own(self) -> list[str]:
        return [
            "for (int64_t kb = 0; kb < kblocks; kb++) for (int64_t s = 0; s < high; s++)",
            self.pack_left("strip0 + s", "kb * tall + s"),
        ]

    def block(self) -> list[str]:
        """Panels p0 .. p0 + PANELS of `high` strips: K in blocks; what follows a tile is done at once."""
        found = self.found
        b_at = f"{self.b} + k0 * {self.sb[0]} + n0 * {self.sb[1]}"
        pack = f"kv::pack<NV>({b_at}, {self.sb[0]}, {self.sb[1]}, depth, cols, packed);"
        place = {2: "((i0 * kblocks + kb) * strips + strip0 + s)", 1: "(kb * tall + s)"}.get(
            int(self.point["LEFT"]), ""
        )
        left = f"lefts + {place} * MR * deep" if place else f"{self.a} + m0 * {self.sa[0]} + k0"
        if self.point["PACK"]:
            right, step = [pack, "const float* const right = packed;"], "NR"
        else:
            right, step = (
                [
                    f"const float* right = {b_at}; int64_t ldb = {self.sb[0]};",
                    f"if (cols < NR) {{ {pack} right = packed; ldb = NR; }}",
                ],
                "ldb",
            )
        fixed = "NR" if self.point["PACK"] else "0"
        call = f"kv::tile<MR, NV, true, {fixed}>(" if place else f"kv::Rows<MR, NV, {fixed}>::run(rows, "
        call += f"{left}, {self.sa[0]}, right, {step}, depth, kb ? mine : nullptr, "
        a_now, b_now = f"{self.a} + m0 * {self.sa[0]}", f"{self.b} + n0 * {self.sb[1]}"
        again = f"{a_now}, {self.sa[0]}, {self.sa[1]}, {b_now}, {self.sb[0]}, {self.sb[1]}, {self.k}"
        return [
            "for (int64_t kb = 0; kb < kblocks; kb++) {",
            f"const int64_t k0 = kb * deep, depth = std::min<int64_t>(deep, {self.k} - k0);",
            "const bool last = kb + 1 == kblocks;",
            "const int64_t stop = std::min(end, p0 + PANELS);",
            "for (int64_t q = p0; q < stop; q++) {",
            f"const int64_t n0 = q * NR, cols = std::min<int64_t>(NR, {self.n} - n0);",
            *right,
            *(self.ahead() if self.point["PACK"] else []),
            "for (int64_t s = 0; s < high; s++) {",
            *(["for (int64_t t = 0; t < each; t++) ahead.next();"] if self.point["PACK"] else []),
            f"const int64_t m0 = (strip0 + s) * MR; const int rows = (int)std::min<int64_t>(MR, {self.m} - m0);",
            "float* const mine = held + ((q - p0) * tall + s) * MR * NR;",
            *([] if found.tail else ["alignas(64) float hot[MR * NR];", "float* const to = last ? hot : mine;"]),
            *([] if found.tail else self.touch()),
            f"if (!{call}{'mine' if found.tail else 'to'}, last))",
            f"kv::again_tile<NV>({'mine' if found.tail else 'to'}, rows, cols, {again});",
            *([] if found.tail else self.finish_tile()),
            "} }",
            *(self.add_rows() if found.tail else []),
            "}",
        ]

    def touch(self) -> list[str]:
        """Asks for the lines that a tile's end reads and writes, before it is summed."""
        found, args = self.found, self.args
        reads = [(args.input(load.leaf.index), load.strides, 0) for load in found.body.loads]
        if found.bias is not None:
            reads.append((args.input(found.bias.index), found.bias_strides, 0))
        writes = [(args.tensor(self.outs[store.place]), store.strides, 1) for store in found.body.stores]
        lines = []
        for pointer, strides, write in [*reads, *writes]:
            batch, row, column = (0, *strides)[-3:]
            if row != 0 and column == 1:
                at = args.address((batch, row, column), ("i0", "(m0 + i)", "n0"))
                lines.append(f"__builtin_prefetch({pointer} + {at}, {write});")
        return ["if (last) for (int i = 0; i < rows; i++) {", *lines, "}"] if lines else []

    def ahead(self) -> list[str]:
        """`ahead`: what this thread packs next, fetched meanwhile: the next panel, the first one of the next block of
        K, or the first one of its next item, if every thread takes one in turn."""
        sk, sn = self.sb
        return [
            "const int64_t further = stop < end ? stop : end + (threads - 1) * (end - begin);",
            "const int64_t k1 = q + 1 < stop ? k0 : last ? 0 : k0 + deep;",
            "const int64_t n1 = (q + 1 < stop ? q + 1 : last ? further : p0) * NR;",
            f"const int64_t depth1 = std::min<int64_t>(deep, {self.k} - k1);",
            f"const int64_t cols1 = std::min<int64_t>(NR, {self.n} - n1);",
            f"kv::Ahead ahead({self.b} + k1 * {sk} + n1 * {sn}, {sk}, {sn}, depth1, cols1);",
            "const int64_t each = (ahead.lines() + high - 1) / high;",
        ]

    def ragged(self) -> bool:
        """Whether the last panel has columns that do not exist."""
        n, wide = self.found.sizes[2], int(self.point["NV"]) * self.lanes
        return not isinstance(n, int) or n % wide != 0

    def finish_tile(self) -> list[str]:
        """What follows the product, of a tile that has just been summed."""
        whole = [
            "for (int j = 0; j < NV; j++) { const int64_t c = n0 + j * kv::L;",
            "const kv::vf sum = kv::load(hot + (i * NV + j) * kv::L);",
            *self.finish(""),
            "}",
        ]
        tail = [
            "for (int j = 0; j * kv::L < cols; j++) { const int64_t c = n0 + j * kv::L;",
            "const int n = (int)std::min<int64_t>(kv::L, cols - j * kv::L);",
            "const kv::vf sum = kv::load(hot + (i * NV + j) * kv::L);",
            *self.finish("n"),
            "}",
        ]
        both = ["if (cols == NR) {", *whole, "} else {", *tail, "}"] if self.ragged() else whole
        return ["if (last) for (int i = 0; i < rows; i++) { const int64_t i1 = m0 + i; (void)i1;", *both, "}"]

    def add_rows(self) -> list[str]:
        """The rows of a block of columns, to their maxima and sums."""
        text = self.found.body.stores[0].text
        read = "const kv::vf sum = kv::load(at + j * kv::L);"
        keep = "big = kv::max(x[count], big); part = part + kv::exp_low(x[count++] - off); }"
        whole = [
            "#pragma GCC unroll 8",
            "for (int j = 0; j < NV; j++) { const int64_t c = n0 + j * kv::L; (void)c;",
            read,
            *self.value(""),
            f"x[count] = {text};",
            keep,
        ]
        tail = [
            "for (int j = 0; j * kv::L < cols; j++) { const int64_t c = n0 + j * kv::L; (void)c;",
            "const int n = (int)std::min<int64_t>(kv::L, cols - j * kv::L);",
            read,
            *self.value("n"),
            f"x[count] = kv::select(kv::first(n), {text}, kv::splat(-__builtin_inff()));",
            keep,
        ]
        return [
            f"if (last) for (int64_t m = 0; m < std::min<int64_t>(high * MR, {self.m} - strip0 * MR); m++) {{",
            "const int64_t i1 = strip0 * MR + m; int count = 0; (void)i1;",
            "kv::vf x[PANELS * NV], big = kv::splat(-__builtin_inff()), part(0.0f);",
            "const kv::vf off(state[m].off);",
            "for (int64_t q = p0; q < stop; q++) {",
            f"const int64_t n0 = q * NR, cols = std::min<int64_t>(NR, {self.n} - n0); (void)cols;",
            "const float* const at = held + ((q - p0) * tall * MR + m) * NR;",
            *(["if (cols == NR) {", *whole, "} else {", *tail, "}"] if self.ragged() else whole),
            "}",
            "state[m].add(big, part, x, count); }",
        ]

    def parts(self, part: str) -> list[str]:
        """Part of a row: columns of one chunk of CHUNKS; (maximum, sum) per part, joined at the end."""
        at = f"{part} + chunk * {self.m} + strip0 * MR"
        return [
            f"for (int64_t m = 0; m < std::min<int64_t>(high * MR, {self.m} - strip0 * MR); m++) {{",
            f"({at})[m] = state[m].most(); ({at})[{CHUNKS} * {self.m} + m] = state[m].total(); }}",
        ]

    def joined(self, part: str) -> list[str]:
        """The parts of each row joined, the picked column, the work per row, then what hangs on sums over all rows."""
        args, tail = self.args, self.found.tail
        assert tail is not None
        finite = 'sum > 0 && sum < __builtin_inf() ? (float)sum : __builtin_nanf("")'
        scratch = [args.tensor(self.builder.empty((self.found.sizes[1],), each.dtype)) for each in tail.sums]
        lines = [
            f"#pragma omp parallel for schedule(static) if ({self.work} > {SMALL})",
            f"for (int64_t r = 0; r < {self.m}; r += kv::L) {{",
            f"const int n = (int)std::min<int64_t>(kv::L, {self.m} - r); kv::vf top(0.0f), total(1.0f);",
            "for (int j = 0; j < n; j++) { double most = -__builtin_inf(), sum = 0;",
            f"for (int64_t h = 0; h < {CHUNKS}; h++) kv::join(most, sum, {part}[h * {self.m}",
            f"+ r + j], {part}[({CHUNKS} + h) * {self.m} + r + j]);",
            "top.v[j] = (float)kv::safe(most);",
            f"total.v[j] = {'(float)sum' if tail.guarded else finite}; }}",
            *(self.picked(tail.column) if tail.column is not None else []),
            *statements(args, tail.rows, ("r",), 0, "n"),
            *stores(args, tail.rows, ("r",), 0, self.outs, "n"),
        ]
        for each, name in zip(tail.sums, scratch, strict=True):
            kind = "float" if each.dtype == "float32" else "int"
            lines.append(f"kv::store_n({name} + r, kv::to_{kind}({each.text}), n);")
        lines.append("}")
        return [*lines, *(self.over_rows(scratch) if tail.sums else [])]

    def picked(self, column: Body) -> list[str]:
        """`picked`: the value whose rows are reduced, in a row's own column, from the operands."""
        left = f"{self.a} + i1 * {self.sa[0]}, {self.sa[1]}"
        return [
            "kv::vi place;",
            "{",
            *statements(self.args, column, ("r",), 0, "n"),
            f"place = {column.stores[0].text}; }}",
            "kv::vf picked(0.0f);",
            "for (int j = 0; j < n; j++) { const int64_t i0 = 0, i1 = r + j, c = place.v[j]; (void)i0;",
            f"const kv::vf sum((float)kv::dot({left}, {self.b} + c * {self.sb[1]}, {self.sb[0]}, {self.k}));",
            *self.value("1"),
            f"const kv::vf here = {self.found.body.stores[0].text}; picked.v[j] = here.v[0]; }}",
        ]

    def over_rows(self, scratch: list[str]) -> list[str]:
        """Sums over all rows in one thread and in double, so that they do not depend on the threads."""
        args, tail = self.args, self.found.tail
        assert tail is not None and tail.last is not None
        lines = ["{"]
        for place, (each, name) in enumerate(zip(tail.sums, scratch, strict=True)):
            held, kind = ("double", "kv::vf((float)") if each.dtype == "float32" else ("int64_t", "kv::vi(")
            over = f" / (double){self.m}" if each.mean else ""
            lines += [
                f"{held} s{place} = 0; for (int64_t r = 0; r < {self.m}; r++) s{place} += {name}[r];",
                f"const auto f{place} = {kind}(s{place}{over}));",
            ]
        body = [*statements(args, tail.last, ("0",), 0, "1"), *stores(args, tail.last, ("0",), 0, self.outs, "1")]
        return [*lines, *body, "}"]

    # Skinny

    def skinny(self) -> str:
        """L columns at a time; R rows of the weight against all rows of A at once."""
        rows, r = self.m, int(self.point["NV"])
        names = [f"from[{j}] = weight + std::min<int64_t>(c + g + {j}, {self.n} - 1) * {self.sb[1]};" for j in range(r)]
        again = f"{self.a} + i1 * {self.sa[0]}, {self.sa[1]}, {self.b} + c * {self.sb[1]}, {self.sb[0]}, {self.sb[1]}"
        dtype = {"float32": "float", "bfloat16": "kv::bf16", "float16": "kv::fp16"}[self.found.right.dtype]
        return "\n".join([
            f"const int64_t strips = ({self.n} + kv::L - 1) / kv::L;",
            f"#pragma omp parallel for schedule(static) if ({self.work} > {SMALL})",
            f"for (int64_t t = 0; t < {self.batch} * strips; t++) {{",
            "const int64_t i0 = t / strips, c = t % strips * kv::L; (void)i0;",
            f"const {dtype}* weight = {self.b}; float out[{rows}][kv::L];",
            f"for (int g = 0; g < kv::L; g += {r}) {{ const {dtype}* from[{r}]; {' '.join(names)}",
            f"kv::dots<{rows}, {r}>({self.a}, {self.sa[0]}, from, {self.k}, &out[0][g], kv::L); }}",
            f"const int n = (int)std::min<int64_t>(kv::L, {self.n} - c);",
            f"for (int64_t i1 = 0; i1 < {rows}; i1++) {{ kv::vf sum = kv::load(out[i1]);",
            f"if (!kv::finite(sum)) sum = kv::again(sum, {again}, {self.k}, n);",
            "if (n == kv::L) {",
            *self.finish(""),
            "} else {",
            *self.finish("n"),
            "} } }",
        ])  # fmt: skip
