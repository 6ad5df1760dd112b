"""Row relay: long rows in two phases whose second reads what the first has left in L2.

Programs take tickets: the even ones reduce a piece of a row, the odd ones finish a piece of a row some rows behind,
when all of its pieces are reduced. A program that waits holds a later ticket than those it waits for, and these are
held by programs that run: nobody waits for a program that was not started. Each row crosses the memory bus once each
way.
"""

from __future__ import annotations

from torch_kevolve.plan import PlanBuilder
from torch_kevolve.sizes import next_power_of_2, simplify
from torch_kevolve.task import Ref
from torch_kevolve.templates.base import Point
from torch_kevolve.templates.kernel_text import Params, indent, kernel
from torch_kevolve.templates.row_emit import FIRST, KEEP, Emitter, Scope, finished, kinds
from torch_kevolve.templates.row_kernel import RowKernel
from torch_kevolve.templates.row_levels import level_of, online_pairs
from torch_kevolve.templates.rows import Reduce, RowProgram

_LATER = 1000
"""Where the names of the second phase's values begin."""


def can_relay(program: RowProgram) -> bool:
    """Whether all reductions fit in one pass over known sizes, with results of a row's own size alone."""
    rows, length = simplify(program.rows), simplify(program.row_size)
    if not isinstance(rows, int) or not isinstance(length, int) or any(r.final for r in program.reduces):
        return False
    if any(program.level(out.ref.index) != "element" for out in program.outputs):
        return False
    level, base = level_of(program), len(program.graph.inputs)
    along = {total.op for total in online_pairs(program, list(program.reduces)).values()}
    return bool(program.reduces) and all(level[base + r.op] == 1 or r.op in along for r in program.reduces)


class RowRelay(RowKernel):
    """The kernel of tickets."""

    def __init__(self, builder: PlanBuilder, program: RowProgram, point: Point, wide: bool, units: int = 1) -> None:
        super().__init__(builder, program, point, wide)
        self.units = units

    def relay(self) -> None:
        rows, length = simplify(self.program.rows), simplify(self.program.row_size)
        assert isinstance(rows, int) and isinstance(length, int)
        pieces = -(-length // self.block)
        # As many programs as stay on the chip at once, and no more rows between the phases than they are busy with.
        programs = self.units * max(1, 32 // int(self.point["num_warps"]))
        lag = programs // (2 * pieces) + 1
        self.params = Params(self.builder)
        ticket, done = (self.params.tensor(self.builder.zeros((n,), "int32")) for n in (1, rows))
        first, parts = self._first(rows, pieces, done)
        second = self._second(parts, pieces, done)
        total = 2 * pieces * (rows + lag)
        names = f"{self.params.names}, {{}}, piece, ROWS, BLOCK"
        lines = [
            f't = tl.atomic_add({ticket}, 1, sem="relaxed")',
            f"while t < {total}:",
            f"    step = t // {2 * pieces}",
            f"    piece = (t % {2 * pieces}) // 2",
            "    if t % 2 == 0:",
            f"        if step < {rows}:",
            f"            reduce_piece({names.format('step')})",
            "    else:",
            f"        if step >= {lag}:",
            f"            finish_piece({names.format(f'step - {lag}')})",
            f'    t = tl.atomic_add({ticket}, 1, sem="relaxed")',
        ]
        for name, body in (("reduce_piece", first), ("finish_piece", second)):
            head = f"{self.params.names}, row, piece, ROWS: tl.constexpr, BLOCK: tl.constexpr"
            self.texts.append(f"@triton.jit\ndef {name}({head}):\n{indent(body)}\n")
        self.texts.append(kernel("relay", self.params, ("ROWS", "BLOCK"), lines))
        meta = {"ROWS": 1, "BLOCK": self.block, "num_warps": int(self.point["num_warps"])}
        self.builder.run("relay", (programs,), self.params.args, **meta)

    def _phase(self) -> Scope:
        """A fresh row scope and emitter; the tile of the phase."""
        far = ".to(tl.int64)" if self.wide else ""
        self.rows = Scope("c", "", [f"r = tl.zeros([1, 1], tl.int32){far} + row"])
        self.emit = Emitter(self.program, self.params, self.rows, self.wide)
        size = self.params.size(simplify(self.program.row_size))
        self.rows.lines.append("c = piece * BLOCK + tl.arange(0, BLOCK)[None, :]")
        ragged = simplify(self.program.row_size % self.block) != 0
        if ragged:
            self.rows.lines.append(f"inside = c < {size}")
        return Scope("c", self.tile_mask(ragged), self.rows.lines)

    def _first(self, rows: int, pieces: int, done: str) -> tuple[list[str], dict[int, list[str]]]:
        """Statements that reduce a piece; the pointers to the partial results by reduction."""
        tile = self._phase()
        tile.policy = KEEP
        pairs = online_pairs(self.program, self.reduces)
        along = {total.op for total in pairs.values()}
        parts: dict[int, list[str]] = {}
        stores: list[str] = []
        for reduce in self.reduces:
            if reduce.op in along:
                continue
            names, dtypes = self._partial(reduce, pairs.get(reduce.op), tile)
            buffers = [self.builder.empty((rows, pieces), dtype) for dtype in dtypes]
            parts[reduce.op] = [self.params.tensor(buffer) for buffer in buffers]
            place = f"r * {pieces} + piece"
            stores += [f"tl.store({to} + {place}, {x})" for to, x in zip(parts[reduce.op], names, strict=True)]
        # All threads' parts are out before the count says so.
        count = f'tl.atomic_add({done} + row, 1, sem="release")'
        return [*self.rows.lines, *stores, "tl.debug_barrier()", count], parts

    def _partial(self, reduce: Reduce, total: Reduce | None, tile: Scope) -> tuple[list[str], list[str]]:
        """Names and dtypes of a piece's results."""
        value, out, lines = self.emit.value(reduce.source, tile), f"p{reduce.op}", self.rows.lines
        if total is not None:
            lines += [
                f"""{out}_x = {self.only(tile, value.text, 'float("-inf")')}""",
                f"{out} = tl.reduce({out}_x, 1, kv_max, keep_dims=True)",
                f'{out}_safe = tl.where({out} == float("-inf"), 0.0, {out})',
                f"{out}_s = tl.sum(tl.exp({out}_x - {out}_safe), 1, keep_dims=True)",
            ]
            return [out, f"{out}_s"], ["float32", "float32"]
        if reduce.kind in ("var", "var_mean"):
            lines += [
                f"{out} = tl.sum({self.only(tile, value.text, '0.0')}, 1, keep_dims=True) / {self._held('piece')}",
                f"{out}_d = {self.only(tile, f'{value.text} - {out}', '0.0')}",
                f"{out}_m2 = tl.sum({out}_d * {out}_d, 1, keep_dims=True)",
            ]
            return [out, f"{out}_m2"], ["float32", "float32"]
        names = []
        for i, text in enumerate(self.inputs(reduce, value, tile)):
            lines.append(f"{out}_{i} = {text}")
            names.append(f"{out}_{i}")
        lines += finished(reduce, names, out)
        dtypes = [kind.removeprefix("tl.") for _, kind in kinds(reduce, value.dtype)]
        return [out, f"{out}_at"][: len(dtypes)], dtypes

    def _held(self, piece: str) -> str:
        """Elements in a piece, as fp32."""
        length = simplify(self.program.row_size)
        if simplify(length % self.block) == 0:
            return "(BLOCK * 1.0)"
        return f"tl.minimum(BLOCK, {length} - {piece} * BLOCK).to(tl.float32)"

    def _second(self, parts: dict[int, list[str]], pieces: int, done: str) -> list[str]:
        """Statements that wait for a row's parts, join them and finish a piece."""
        tile = self._phase()
        self.emit.count = _LATER
        tile.policy, tile.stream, tile.first = FIRST, True, ("piece * BLOCK", self.block)
        lines, pairs = self.rows.lines, online_pairs(self.program, self.reduces)
        width = next_power_of_2(pieces)
        wait = f'ready = tl.atomic_add({done} + row, 0, sem="acquire")'
        live = "" if width == pieces else f", mask=k < {pieces}, other={{}}"
        # What the piece reads is under way while this waits.
        for index in self._read_again():
            self.emit.value(Ref(index), tile)
        lines += [wait, f"while ready < {pieces}:", f"    {wait}", "tl.debug_barrier()"]
        lines.append(f"k = tl.arange(0, {width})[None, :]")
        for reduce in self.reduces:
            if reduce.op not in parts:
                continue
            names = [f"q{reduce.op}_{i}" for i in range(len(parts[reduce.op]))]
            for name, pointer, other in zip(names, parts[reduce.op], self._identities(reduce, pairs), strict=True):
                # Other programs wrote them while this one was running: not from L1.
                lines.append(f"{name} = tl.load({pointer} + r * {pieces} + k{live.format(other)}, volatile=True)")
            self._join(reduce, names, pairs, width != pieces)
        self.store_elements(tile)
        return lines

    def _read_again(self) -> list[int]:
        """Inputs of one value per element that the outputs need, other than through a reduction."""
        made = {self.base + r.op for r in self.reduces}
        seen: set[int] = set()
        stack = [out.ref.index for out in self.program.outputs]
        while stack:
            index = stack.pop()
            if index not in seen and index not in made:
                seen.add(index)
                op = self.program.graph.op(Ref(index))
                stack += [ref.index for ref in op.refs()] if op is not None else []
        return sorted(i for i in seen if i < self.base and self.program.level(i) == "element")

    def _identities(self, reduce: Reduce, pairs: dict[int, Reduce]) -> list[str]:
        if reduce.op in pairs:
            return ['float("-inf")', "0"]
        if reduce.kind in ("var", "var_mean"):
            return ["0", "0"]
        return [identity for identity, _ in kinds(reduce, self.program.graph.spec(reduce.source).dtype)]

    def _join(self, reduce: Reduce, names: list[str], pairs: dict[int, Reduce], ragged: bool) -> None:
        lines, out = self.rows.lines, f"s{reduce.op}"
        if reduce.op in pairs:
            m, s = f"m{reduce.op}", f"s{pairs[reduce.op].op}"
            lines += [
                f"{m} = tl.reduce({names[0]}, 1, kv_max, keep_dims=True)",
                f'{m}_safe = tl.where({m} == float("-inf"), 0.0, {m})',
                f"{s} = tl.sum({names[1]} * tl.exp({names[0]} - {m}_safe), 1, keep_dims=True)",
            ]
            self.set_online(reduce, pairs[reduce.op])
        elif reduce.kind in ("var", "var_mean"):
            length = simplify(self.program.row_size)
            held = f"({self._held('k')})"
            if ragged:
                held = f"tl.where(k * BLOCK < {length}, {held}, 0.0)"
            lines += [
                f"{out}_n = {held}",
                f"{out}_mean = tl.sum({names[0]} * {out}_n, 1, keep_dims=True) / {length}",
                f"{out}_o = {names[0]} - {out}_mean",
                f"{out}_m2 = tl.sum({names[1]} + {out}_o * {out}_o * {out}_n, 1, keep_dims=True)",
            ]
            self.set_variance(reduce, out)
        else:
            lines += finished(reduce, names, out)
            self.set_result(reduce, out)
