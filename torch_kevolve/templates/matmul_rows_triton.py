"""Matmul rows (Triton): reductions of a product's rows per tile, and the kernel that joins them.

The joining kernel also makes the value in the picked column, as a product of two rows of K: behind the tile's own loop
it would cost registers and a comparison per element.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch_kevolve.plan import PlanBuilder, Tensor
from torch_kevolve.sizes import Size
from torch_kevolve.templates.around import Body
from torch_kevolve.templates.kernel_text import HELD, Params, address, epilogue, is_wide, kernel
from torch_kevolve.templates.matmul_parts import Matmul
from torch_kevolve.templates.matmul_rows import RowTail

LOG2E, LN2 = 1.4426950408889634, 0.6931471805599453
ROWS, TILES, DEPTH = 16, 64, 128
"""Of the joining kernel: rows per program, tiles and columns of K per step."""


def row_parts(builder: PlanBuilder, tiles_n: Size, m: Size) -> tuple[Tensor, ...]:
    """Scratch for a maximum and a sum per tile and row."""
    return (builder.empty((tiles_n, m), "float32"), builder.empty((tiles_n, m), "float32"))


def partial(
    p: Params, body: Body, parts: tuple[Tensor, ...], m: Size, mask: str, pieces: Sequence[Sequence[str]]
) -> list[str]:
    """The statements from `acc` of a tile to its parts. Names: row0, pn and those that a piece gives: acc, i0, i1, the
    mask's. `pieces`: the opening of each piece of the tile."""
    last = body.stores[0].text
    shadow = Body(body.loads, body.statements, ())
    peak, total = (p.tensor(t) for t in parts)
    lines: list[str] = []
    for i, opening in enumerate(pieces):
        lines += [
            *opening,
            *epilogue(p, shadow, ("i0", "i1"), mask, []),
            f'z{i} = tl.where(mask, {last}, float("-inf"))' if mask else f"z{i} = {last}",
        ]
    tops = [f"tl.max(z{i}, 1)" for i in range(len(pieces))]
    sums = [f"tl.sum(tl.exp2(z{i} * {LOG2E} - shift[:, None]), 1)" for i in range(len(pieces))]
    return [
        *lines,
        # Scaled behind the maximum, or a second tile of registers is alive.
        f"peak = {tops[0] if len(tops) == 1 else f'tl.maximum({tops[0]}, {tops[1]})'} * {LOG2E}",
        # An infinite maximum stays out of the exponent, as in eager's logsumexp: inf - inf would be NaN.
        'shift = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)',
        f"total = {' + '.join(sums)}",
        # tl.max drops NaN; the sum keeps it.
        "rows = row0 + tl.arange(0, BLOCK_M)",
        f"place = pn.to(tl.int64) * {p.size(m)} + rows",
        f"tl.store({peak} + place, shift, mask=rows < {p.size(m)})",
        f"tl.store({total} + place, total, mask=rows < {p.size(m)})",
    ]


def combine(builder: PlanBuilder, found: Matmul, parts: tuple[Tensor, ...], outs: list[Tensor], tiles_n: Size) -> str:
    """Launches what joins the parts and carries on to the outputs; the kernels' text."""
    tail = found.tail
    assert tail is not None
    m = found.sizes[1]
    p = Params(builder)
    wide = ".to(tl.int64)" if is_wide(builder.task) else ""
    lines = [
        f"i0 = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)){wide}",
        f"mask = i0 < {p.size(m)}",
        *_joined(p, parts, m, tiles_n),
        f"top = tl.where(sums == 0.0, 0.0, top) * {LN2}",
        "total = sums" if tail.guarded else _only_finite(),
        *(_picked(p, found, tail.column) if tail.column is not None else []),
        *epilogue(p, tail.rows, ("i0",), "mask", outs),
    ]
    scratch = [builder.empty((m,), each.dtype) for each in tail.sums]
    for each, buffer in zip(tail.sums, scratch, strict=True):
        name = p.tensor(buffer)
        lines.append(f"tl.store({name} + i0, ({each.text}).to({name}.dtype.element_ty), mask=mask)")
    text = kernel("combine", p, ("ROWS", "TILES", "DEPTH"), lines)
    builder.run("combine", (builder.cdiv(m, ROWS),), p.args, ROWS=ROWS, TILES=TILES, DEPTH=DEPTH, num_warps=4)
    return text + ("\n\n" + _over_rows(builder, tail, scratch, outs, m) if tail.sums else "")


def _joined(p: Params, parts: tuple[Tensor, ...], m: Size, tiles_n: Size) -> list[str]:
    """`top` (times log2(e)) and `sums` of a row from its parts."""
    peak, total = (p.tensor(t) for t in parts)
    size, count = p.size(m), p.size(tiles_n)
    inner = [
        "at = t + tl.arange(0, TILES)[:, None]",
        f"live = (at < {count}) & mask[None, :]",
        f"peaks = tl.load({peak} + at.to(tl.int64) * {size} + i0[None, :], mask=live, other=0)",
        f"totals = tl.load({total} + at.to(tl.int64) * {size} + i0[None, :], mask=live, other=0)",
        # A part without terms has total 0 and shift 0: it must not lift the maximum.
        'high = tl.maximum(top, tl.max(tl.where(totals == 0.0, float("-inf"), peaks), 0))',
        'safe = tl.where(high == float("-inf"), 0.0, high)',
        "weight = tl.where(totals == 0.0, 0.0, tl.exp2(peaks - safe[None, :]))",
        # An infinite total stays so however small its weight.
        'weight = tl.where(totals == float("inf"), 1.0, weight)',
        'before = tl.where((sums == 0.0) | (sums == float("inf")), 1.0, tl.exp2(top - safe))',
        "sums = sums * before + tl.sum(totals * weight, 0)",
        "top = high",
    ]
    return [
        'top = tl.full([ROWS], float("-inf"), tl.float32)',
        "sums = tl.zeros([ROWS], tl.float32)",
        f"for t in range(0, {count}, TILES):",
        *(f"    {line}" for line in inner),
    ]


def _only_finite() -> str:
    """x - max is NaN in a row whose maximum is infinite: no term at all (all -inf), or one that is +inf."""
    return 'total = tl.where((sums > 0.0) & (sums < float("inf")), sums, float("nan"))'


def _picked(p: Params, found: Matmul, column: Body) -> list[str]:
    """`picked`: the value of x in a row's own column, from the operands."""
    k = found.sizes[3]
    left, right = p.input(found.left.index), p.input(found.right.index)
    a = address(p, found.first[1:], ("i0[:, None]", "kk[None, :]"))
    b = address(p, found.second[1:], ("kk[None, :]", "column[:, None]"))
    live = f"mask[:, None] & (kk[None, :] < {p.size(k)})"
    lines = [
        *epilogue(p, Body(column.loads, column.statements, ()), ("i0",), "mask", []),
        f"column = tl.where(mask, {column.stores[0].text}, 0).to(tl.int64)",
        "acc = tl.zeros([ROWS], tl.float32)",
        f"for k0 in range(0, {p.size(k)}, DEPTH):",
        "    kk = k0 + tl.arange(0, DEPTH)",
        f"    one = tl.load({left} + {a}, mask={live}, other=0){HELD.get(found.left.dtype, '')}",
        f"    other = tl.load({right} + {b}, mask={live}, other=0){HELD.get(found.right.dtype, '')}",
        "    acc += tl.sum(one * other, 1)",
    ]
    if found.bias is not None:
        where = address(p, found.bias_strides[1:], ("i0", "column"))
        there = "" if where == "0" else f" + {where}, mask=mask, other=0"
        lines.append(f"acc += tl.load({p.input(found.bias.index)}{there}){HELD.get(found.bias.dtype, '')}")
    body = found.body
    return [
        *lines,
        *epilogue(p, Body(body.loads, body.statements, ()), ("i0", "column"), "mask", []),
        f"picked = {body.stores[0].text}",
    ]


def _over_rows(builder: PlanBuilder, tail: RowTail, scratch: list[Tensor], outs: list[Tensor], m: Size) -> str:
    """One program: the sums over all rows, and what is done with them."""
    assert tail.last is not None
    p = Params(builder)
    size = p.size(m)
    inner, after = ["live = t + c < " + size], []
    lines = ["c = tl.arange(0, BLOCK)"]
    for place, (each, buffer) in enumerate(zip(tail.sums, scratch, strict=True)):
        lines.append(f"s{place} = tl.zeros([BLOCK], tl.{each.dtype})")
        inner.append(f"s{place} += tl.load({p.tensor(buffer)} + t + c, mask=live, other=0)")
        after.append(f"f{place} = tl.sum(s{place}, 0)" + (f" / {size}" if each.mean else ""))
    lines += [f"for t in range(0, {size}, BLOCK):", *(f"    {line}" for line in inner), *after]
    lines += epilogue(p, tail.last, ("0",), "", outs)
    builder.run("over_rows", (1,), p.args, BLOCK=1024, num_warps=8)
    return kernel("over_rows", p, ("BLOCK",), lines)
