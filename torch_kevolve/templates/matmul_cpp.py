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
    """`mm`, `addmm`, `bmm`, `baddbmm` with a pointwise or row-logsumexp epilogue."""

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
        "MC": (64, 128, 512),
        "PANELS": (2, 4, 8),
        "LEFT": (0, 1) if straight else (1,),
        "PACK": (1, 0) if direct else (1,),
        "DEGREE": (7, 6),
    }

    def valid(point: Point) -> bool:
        mr, nv = int(point["MR"]), int(point["NV"])
        registers = 32 if lanes == 16 else 16
        if point["algorithm"] == "skinny":
            rest = tuple(point[name] for name in ("KC", "MC", "PANELS", "LEFT", "PACK", "DEGREE"))
            return (mr, *rest) == (1, 128, 64, 2, axes["LEFT"][-1], 1, 7)
        return mr * nv + nv < registers and (not isinstance(rows, int) or mr < 2 * rows)

    big = [(8, 2), (12, 2), (6, 4)] if lanes == 16 else [(6, 2), (4, 2)]
    near = int(axes["LEFT"][0])
    good = [("tiles", mr, nv, 128, mc, panels, 1, 1) for mr, nv in big for mc, panels in ((128, 8), (512, 4))]
    good += [("tiles", mr, nv, 128, 128, 4, near, 0) for mr, nv in big]
    good += [("tiles", mr, nv, 128, 64, 2, near, 1) for mr, nv in ((4, 2), (2, 4), (1, 4))]
    if skinny:
        good = [("skinny", 1, nv, 128, 64, 2, 1, 1) for nv in (4, 2, 1)] + good
    start: list[Point] = [dict(zip(axes, (*row, 7), strict=True)) for row in good if row[-1] in axes["PACK"]]

    def make(builder: PlanBuilder, args: Args, point: Point) -> tuple[str, list[Tensor]]:
        places = len((found.tail or found.body).stores)
        outs = [builder.empty_output(place) for place in range(places)]
        writer = _Writer(found, builder, args, outs, point)
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


class _Writer:
    def __init__(self, found: Matmul, builder: PlanBuilder, args: Args, outs: list[Tensor], point: Point) -> None:
        self.found, self.builder, self.args, self.outs, self.point = found, builder, args, outs, point
        self.batch, self.m, self.n, self.k = (args.size(size) for size in found.sizes)
        self.names = ("i0", "i1", "c") if len(found.left.shape) == 3 else ("i1", "c")
        self.a = f"{args.input(found.left.index)} + {args.address(found.first[:1], ('i0',))}"
        self.b = f"{args.input(found.right.index)} + {args.address(found.second[:1], ('i0',))}"
        self.sa, self.sb = ([args.size(s) for s in side[1:]] for side in (found.first, found.second))
        self.work = args.size(simplify(numel(found.sizes)))
        self.packs_left = bool(point["LEFT"])

    def value(self, tail: str) -> list[str]:
        """The product's vector `acc` in the tile, with the bias, and the statements behind it."""
        found = self.found
        more = f"+ i1 * {self.sa[0]}, {self.sa[1]}, {self.b} + c * {self.sb[1]}, {self.sb[0]}, {self.sb[1]}"
        lines = [
            "const kv::vf whole = kv::finite(sum) ? sum :",
            f"kv::again(sum, {self.a} {more}, {self.k}, {tail or 'kv::L'});",
        ]
        added = "whole"
        if found.bias is not None:
            where = f"{self.args.input(found.bias.index)} + {self.args.address(found.bias_strides, ('i0', 'i1', 'c'))}"
            added = f"whole + {load_text(self.args, where, found.bias_strides[2], tail)}"
        lines.append(f"const kv::vf acc = {added};")
        return lines + statements(self.args, found.body, self.names, len(self.names) - 1, tail)

    def finish(self, tail: str) -> list[str]:
        return [
            *self.value(tail),
            *stores(self.args, self.found.body, self.names, len(self.names) - 1, self.outs, tail),
        ]

    # Tiles

    def tiles(self) -> str:
        p = self.point
        constants = [f"constexpr int MR = {p['MR']}, NV = {p['NV']}, NR = NV * kv::L;",
                     f"constexpr int64_t KC = {p['KC']}, MC = {p['MC']}, NC = {p['PANELS']} * NR;"]  # fmt: skip
        sizes = [f"const int64_t mblocks = ({self.m} + MC - 1) / MC, nblocks = ({self.n} + NC - 1) / NC;",
                 f"const int64_t tall = std::min<int64_t>(MC, {self.m});"]  # fmt: skip
        left_room = "(float*)aligned_alloc(64, tall * KC * 4)"
        room = ["float* packed = (float*)aligned_alloc(64, KC * NC * 4 + 64);",
                "float* tile = (float*)aligned_alloc(64, (tall * NC * 4 + 63) / 64 * 64);",
                *([f"float* rows_of_a = {left_room};"] if self.packs_left else [])]  # fmt: skip
        rest = ["free(packed); free(tile);", *(["free(rows_of_a);"] if self.packs_left else [])]
        inner = self.logsumexp_items() if self.found.tail else self.plain_items()
        head = inner[0]
        lines = [
            *constants,
            *sizes,
            *head,
            f"#pragma omp parallel if ({self.work} > {SMALL})",
            "{",
            *room,
            *inner[1],
            *rest,
            "}",
        ]
        return "\n".join([*lines, *inner[2]])

    def block(self) -> list[str]:
        """Fill `tile` with rows m0 .. m0 + rows of columns n0 .. n0 + cols, K in blocks."""
        left = "rows_of_a, KC" if self.packs_left else f"{self.a} + m0 * {self.sa[0]} + k0, {self.sa[0]}"
        start, step = left.split(", ")
        pack_left = [
            f"kv::pack_rows({self.a} + m0 * {self.sa[0]}",
            f"+ k0 * {self.sa[1]}, {self.sa[0]}, {self.sa[1]}, rows, depth, rows_of_a, KC);",
        ]
        b_at = f"{self.b} + k0 * {self.sb[0]} + (n0 + q) * {self.sb[1]}"
        pack = f"kv::pack<NV>({b_at}, {self.sb[0]}, {self.sb[1]}, depth, cols - q, packed + q * KC); "
        pack += "right = packed + q * KC; ldb = NR;"
        direct = f"if (q + NR <= cols) {{ right = {b_at}; ldb = {self.sb[0]}; }} else {{ {pack} }}"
        return [
            f"for (int64_t k0 = 0; k0 < {self.k}; k0 += KC) {{",
            f"const int64_t depth = std::min<int64_t>(KC, {self.k} - k0);",
            *(pack_left if self.packs_left else []),
            "for (int64_t q = 0; q < cols; q += NR) {",
            "const float* right; int64_t ldb;",
            pack if self.point["PACK"] else direct,
            "for (int64_t m = 0; m < rows; m += MR)",
            f"kv::Tile<MR, NV>::run((int)std::min<int64_t>(MR, rows - m), {start}",
            f"+ m * {step}, {step}, right, ldb, depth, tile + m * NC + q, NC, k0 == 0);",
            "} }",
        ]

    def plain_items(self) -> tuple[list[str], list[str], list[str]]:
        body = [
            "#pragma omp for schedule(static)",
            f"for (int64_t item = 0; item < {self.batch} * mblocks * nblocks; item++) {{",
            "const int64_t i0 = item / (mblocks * nblocks); (void)i0;",
            "const int64_t m0 = item / nblocks % mblocks * MC, n0 = item % nblocks * NC;",
            f"const int64_t rows = std::min<int64_t>(MC, {self.m} - m0), cols = std::min<int64_t>(NC, {self.n} - n0);",
            *self.block(),
            "for (int64_t m = 0; m < rows; m++) {",
            "const int64_t i1 = m0 + m; int64_t q = 0; (void)i1;",
            "for (; q + kv::L <= cols; q += kv::L) { const int64_t c = n0 + q;",
            "const kv::vf sum = kv::load(tile + m * NC + q);",
            *self.finish(""),
            "}",
            "if (q < cols) { const int64_t c = n0 + q; const int n = (int)(cols - q);",
            "const kv::vf sum = kv::load(tile + m * NC + q);",
            *self.finish("n"),
            "} } }",
        ]
        return [], body, []

    def logsumexp_items(self) -> tuple[list[str], list[str], list[str]]:
        """Part of a row: columns `chunk` of CHUNKS; (maximum, sum) per part, joined at the end."""
        found, args = self.found, self.args
        assert found.tail is not None
        part = args.tensor(self.builder.empty((2, CHUNKS, found.sizes[1]), "float64"))
        text = found.body.stores[0].text
        at = f"{part} + chunk * {self.m} + m0"
        body = [
            "double* tops = (double*)aligned_alloc(64, (tall * 16 + 63) / 64 * 64); double* sums = tops + tall;",
            "#pragma omp for schedule(dynamic)",
            f"for (int64_t item = 0; item < mblocks * {CHUNKS}; item++) {{",
            f"const int64_t i0 = 0, m0 = item / {CHUNKS} * MC, chunk = item % {CHUNKS}; (void)i0;",
            f"const int64_t rows = std::min<int64_t>(MC, {self.m} - m0);",
            "for (int64_t m = 0; m < rows; m++) { tops[m] = -__builtin_inf(); sums[m] = 0; }",
            f"for (int64_t nb = chunk * nblocks / {CHUNKS}; nb < (chunk + 1) * nblocks / {CHUNKS}; nb++) {{",
            f"const int64_t n0 = nb * NC, cols = std::min<int64_t>(NC, {self.n} - n0);",
            *self.block(),
            "for (int64_t m = 0; m < rows; m++) { const int64_t i1 = m0 + m; (void)i1;",
            "kv::vf most = kv::splat(-__builtin_inff());",
            "for (int64_t q = 0; q < cols; q += kv::L) { const int64_t c = n0 + q;",
            "const int n = (int)std::min<int64_t>(kv::L, cols - q);",
            "const kv::vf sum = kv::load(tile + m * NC + q); float* kept = tile + m * NC + q;",
            *self.value("n"),
            f"const kv::vf x = kv::select(kv::first(n), {text}, kv::splat(-__builtin_inff()));",
            "kv::store(kept, x); most = kv::max_nan(most, x); }",
            "const double top = kv::hmax_nan(most); const kv::vf off = kv::splat((float)kv::safe(top));",
            "kv::dv sum = {};",
            "for (int64_t q = 0; q < cols; q += kv::L) sum += kv::wide(kv::exp(kv::load(tile + m * NC + q) - off));",
            "kv::join(tops[m], sums[m], top, kv::hsum(sum)); }",
            "}",
            f"for (int64_t m = 0; m < rows; m++) {{ ({at})[m] = tops[m]; ({at})[{CHUNKS} * {self.m} + m] = sums[m]; }}",
            "}",
            "free(tops);",
        ]
        last = [
            f"for (int64_t c = 0; c < {self.m}; c += kv::L) {{",
            f"const int n = (int)std::min<int64_t>(kv::L, {self.m} - c); kv::vf acc = kv::vf(0.0f);",
            "for (int j = 0; j < n; j++) { double top = -__builtin_inf(), sum = 0;",
            f"for (int64_t h = 0; h < {CHUNKS}; h++) kv::join(top, sum, {part}[h * {self.m}",
            f"+ c + j], {part}[({CHUNKS} + h) * {self.m} + c + j]);",
            "acc.v[j] = (float)(std::log(sum) + kv::safe(top)); }",
            *statements(args, found.tail, ("c",), 0, "n"),
            *stores(args, found.tail, ("c",), 0, self.outs, "n"),
            "}",
        ]
        return [], body, last

    # Skinny

    def skinny(self) -> str:
        """L columns at a time; R rows of the weight against all rows of A at once."""
        rows, r = self.m, int(self.point["NV"])
        names = [f"from[{j}] = weight + std::min<int64_t>(c + g + {j}, {self.n} - 1) * {self.sb[1]};" for j in range(r)]
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
            f"for (int64_t i1 = 0; i1 < {rows}; i1++) {{ const kv::vf sum = kv::load(out[i1]);",
            "if (n == kv::L) {",
            *self.finish(""),
            "} else {",
            *self.finish("n"),
            "} } }",
        ])  # fmt: skip
