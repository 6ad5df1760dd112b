"""Row passes: the kernels of a row program from its levels."""

from __future__ import annotations

from collections.abc import Iterator

from torch_kevolve.errors import PlanError
from torch_kevolve.plan import Tensor
from torch_kevolve.sizes import Size, simplify
from torch_kevolve.templates.expr import Term
from torch_kevolve.templates.row_emit import COMBINE, FIRST, Scope, finished, joined, kinds
from torch_kevolve.templates.row_kernel import RowKernel
from torch_kevolve.templates.row_levels import behind, online_pairs, shift_form
from torch_kevolve.templates.rows import Reduce

SPLITS = 128


class Render(RowKernel):
    """One candidate, by its algorithm."""

    def done(self) -> tuple[str, list[Tensor]]:
        self.open("r0")
        algorithms = {"resident": self.resident, "loop": self.loop, "split": self.split}
        algorithms[str(self.point["algorithm"])]()
        return COMBINE + "\n\n" + "\n\n".join(self.texts), self.outs

    # ---- resident

    def resident(self) -> None:
        length = self.program.row_size
        ragged = length != self.block
        self.rows.lines.append("c = tl.arange(0, BLOCK)[None, :]")
        if ragged:
            self.rows.lines.append(f"inside = c < {self.params.size(length)}")
        tile = Scope("c", self.tile_mask(ragged), self.rows.lines, policy=FIRST)
        for reduce in self.reduces:
            self.reduce_now(reduce, tile)
        self.store_elements(tile)
        self.close("rows")

    def reduce_now(self, reduce: Reduce, tile: Scope) -> None:
        value = self.emit.value(reduce.source, tile)
        out = f"s{reduce.op}"
        lines = self.rows.lines
        if reduce.kind in ("var", "var_mean"):
            lines.append(f"{out}_x = {self.only(tile, value.text, '0.0')}")
            lines.append(f"{out}_mean = tl.sum({out}_x, 1, keep_dims=True) / {self.params.size(reduce.count)}")
            lines.append(f"{out}_d = {self.only(tile, f'{value.text} - {out}_mean', '0.0')}")
            lines.append(f"{out}_m2 = tl.sum({out}_d * {out}_d, 1, keep_dims=True)")
            self.set_variance(reduce, out)
            return
        values = self.inputs(reduce, value, tile)
        names = []
        for i, text in enumerate(values):
            lines.append(f"{out}_{i} = {text}")
            names.append(f"{out}_{i}")
        lines += finished(reduce, names, out)
        self.set_result(reduce, out)

    # ---- loop

    def loop(self) -> None:
        pairs = online_pairs(self.program, self.reduces)
        turn = 0
        for mine in self.stages(pairs):
            self.one_pass(mine, pairs, turn)
            turn += 1
        if any(self.program.level(out.ref.index) == "element" for out in self.program.outputs):
            self.last_pass(turn)
        self.close("rows")

    def stages(self, pairs: dict[int, Reduce]) -> Iterator[list[Reduce]]:
        """The reductions that can be made together, stage after stage; those that ride along are left out."""
        taken: set[int] = set()
        for level in sorted({self.level[self.base + r.op] for r in self.reduces}):
            mine = [r for r in self.reduces if self.level[self.base + r.op] == level and r.op not in taken]
            taken |= {pairs[r.op].op for r in mine if r.op in pairs}
            if mine:
                yield mine

    def piece(self, turn: int, length: Size) -> tuple[list[str], str, Scope]:
        """(head of the loop, its first statements, the tile's scope) of one pass."""
        ragged = not (isinstance(length, int) and length % self.block == 0)
        size = self.params.size(length)
        backward = turn % 2 == 1 and self.point["order"] == "reverse"
        head = f"for k in range(0, tl.cdiv({size}, BLOCK)):"
        at = f"(tl.cdiv({size}, BLOCK) - 1 - k)" if backward else "k"
        first = [f"c = {at} * BLOCK + tl.arange(0, BLOCK)[None, :]"]
        if ragged:
            first.append(f"inside = c < {size}")
        return first, head, Scope("c", self.tile_mask(ragged), [], first=(f"{at} * BLOCK", self.block))

    def one_pass(self, mine: list[Reduce], pairs: dict[int, Reduce], turn: int) -> None:
        self.rows.lines += self.over_row(mine, pairs, turn)
        self.settle(mine, pairs)

    def over_row(self, mine: list[Reduce], pairs: dict[int, Reduce], turn: int) -> list[str]:
        """The statements that read a whole row and leave what `settle` makes known."""
        length = self.program.row_size
        first, head, tile = self.piece(turn, length)
        before: list[str] = []
        after: list[str] = []
        for reduce in mine:
            value = self.emit.value(reduce.source, tile)
            if reduce.op in pairs:
                self.add_online(reduce, pairs[reduce.op], value, tile, before, after)
            elif reduce.kind in ("var", "var_mean"):
                self.add_variance(reduce, value, tile, before, after)
            else:
                names = [f"a{reduce.op}_{i}" for i in range(len(kinds(reduce, value.dtype)))]
                for name, (identity, held) in zip(names, kinds(reduce, value.dtype), strict=True):
                    before.append(f"{name} = tl.full([ROWS, BLOCK], {identity}, {held})")
                tile.lines += joined(reduce, names, self.inputs(reduce, value, tile))
                after += finished(reduce, names, f"s{reduce.op}")
        return [*before, head, *(f"    {line}" for line in [*first, *tile.lines]), *after]

    def settle(self, mine: list[Reduce], pairs: dict[int, Reduce]) -> None:
        """Makes known what finished statements have left under the reductions' names."""
        for reduce in mine:
            if reduce.op in pairs:
                self.set_online(reduce, pairs[reduce.op])
            elif reduce.kind in ("var", "var_mean"):
                self.set_variance(reduce, f"s{reduce.op}")
            else:
                self.set_result(reduce, f"s{reduce.op}")

    def add_online(
        self, top: Reduce, total: Reduce, value: Term, tile: Scope, before: list[str], after: list[str]
    ) -> None:
        m, s = f"m{top.op}", f"s{total.op}"
        before.append(f'{m} = tl.full([ROWS, 1], float("-inf"), tl.float32)')
        before += [f"{name} = tl.zeros([ROWS, 1], tl.float32)" for name in (s, f"{s}_rest")]
        x = self.only(tile, value.text, 'float("-inf")')
        tile.lines += [
            f"{m}_x = {x}",
            # A maximum that keeps NaN: a row with NaN and inf has the maximum NaN, which the sum cannot tell.
            f"{m}_new = kv_max({m}, tl.reduce({m}_x, 1, kv_max, keep_dims=True))",
            f'{m}_safe = tl.where({m}_new == float("-inf"), 0.0, {m}_new)',
            f"{s}_down = tl.exp({m} - {m}_safe)",
            f"{s}_more = tl.sum(tl.exp({m}_x - {m}_safe), 1, keep_dims=True)",
            f"{s}, {s}_rest = kv_add({s} * {s}_down, {s}_rest * {s}_down, {s}_more)",
            f"{m} = {m}_new",
        ]
        after.append(f"{s} += {s}_rest")

    def set_online(self, top: Reduce, total: Reduce) -> None:
        graph, m, s = self.program.graph, f"m{top.op}", f"s{total.op}"
        power = behind(self.program, total.source)
        less = behind(self.program, graph.ops[power].args[0]) if power is not None else None
        if less is None:
            raise PlanError(detail="the online pair is gone")
        form = shift_form(self.program, graph.ops[less].args[1], top)
        # Where the maximum is infinite the two forms of eager give NaN and inf.
        if form == "plain":
            edge = f'tl.where({m} == float("-inf"), float("nan"), {s})'
        else:
            edge = f'tl.where({m} == float("inf"), {m}, {s})'
        self.rows.memo[self.base + top.op, 0] = self.emit.bind(Term(m, "float32"), self.rows)
        self.rows.memo[self.base + total.op, 0] = self.emit.bind(Term(edge, "float32"), self.rows)

    # ---- the end of a kernel

    def add_variance(self, reduce: Reduce, value: Term, tile: Scope, before: list[str], after: list[str]) -> None:
        """Mean and squares of each piece around its own mean, joined piece by piece: one pass, no cancellation.

        (Welford per lane divides per element, which took the GroupNorm case to 0.6x.)
        """
        out = f"s{reduce.op}"
        n, mean, m2 = f"{out}_n", f"{out}_mean", f"{out}_m2"
        names = (n, mean, f"{mean}_rest", m2, f"{m2}_rest")
        before += [f"{name} = tl.zeros([ROWS, 1], tl.float32)" for name in names]
        after += [f"{mean} += {mean}_rest", f"{m2} += {m2}_rest"]
        tile.lines += [
            f"{out}_c = {self.elements_of(tile)}",
            f"{out}_u = tl.sum({self.only(tile, value.text, '0.0')}, 1, keep_dims=True) / {out}_c",
            f"{out}_d = {self.only(tile, f'{value.text} - {out}_u', '0.0')}",
            f"{out}_o = {out}_u - ({mean} + {mean}_rest)",
            f"{out}_more = tl.sum({out}_d * {out}_d, 1, keep_dims=True)",
            f"{out}_more += {out}_o * {out}_o * ({n} * {out}_c / ({n} + {out}_c))",
            f"{m2}, {m2}_rest = kv_add({m2}, {m2}_rest, {out}_more)",
            f"{mean}, {mean}_rest = kv_add({mean}, {mean}_rest, {out}_o * ({out}_c / ({n} + {out}_c)))",
            f"{n} += {out}_c",
        ]

    def elements_of(self, tile: Scope) -> str:
        """How many elements of a row a tile has, as fp32. (LLVM takes minutes over the sum of a mask's ones.)"""
        if "inside" not in tile.mask or tile.first is None:
            return "BLOCK * 1.0"
        return f"tl.minimum({self.params.size(self.program.row_size)} - {tile.first[0]}, BLOCK) * 1.0"

    def last_pass(self, turn: int) -> None:
        first, head, tile = self.piece(turn, self.program.row_size)
        if turn:
            tile.policy, tile.stream = FIRST, True
        self.store_elements(tile)
        self.rows.lines += [head, *(f"    {line}" for line in [*first, *tile.lines])]

    # ---- split

    def split(self) -> None:
        """A first kernel leaves SPLITS partial results per row, a second one joins them and does the rest."""
        length, rows = self.program.row_size, simplify(self.program.rows)
        size = self.params.size(length)
        tile = Scope("c", self.tile_mask(True), [])
        before: list[str] = []
        after: list[str] = []
        parts: dict[int, list[Tensor]] = {}
        for reduce in self.reduces:
            value = self.emit.value(reduce.source, tile)
            held = kinds(reduce, value.dtype)
            names = [f"a{reduce.op}_{i}" for i in range(len(held))]
            before += [
                f"{name} = tl.full([ROWS, BLOCK], {identity}, {kind})"
                for name, (identity, kind) in zip(names, held, strict=True)
            ]
            tile.lines += joined(reduce, names, self.inputs(reduce, value, tile))
            out = f"s{reduce.op}"
            after += finished(reduce, names, out)
            parts[reduce.op] = [self.builder.empty((SPLITS, rows), kind.removeprefix("tl.")) for _, kind in held]
            keep = f", mask={self.rows.mask}" if self.rows.mask else ""
            for i, part in enumerate(parts[reduce.op]):
                result = out if i == 0 else f"{out}_at"
                place = f"tl.program_id(1).to(tl.int64) * {self.params.size(rows)} + r"
                after.append(f"tl.store({self.params.tensor(part)} + {place}, {result}{keep})")
        body = ["c = at + tl.arange(0, BLOCK)[None, :]", f"inside = c < {size}", *tile.lines]
        self.rows.lines += [
            *before,
            f"piece = tl.cdiv(tl.cdiv({size}, BLOCK), {SPLITS}) * BLOCK",
            "first = tl.program_id(1) * piece",
            f"for at in range(first, tl.minimum(first + piece, {size}), BLOCK):",
            *(f"    {line}" for line in body),
            *after,
        ]
        grid = (self.builder.cdiv(rows, self.height), SPLITS)
        self.launch("partial", ("ROWS", "BLOCK"), grid, {"ROWS": self.height, "BLOCK": self.block})
        self.join(parts, rows)

    def join(self, parts: dict[int, list[Tensor]], rows: Size) -> None:
        self.height = min(self.height, 8)
        self.open("r1")
        lines = self.rows.lines
        lines.append(f"k = tl.arange(0, {SPLITS})[None, :]")
        keep = f", mask={self.rows.mask}, other=0" if self.rows.mask else ""
        for reduce in self.reduces:
            names = []
            for i, part in enumerate(parts[reduce.op]):
                names.append(f"p{reduce.op}_{i}")
                place = f"k.to(tl.int64) * {self.params.size(rows)} + r"
                lines.append(f"{names[-1]} = tl.load({self.params.tensor(part)} + {place}{keep})")
            lines += finished(reduce, names, f"s{reduce.op}")
            self.set_result(reduce, f"s{reduce.op}")
        self.close("joined")
