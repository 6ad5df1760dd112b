"""Row kernel: what every kernel of a row program has: its opening, its results, its end."""

from __future__ import annotations

from torch_kevolve.plan import PlanBuilder, Tensor
from torch_kevolve.sizes import Size, simplify
from torch_kevolve.task import Ref
from torch_kevolve.templates.base import Point
from torch_kevolve.templates.expr import Term
from torch_kevolve.templates.kernel_text import Params, kernel
from torch_kevolve.templates.row_emit import Emitter, Scope, finished, joined, kinds
from torch_kevolve.templates.row_levels import level_of
from torch_kevolve.templates.rows import Reduce, RowProgram


class RowKernel:
    """The kernels of one candidate as text, their launches in the builder; one kernel is open at a time."""

    def __init__(self, builder: PlanBuilder, program: RowProgram, point: Point, wide: bool) -> None:
        self.builder, self.program, self.point = builder, program, point
        self.base = len(program.graph.inputs)
        self.level = level_of(program)
        self.outs = [builder.empty_output(i) for i in range(len(program.outputs))]
        self.wide = wide
        self.texts: list[str] = []
        self.pieces = 1
        self.block, self.height = int(point["BLOCK"]), int(point["ROWS"])
        self.reduces = [r for r in program.reduces if not r.final]

    def open(self, tag: str) -> None:
        """A fresh kernel: parameters, row scope, emitter."""
        self.params = Params(self.builder)
        rows = simplify(self.program.rows)
        full = isinstance(rows, int) and rows % self.height == 0
        self.rows = Scope("c", "" if full else "keep", [], tag=tag)
        self.emit = Emitter(self.program, self.params, self.rows, self.wide)
        self.rows.lines += [*self.first_row(), *([] if full else [f"keep = r < {self.params.size(rows)}"])]

    def first_row(self) -> list[str]:
        """The statements that make `r`, the rows of this program."""
        far = ".to(tl.int64)" if self.wide else ""
        return [f"r = (tl.program_id(0){far} * ROWS + tl.arange(0, ROWS))[:, None]"]

    def tile_mask(self, bounded: bool) -> str:
        row = self.rows.mask
        if not bounded:
            return row
        return f"{row} & inside" if row else "inside"

    def inputs(self, reduce: Reduce, value: Term, tile: Scope) -> list[str]:
        """What goes into the accumulators: the value in their dtype, the identity outside of the tile."""
        held = kinds(reduce, value.dtype)
        text = value.text if value.number is None else f"tl.full([ROWS, BLOCK], {value.text}, {held[0][1]})"
        flat = self.program.level(reduce.source.index) != "element"
        spread = f"tl.broadcast_to({text}, [ROWS, BLOCK])" if flat else text
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
        guard += ', cache_modifier=".cs"' if scope.stream else ""
        scope.lines.append(f"tl.store({pointer} + {where}, ({text}).to({pointer}.dtype.element_ty){guard})")

    def close(self, name: str) -> None:
        """Row outputs, what the numbers over all rows need, the launch; then a kernel of one program for those."""
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
        grid = (simplify(self.builder.cdiv(rows, self.height) * self.pieces),)
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

    def launch(
        self, name: str, meta: tuple[str, ...], grid: tuple[Size, ...], numbers: dict[str, int], warps: int = 0
    ) -> None:
        self.texts.append(kernel(name, self.params, meta, self.rows.lines))
        self.builder.run(name, grid, self.params.args, **numbers, num_warps=warps or int(self.point["num_warps"]))
