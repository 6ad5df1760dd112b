"""Row cooperative: a long row in pieces that stay on chip, one program each.

The programs tell each other their part of every reduction. Each input is read once, each output written once.

A program takes its place from a ticket, so all with smaller tickets have started: whoever waits, waits for programs
that run or are next to be started. That ends as long as a few more programs fit on the device than wait for the last
row of every such kernel that runs at the same time; `most_pieces` leaves room for eight streams.
"""

from __future__ import annotations

from torch_kevolve.devices.base import DeviceFacts
from torch_kevolve.plan import Tensor
from torch_kevolve.sizes import next_power_of_2, simplify
from torch_kevolve.templates.row_emit import COMBINE, FIRST, Scope, finished, kinds
from torch_kevolve.templates.row_levels import online_pairs
from torch_kevolve.templates.row_passes import Render
from torch_kevolve.templates.rows import Reduce

ALONE = 8
"""Kernels of this kind that may run at the same time."""


def most_pieces(device: DeviceFacts) -> int:
    """Programs that may wait for each other: a multiprocessor holds at least one of each kernel."""
    return device.units // ALONE


class Cooperative(Render):
    """One candidate of the algorithm `cooperative`: rows of a fixed length, in at most `most_pieces` blocks."""

    def done(self) -> tuple[str, list[Tensor]]:
        length = self.program.row_size
        assert isinstance(length, int)
        self.pieces, self.meetings = -(-length // self.block), 0
        rows = simplify(self.program.rows)
        # The last number counts tickets, the others the arrivals at a row.
        self.arrived = self.builder.zeros((simplify(rows + 1),), "int32")
        self.open("r0")
        lines = self.rows.lines
        lines.append("c = piece * BLOCK + tl.arange(0, BLOCK)[None, :]")
        ragged = length != self.pieces * self.block
        if ragged:
            lines.append(f"inside = c < {length}")
        tile = Scope("c", self.tile_mask(ragged), lines, policy=FIRST, stream=True)
        pairs = online_pairs(self.program, self.reduces)
        for mine in self.stages(pairs):
            self.meet(mine, pairs, tile)
        self.store_elements(tile)
        self.close("rows")
        return COMBINE + "\n\n" + "\n\n".join(self.texts), self.outs

    def first_row(self) -> list[str]:
        rows, far = self.params.size(simplify(self.program.rows)), ".to(tl.int64)" if self.wide else ""
        return [
            f"ticket = tl.atomic_add({self.params.tensor(self.arrived)} + {rows}, 1){far}",
            f"piece = ticket % {self.pieces}",
            f"r = (ticket // {self.pieces} + tl.arange(0, ROWS))[:, None]",
        ]

    def meet(self, mine: list[Reduce], pairs: dict[int, Reduce], tile: Scope) -> None:
        """Reductions of one level: this piece's part, the wait for the others, and all parts joined."""
        lines = self.rows.lines
        parts = [self.part(reduce, pairs.get(reduce.op), tile) for reduce in mine]
        kept: list[list[Tensor]] = []
        for part in parts:
            kept.append([self.builder.empty((simplify(self.program.rows), self.pieces), held) for _, _, held in part])
            for (name, _, _), buffer in zip(part, kept[-1], strict=True):
                lines.append(f"tl.store({self.params.tensor(buffer)} + r * {self.pieces} + piece, {name})")
        self.meetings += 1
        arrived = f"{self.params.tensor(self.arrived)} + ticket // {self.pieces}"
        lines += [
            # Every thread's parts are written before the one thread announces them.
            "tl.debug_barrier()",
            f'tl.atomic_add({arrived}, 1, sem="release")',
            f'while tl.atomic_add({arrived}, 0, sem="acquire") < {self.meetings * self.pieces}:',
            "    pass",
            "tl.debug_barrier()",
        ]
        width = next_power_of_2(self.pieces)
        for reduce, part, buffers in zip(mine, parts, kept, strict=True):
            lines.append(f"g = tl.arange(0, {width})[None, :]")
            names = []
            for i, ((_, identity, _), buffer) in enumerate(zip(part, buffers, strict=True)):
                names.append(f"p{reduce.op}_{i}")
                guard = f", mask=g < {self.pieces}, other={identity}" if width != self.pieces else ""
                where = f"{self.params.tensor(buffer)} + r * {self.pieces} + g"
                # Past the first-level cache, which another program's store does not reach.
                lines.append(f'{names[-1]} = tl.load({where}{guard}, cache_modifier=".cg")')
            self.joined_parts(reduce, pairs.get(reduce.op), names)
        self.settle(mine, pairs)

    def part(self, reduce: Reduce, total: Reduce | None, tile: Scope) -> list[tuple[str, str, str]]:
        """(name, identity, dtype) of what this piece has to say of a reduction; `total`: the sum of exponentials
        that belongs to a maximum."""
        value = self.emit.value(reduce.source, tile)
        lines, out = self.rows.lines, f"y{reduce.op}"
        low = 'float("-inf")'
        if total is not None:
            lines += [
                f"{out}_x = {self.only(tile, value.text, low)}",
                f"{out}_0 = tl.reduce({out}_x, 1, kv_max, keep_dims=True)",
                f"{out}_safe = tl.where({out}_0 == {low}, 0.0, {out}_0)",
                f"{out}_1 = tl.sum(tl.exp({out}_x - {out}_safe), 1, keep_dims=True)",
            ]
            return [(f"{out}_0", low, "float32"), (f"{out}_1", "0.0", "float32")]
        if reduce.kind in ("var", "var_mean"):
            count = "BLOCK * 1.0"
            if "inside" in tile.mask:
                count = f"(tl.minimum(({self.program.row_size} - piece * BLOCK).to(tl.float32), BLOCK * 1.0))"
            lines += [
                f"{out}_0 = {count} + tl.zeros([ROWS, 1], tl.float32)",
                f"{out}_1 = tl.sum({self.only(tile, value.text, '0.0')}, 1, keep_dims=True) / {out}_0",
                f"{out}_d = {self.only(tile, f'{value.text} - {out}_1', '0.0')}",
                f"{out}_2 = tl.sum({out}_d * {out}_d, 1, keep_dims=True)",
            ]
            return [(f"{out}_{i}", "0.0", "float32") for i in range(3)]
        held = kinds(reduce, value.dtype)
        names = [f"{out}_x{i}" for i in range(len(held))]
        lines += [f"{name} = {text}" for name, text in zip(names, self.inputs(reduce, value, tile), strict=True)]
        lines += finished(reduce, names, out)
        ends = [out, f"{out}_at"]
        return [(ends[i], identity, kind.removeprefix("tl.")) for i, (identity, kind) in enumerate(held)]

    def joined_parts(self, reduce: Reduce, total: Reduce | None, names: list[str]) -> None:
        """Statements from all parts to what `settle` reads."""
        lines, out = self.rows.lines, f"s{reduce.op}"
        if total is not None:
            m, s = f"m{reduce.op}", f"s{total.op}"
            lines += [
                f"{m} = tl.reduce({names[0]}, 1, kv_max, keep_dims=True)",
                f'{m}_safe = tl.where({m} == float("-inf"), 0.0, {m})',
                # Not tl.exp: what it is off by (2 ulp) would be off in every element of the row.
                f"{s} = tl.sum({names[1]} * libdevice.exp({names[0]} - {m}_safe), 1, keep_dims=True)",
            ]
        elif reduce.kind in ("var", "var_mean"):
            count = self.params.size(reduce.count)
            lines += [
                f"{out}_mean = tl.sum({names[1]} * ({names[0]} / {count}), 1, keep_dims=True)",
                f"{out}_far = {names[1]} - {out}_mean",
                f"{out}_m2 = tl.sum({names[2]} + {names[0]} * {out}_far * {out}_far, 1, keep_dims=True)",
            ]
        else:
            lines += finished(reduce, names, out)
