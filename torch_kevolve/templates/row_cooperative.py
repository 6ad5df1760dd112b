"""Row cooperative: a long row in pieces that stay on chip, one program each.

The programs tell each other their part of every reduction. Each input is read once, each output written once.

A program takes its place from a ticket, so all with smaller tickets have started, and those of a row run together
unless other kernels hold the device. Who has waited long enough reads the whole row by itself, so that nothing can
hang, whatever else runs.
"""

from __future__ import annotations

import re

from torch_kevolve.devices.base import DeviceFacts
from torch_kevolve.plan import Tensor
from torch_kevolve.sizes import next_power_of_2, simplify
from torch_kevolve.templates.row_emit import COMBINE, FIRST, Scope, finished, kinds
from torch_kevolve.templates.row_levels import online_pairs
from torch_kevolve.templates.row_passes import Render
from torch_kevolve.templates.rows import Reduce

PATIENCE = 1 << 14
"""Looks at the counter, of about 1 us each, before a program helps itself; the others are 1 to 10 us away."""
_TILE = re.compile(r"\b(c|inside|BLOCK)\b")


def most_pieces(device: DeviceFacts) -> int:
    """Programs of a row: a multiprocessor holds at least one of them, so that all can run at once."""
    return device.units


class Cooperative(Render):
    """One candidate of the algorithm `cooperative`: rows of a fixed length, in at most `most_pieces` blocks."""

    def done(self) -> tuple[str, list[Tensor]]:
        length = self.program.row_size
        assert isinstance(length, int)
        self.pieces = -(-length // self.block)
        pairs = online_pairs(self.program, self.reduces)
        stages = list(self.stages(pairs))
        # A counter of arrivals for each row and stage, the last number counts tickets.
        self.tickets = simplify(self.program.rows * len(stages))
        self.arrived = self.builder.zeros((simplify(self.tickets + 1),), "int32")
        self.open("r0")
        lines = self.rows.lines
        lines.append("c = piece * BLOCK + tl.arange(0, BLOCK)[None, :]")
        ragged = length != self.pieces * self.block
        if ragged:
            lines.append(f"inside = c < {length}")
        tile = Scope("c", self.tile_mask(ragged), lines, policy=FIRST, stream=True, first=("piece * BLOCK", self.block))
        for place, mine in enumerate(stages):
            self.meet(place, mine, pairs, tile)
        self.store_elements(tile)
        self.close("rows")
        return COMBINE + "\n\n" + "\n\n".join(self.texts), self.outs

    def first_row(self) -> list[str]:
        tickets, far = self.params.size(self.tickets), ".to(tl.int64)" if self.wide else ""
        return [
            f"ticket = tl.atomic_add({self.params.tensor(self.arrived)} + {tickets}, 1){far}",
            f"piece = ticket % {self.pieces}",
            f"r = (ticket // {self.pieces} + tl.arange(0, ROWS))[:, None]",
        ]

    def meet(self, place: int, mine: list[Reduce], pairs: dict[int, Reduce], tile: Scope) -> None:
        """Reductions of one level: this piece's part, the wait for the others, and all parts joined."""
        lines, rows = self.rows.lines, simplify(self.program.rows)
        parts = [self.part(reduce, pairs.get(reduce.op), tile) for reduce in mine]
        kept: list[list[Tensor]] = []
        for part in parts:
            kept.append([self.builder.empty((rows, self.pieces), held) for _, _, held in part])
            for (name, _, _), buffer in zip(part, kept[-1], strict=True):
                lines.append(f"tl.store({self.params.tensor(buffer)} + r * {self.pieces} + piece, {name})")
        counter = f"{self.params.tensor(self.arrived)} + ticket // {self.pieces}"
        if place:
            counter += f" + {self.params.size(simplify(rows * place))}"
        joined = self.all_parts(mine, pairs, parts, kept)
        alone = self.by_myself(mine, pairs)
        lines += [
            # Every thread's parts are written before the one thread announces them.
            "tl.debug_barrier()",
            f'seen = tl.atomic_add({counter}, 1, sem="acq_rel") + 1',
            "looks = 0",
            f"while (seen < {self.pieces}) & (looks < {PATIENCE}):",
            f'    seen = tl.atomic_add({counter}, 0, sem="acquire")',
            "    looks += 1",
            "tl.debug_barrier()",
            f"if seen >= {self.pieces}:",
            *(f"    {line}" for line in joined),
            "else:",
            *(f"    {line}" for line in alone),
        ]
        self.settle(mine, pairs)

    def all_parts(
        self,
        mine: list[Reduce],
        pairs: dict[int, Reduce],
        parts: list[list[tuple[str, str, str]]],
        kept: list[list[Tensor]],
    ) -> list[str]:
        """Statements that read every program's part and join them."""
        width = next_power_of_2(self.pieces)
        lines = [f"g = tl.arange(0, {width})[None, :]"]
        for reduce, part, buffers in zip(mine, parts, kept, strict=True):
            names = []
            for i, ((_, identity, _), buffer) in enumerate(zip(part, buffers, strict=True)):
                names.append(f"p{reduce.op}_{i}")
                guard = f", mask=g < {self.pieces}, other={identity}" if width != self.pieces else ""
                where = f"{self.params.tensor(buffer)} + r * {self.pieces} + g"
                # Past the first-level cache, which another program's store does not reach.
                lines.append(f'{names[-1]} = tl.load({where}{guard}, cache_modifier=".cg")')
            lines += self.joined_parts(reduce, pairs.get(reduce.op), names)
        return lines

    def by_myself(self, mine: list[Reduce], pairs: dict[int, Reduce]) -> list[str]:
        """Statements that make the same of the whole row, in tiles small enough to fit beside the piece."""
        small = {
            "c": "c_all",
            "inside": "inside_all",
            "BLOCK": str(min(self.block, 256 * int(self.point["num_warps"]))),
        }
        return [_TILE.sub(lambda found: small[found[0]], line) for line in self.over_row(mine, pairs, 0)]

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
            lines += [
                f"{out}_0 = {self.elements_of(tile)} + tl.zeros([ROWS, 1], tl.float32)",
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

    def joined_parts(self, reduce: Reduce, total: Reduce | None, names: list[str]) -> list[str]:
        """Statements from all parts to what `settle` reads."""
        out = f"s{reduce.op}"
        if total is not None:
            m, s = f"m{reduce.op}", f"s{total.op}"
            return [
                f"{m} = tl.reduce({names[0]}, 1, kv_max, keep_dims=True)",
                f'{m}_safe = tl.where({m} == float("-inf"), 0.0, {m})',
                # Not tl.exp: what it is off by (2 ulp) would be off in every element of the row.
                f"{s} = tl.sum({names[1]} * libdevice.exp({names[0]} - {m}_safe), 1, keep_dims=True)",
            ]
        if reduce.kind in ("var", "var_mean"):
            count = self.params.size(reduce.count)
            return [
                f"{out}_mean = tl.sum({names[1]} * ({names[0]} / {count}), 1, keep_dims=True)",
                f"{out}_far = {names[1]} - {out}_mean",
                f"{out}_m2 = tl.sum({names[2]} + {names[0]} * {out}_far * {out}_far, 1, keep_dims=True)",
            ]
        return finished(reduce, names, out)
