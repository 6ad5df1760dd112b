"""Row passes: the kernels of a row program from its levels."""

from __future__ import annotations

from torch_kevolve.errors import PlanError
from torch_kevolve.plan import PlanBuilder, Tensor
from torch_kevolve.sizes import Size, simplify
from torch_kevolve.task import Ref
from torch_kevolve.templates.base import Point
from torch_kevolve.templates.expr import Term
from torch_kevolve.templates.kernel_text import Params, kernel
from torch_kevolve.templates.row_emit import COMBINE, Emitter, Scope, finished, joined, kinds
from torch_kevolve.templates.rows import VIEWS, Reduce, RowProgram

SPLITS = 128


def level_of(program: RowProgram) -> dict[int, int]:
    """How many reductions along the row lie behind each value."""
    base = len(program.graph.inputs)
    made = {base + r.op for r in program.reduces if not r.final}
    out = dict.fromkeys(range(base), 0)
    for number, op in enumerate(program.graph.ops):
        behind = max((out[ref.index] for ref in op.refs()), default=0)
        out[base + number] = behind + (base + number in made)
    return out


def levels(program: RowProgram) -> int:
    return max((v for v in level_of(program).values()), default=0)


class Render:
    """One candidate: its kernels as text, its launches in the builder."""

    def __init__(self, builder: PlanBuilder, program: RowProgram, point: Point, wide: bool) -> None:
        self.builder, self.program, self.point = builder, program, point
        self.base = len(program.graph.inputs)
        self.level = level_of(program)
        self.outs = [builder.empty_output(i) for i in range(len(program.outputs))]
        self.wide = wide
        self.texts: list[str] = []
        self.block, self.height = int(point["BLOCK"]), int(point["ROWS"])
        self.reduces = [r for r in program.reduces if not r.final]
        self.open("r0")

    def open(self, tag: str) -> None:
        """A fresh kernel: parameters, row scope, emitter."""
        self.params = Params(self.builder)
        rows = simplify(self.program.rows)
        full = isinstance(rows, int) and rows % self.height == 0
        self.rows = Scope("c", "" if full else "keep", [], tag=tag)
        self.emit = Emitter(self.program, self.params, self.rows, self.wide)
        far = ".to(tl.int64)" if self.wide else ""
        head = f"r = (tl.program_id(0){far} * ROWS + tl.arange(0, ROWS))[:, None]"
        self.rows.lines += [head, *([] if full else [f"keep = r < {self.params.size(rows)}"])]

    def tile_mask(self, bounded: bool) -> str:
        row = self.rows.mask
        if not bounded:
            return row
        return f"{row} & inside" if row else "inside"

    def done(self) -> tuple[str, list[Tensor]]:
        {"resident": self.resident, "loop": self.loop, "split": self.split}[str(self.point["algorithm"])]()
        return COMBINE + "\n\n" + "\n\n".join(self.texts), self.outs

    # ---- resident

    def resident(self) -> None:
        length = self.program.row_size
        ragged = length != self.block
        self.rows.lines.append("c = tl.arange(0, BLOCK)[None, :]")
        if ragged:
            self.rows.lines.append(f"inside = c < {self.params.size(length)}")
        tile = Scope("c", self.tile_mask(ragged), self.rows.lines)
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

    def inputs(self, reduce: Reduce, value: Term, tile: Scope) -> list[str]:
        """What goes into the accumulators: the value in their dtype, the identity outside of the tile."""
        held = kinds(reduce, value.dtype)
        text = value.text if value.number is None else f"tl.full([ROWS, BLOCK], {value.text}, {held[0][1]})"
        spread = f"tl.broadcast_to({text}, [ROWS, BLOCK])" if self.program.level(reduce.source.index) != "element" else text
        if held[0][1] != "tl.float32":
            spread = f"{spread}.to({held[0][1]})"
        out = [self.only(tile, spread, held[0][0])]
        if reduce.kind.startswith("arg"):
            place = f"tl.broadcast_to({tile.column}.to(tl.int32), [ROWS, BLOCK])"
            out.append(self.only(tile, place, held[1][0]))
        return out

    def only(self, tile: Scope, text: str, identity: str) -> str:
        inside = "inside" if "inside" in tile.mask else ""
        return f"tl.where({inside}, {text}, {identity})" if inside else text

    def set_result(self, reduce: Reduce, out: str) -> None:
        spec = self.program.graph.ops[reduce.op].outs[0]
        text = out
        if reduce.kind == "mean":
            text = f"{out} / {self.params.size(reduce.count)}"
        elif reduce.kind in ("any", "all"):
            text = f"{out} != 0"
        elif reduce.kind.startswith("arg"):
            text = f"{out}_at.to(tl.int64)"
        self.rows.memo[self.base + reduce.op, 0] = self.emit.bind(Term(text, spec.dtype), self.rows)

    def set_variance(self, reduce: Reduce, out: str) -> None:
        spec = self.program.graph.ops[reduce.op].outs[0]
        count = self.params.size(reduce.count)
        below = f"({count} - {reduce.correction!r})" if reduce.correction else count
        variance = self.emit.bind(Term(f"{out}_m2 / {below}", spec.dtype), self.rows)
        self.rows.memo[self.base + reduce.op, 0] = variance
        self.rows.memo[self.base + reduce.op, 1] = Term(f"{out}_mean", spec.dtype)

    # ---- loop

    def loop(self) -> None:
        pairs = {} if self.point["order"] == "none" else self.online()
        total = max((self.level[self.base + r.op] for r in self.reduces), default=0)
        turn = 0
        taken: set[int] = set()
        for level in range(1, total + 1):
            mine = [r for r in self.reduces if self.level[self.base + r.op] == level and r.op not in taken]
            if not mine:
                continue
            taken |= {pairs[r.op].op for r in mine if r.op in pairs}
            self.one_pass(mine, pairs, turn)
            turn += 1
        if any(self.program.level(out.ref.index) == "element" for out in self.program.outputs):
            self.last_pass(turn)
        self.close("rows")

    def online(self) -> dict[int, Reduce]:
        """For each maximum the sum of exponentials that can ride along: sum(exp(x - f(max(x))))."""
        graph, out = self.program.graph, {}
        for total in self.reduces:
            power = self.behind(total.source) if total.kind == "sum" else None
            if power is None or graph.ops[power].target != "aten.exp.default":
                continue
            less = self.behind(graph.ops[power].args[0])
            if less is None or graph.ops[less].target != "aten.sub.Tensor" or graph.ops[less].kwargs:
                continue
            x, shift = graph.ops[less].args[:2]
            for top in self.reduces:
                if top.kind == "max" and self.same(top.source, x) and self.shift_form(shift, top):
                    out[top.op] = total
        return out

    def behind(self, ref: object) -> int | None:
        """The operator that makes a value, views left out."""
        while isinstance(ref, Ref) and ref.index >= self.base:
            op = self.program.graph.ops[ref.index - self.base]
            if op.target not in VIEWS:
                return ref.index - self.base
            ref = op.args[0]
        return None

    def same(self, a: object, b: object) -> bool:
        if a == b:
            return True
        one, other = self.behind(a), self.behind(b)
        return one is not None and one == other

    def shift_form(self, shift: object, top: Reduce) -> str:
        """`plain`: the maximum itself; `guarded`: 0 where it is infinite, as in logsumexp; empty: something else."""
        place = self.behind(shift)
        if place == top.op:
            return "plain"
        op = self.program.graph.ops[place] if place is not None else None
        if op is None or op.target != "aten.where.self" or self.behind(op.args[2]) != top.op:
            return ""
        test = self.behind(op.args[0])
        equal = self.program.graph.ops[test] if test is not None else None
        if equal is None or not equal.target.startswith("aten.eq") or equal.args[1] != float("inf"):
            return ""
        size = self.behind(equal.args[0])
        known = size is not None and self.program.graph.ops[size].target == "aten.abs.default"
        return "guarded" if known and size is not None and self.behind(self.program.graph.ops[size].args[0]) == top.op else ""

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
        return first, head, Scope("c", self.tile_mask(ragged), [])

    def one_pass(self, mine: list[Reduce], pairs: dict[int, Reduce], turn: int) -> None:
        length = self.program.row_size
        first, head, tile = self.piece(turn, length)
        before: list[str] = []
        after: list[str] = []
        for reduce in mine:
            value = self.emit.value(reduce.source, tile)
            if reduce.op in pairs:
                self.add_online(reduce, pairs[reduce.op], value, tile, before, after)
            elif reduce.kind in ("var", "var_mean"):
                self.add_variance(reduce, value, tile, before)
            else:
                names = [f"a{reduce.op}_{i}" for i in range(len(kinds(reduce, value.dtype)))]
                for name, (identity, held) in zip(names, kinds(reduce, value.dtype), strict=True):
                    before.append(f"{name} = tl.full([ROWS, BLOCK], {identity}, {held})")
                tile.lines += joined(reduce, names, self.inputs(reduce, value, tile))
                after += finished(reduce, names, f"s{reduce.op}")
        self.rows.lines += [*before, head, *(f"    {line}" for line in [*first, *tile.lines]), *after]
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
        before += [f'{m} = tl.full([ROWS, 1], float("-inf"), tl.float32)', f"{s} = tl.zeros([ROWS, 1], tl.float32)"]
        x = self.only(tile, value.text, 'float("-inf")')
        tile.lines += [
            f"{m}_x = {x}",
            # A maximum that keeps NaN: a row with NaN and inf has the maximum NaN, which the sum cannot tell.
            f"{m}_new = kv_max({m}, tl.reduce({m}_x, 1, kv_max, keep_dims=True))",
            f'{m}_safe = tl.where({m}_new == float("-inf"), 0.0, {m}_new)',
            f"{s} = {s} * tl.exp({m} - {m}_safe) + tl.sum(tl.exp({m}_x - {m}_safe), 1, keep_dims=True)",
            f"{m} = {m}_new",
        ]

    def set_online(self, top: Reduce, total: Reduce) -> None:
        graph, m, s = self.program.graph, f"m{top.op}", f"s{total.op}"
        power = self.behind(total.source)
        less = self.behind(graph.ops[power].args[0]) if power is not None else None
        if less is None:
            raise PlanError(detail="the online pair is gone")
        form = self.shift_form(graph.ops[less].args[1], top)
        # Where the maximum is infinite the two forms of eager give NaN and inf.
        if form == "plain":
            edge = f'tl.where({m} == float("-inf"), float("nan"), {s})'
        else:
            edge = f'tl.where({m} == float("inf"), {m}, {s})'
        self.rows.memo[self.base + top.op, 0] = self.emit.bind(Term(m, "float32"), self.rows)
        self.rows.memo[self.base + total.op, 0] = self.emit.bind(Term(edge, "float32"), self.rows)

    def add_variance(self, reduce: Reduce, value: Term, tile: Scope, before: list[str]) -> None:
        """Mean and squares of each piece around its own mean, joined piece by piece: one pass, no cancellation.

        (Welford per lane divides per element, which took the GroupNorm case to 0.6x.)
        """
        out = f"s{reduce.op}"
        n, mean, m2 = f"{out}_n", f"{out}_mean", f"{out}_m2"
        before += [f"{name} = tl.zeros([ROWS, 1], tl.float32)" for name in (n, mean, m2)]
        ragged = "inside" in tile.mask
        tile.lines += [
            f"{out}_c = {'tl.sum(tl.where(inside, 1.0, 0.0), 1, keep_dims=True)' if ragged else 'BLOCK * 1.0'}",
            f"{out}_u = tl.sum({self.only(tile, value.text, '0.0')}, 1, keep_dims=True) / {out}_c",
            f"{out}_d = {self.only(tile, f'{value.text} - {out}_u', '0.0')}",
            f"{out}_o = {out}_u - {mean}",
            f"{m2} += tl.sum({out}_d * {out}_d, 1, keep_dims=True) + {out}_o * {out}_o * ({n} * {out}_c / ({n} + {out}_c))",
            f"{mean} += {out}_o * ({out}_c / ({n} + {out}_c))",
            f"{n} += {out}_c",
        ]

    def last_pass(self, turn: int) -> None:
        first, head, tile = self.piece(turn, self.program.row_size)
        if turn:
            tile.policy = ', eviction_policy="evict_first"'
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

    # ---- the end of a kernel

    def store_elements(self, tile: Scope) -> None:
        for out in self.program.outputs:
            if self.program.level(out.ref.index) == "element":
                self.store(out.place, out.ref, out.strides, tile)

    def store(self, place: int, ref: Ref, strides: tuple[Size, ...], scope: Scope) -> None:
        value = self.emit.value(ref, scope)
        pointer = self.params.tensor(self.outs[place])
        where = self.emit.address(strides, scope)
        shape = "[ROWS, BLOCK]" if scope is not self.rows else "[ROWS, 1]"
        text = value.text if value.number is None else f"tl.full({shape}, {value.text}, {pointer}.dtype.element_ty)"
        guard = f", mask={scope.mask}" if scope.mask else ""
        scope.lines.append(f"tl.store({pointer} + {where}, ({text}).to({pointer}.dtype.element_ty){guard})")

    def close(self, name: str) -> None:
        """Row outputs, what the numbers over all rows need, the launch; then those numbers in a kernel of one program."""
        for out in self.program.outputs:
            if self.program.level(out.ref.index) == "row":
                self.store(out.place, out.ref, out.strides, self.rows)
        finals = [r for r in self.program.reduces if r.final]
        scalars = [o for o in self.program.outputs if self.program.level(o.ref.index) == "scalar"]
        rows = simplify(self.program.rows)
        scratch: dict[int, Tensor] = {}
        keep = f", mask={self.rows.mask}" if self.rows.mask else ""
        for reduce in finals:
            value = self.emit.value(reduce.source, self.rows)
            held = kinds(reduce, value.dtype)[0][1].removeprefix("tl.")
            scratch[reduce.op] = self.builder.empty((rows,), held)
            pointer = self.params.tensor(scratch[reduce.op])
            self.rows.lines.append(f"tl.store({pointer} + r, ({value.text}).to({pointer}.dtype.element_ty){keep})")
        grid = (self.builder.cdiv(rows, self.height),)
        self.launch(name, ("ROWS", "BLOCK"), grid, {"ROWS": self.height, "BLOCK": self.block})
        if scalars:
            self.over_rows(finals, scratch, rows)

    def over_rows(self, finals: list[Reduce], scratch: dict[int, Tensor], rows: Size) -> None:
        params = Params(self.builder)
        scope = Scope("c", "", [])
        self.params, self.rows = params, scope
        self.emit = Emitter(self.program, params, scope, self.wide)
        size = params.size(rows)
        before: list[str] = []
        body = ["c = at + tl.arange(0, BLOCK)[None, :]", f"inside = c < {size}"]
        after: list[str] = []
        for reduce in finals:
            dtype = self.program.graph.spec(reduce.source).dtype
            identity, held = kinds(reduce, dtype)[0]
            name = f"a{reduce.op}"
            before.append(f"{name} = tl.full([1, BLOCK], {identity}, {held})")
            load = f"tl.load({params.tensor(scratch[reduce.op])} + c, mask=inside, other=0)"
            body += joined(reduce, [name], [f"tl.where(inside, {load}, {identity})"])
            after += finished(reduce, [name], f"s{reduce.op}")
        scope.lines += [*before, f"for at in range(0, {size}, BLOCK):", *(f"    {line}" for line in body), *after]
        for reduce in finals:
            self.set_result(reduce, f"s{reduce.op}")
        for out in self.program.outputs:
            if self.program.level(out.ref.index) == "scalar":
                value = self.emit.value(out.ref, scope)
                pointer = params.tensor(self.outs[out.place])
                made = f"({value.text}).to({pointer}.dtype.element_ty)"
                if value.number is not None:
                    made = f"tl.full([1, 1], {value.text}, {pointer}.dtype.element_ty)"
                scope.lines.append(f"tl.store({pointer} + tl.zeros([1, 1], tl.int32), {made})")
        self.launch("over_rows", ("BLOCK",), (1,), {"BLOCK": 1024}, warps=4)

    def launch(self, name: str, meta: tuple[str, ...], grid: tuple[Size, ...], numbers: dict[str, int], warps: int = 0) -> None:
        self.texts.append(kernel(name, self.params, meta, self.rows.lines))
        self.builder.run(name, grid, self.params.args, **numbers, num_warps=warps or int(self.point["num_warps"]))
