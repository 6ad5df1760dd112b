"""Scan (Triton): cumulative sums and products along any dimension.

`resident`: the whole row in one block, scanned in two levels, so that the dependent chain is short. `loop`: blocks in
order with a carry. `split`: a long row over several programs, their totals first.
"""

from __future__ import annotations

from torch_kevolve.devices.base import DeviceFacts
from torch_kevolve.plan import PlanBuilder, Tensor
from torch_kevolve.sizes import Size, next_power_of_2, numel, simplify, upper_bound
from torch_kevolve.task import KernelTask, Ref
from torch_kevolve.templates.around import Body, Leaf, after, leaf, name_of, spread
from torch_kevolve.templates.base import Point, Space
from torch_kevolve.templates.expr import HELD_FLOATS
from torch_kevolve.templates.kernel_text import HELD, Params, address, epilogue, is_wide, kernel, triton_space

SCANS = {"cumsum": ("tl.cumsum", "0", "+"), "cumprod": ("tl.cumprod", "1", "*")}


class _Found:
    """The scan seen as (outer, length, inner), its input and the epilogue over these three."""

    def __init__(self, task: KernelTask, place: int) -> None:
        graph = task.graph
        op = graph.ops[place]
        self.scan, self.unit, self.sign = SCANS[name_of(op)]
        shape = op.outs[0].shape
        dim = op.args[1] if len(op.args) > 1 else None
        self.fits = isinstance(dim, int) and bool(shape)
        dim = dim % len(shape) if isinstance(dim, int) and shape else 0
        self.outer: Size = simplify(numel(shape[:dim]))
        self.length: Size = shape[dim] if shape else 1
        self.inner: Size = simplify(numel(shape[dim + 1 :]))
        self.domain = (self.outer, self.length, self.inner)
        self.dtype = op.outs[0].dtype
        self.body: Body | None = after(graph, {(len(graph.inputs) + place, 0): "acc"}, self.domain)
        self.input: Leaf | None = leaf(graph, op.args[0]) if isinstance(op.args[0], Ref) else None
        self.strides = spread(self.input.shape, self.input.strides, self.domain) if self.input else None
        self.wide = is_wide(task)


class ScanTriton:
    """`cumsum` and `cumprod` of float and int64 tensors, with a pointwise epilogue."""

    name = "scan_triton"
    language = "triton"

    def match(self, task: KernelTask, device: DeviceFacts) -> Space | None:
        places = [i for i, op in enumerate(task.graph.ops) if name_of(op) in SCANS]
        if device.type != "cuda" or len(places) != 1:
            return None
        found = _Found(task, places[0])
        held = found.dtype in HELD_FLOATS or found.dtype == "int64"
        if not found.fits or found.body is None or found.strides is None or not held:
            return None
        if found.input is None or (found.dtype == "int64") != (found.input.dtype in ("int64", "int32", "bool")):
            return None
        return _space(self.name, task, found)


def _space(family: str, task: KernelTask, found: _Found) -> Space | None:
    bound = upper_bound(found.length, task.symbols)
    row = 0 if bound is None else next_power_of_2(bound)
    lane = found.inner == 1

    def valid(point: Point) -> bool:
        block, columns, warps = int(point["BLOCK"]), int(point["COLUMNS"]), int(point["num_warps"])
        if point["algorithm"] == "resident":
            # BLOCK is the inner level here; 64 values a thread spill.
            return lane and columns == 1 and 2 * block <= row <= min(65536, 64 * 32 * warps) and row <= 256 * block
        if block * columns > 64 * 32 * warps or block * columns < 32 * warps:
            return False
        return (columns == 1) == lane and (row == 0 or block <= max(row, 64))

    axes = {
        "algorithm": ("resident", "loop", "split"),
        "BLOCK": (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192),
        "COLUMNS": (1, 16, 32, 64, 128),
        "num_warps": (1, 2, 4, 8, 16, 32),
    }
    good = [
        ("resident", 512, 1, 16), ("resident", 128, 1, 16), ("resident", 1024, 1, 32), ("resident", 512, 1, 8),
        ("resident", 32, 1, 4), ("resident", 16, 1, 1), ("loop", 4096, 1, 8), ("loop", 2048, 1, 4),
        ("loop", 1024, 1, 4),
        ("split", 4096, 1, 8), ("loop", 64, 1, 1), ("loop", 64, 32, 4), ("loop", 128, 32, 8), ("loop", 32, 64, 4),
        ("split", 64, 64, 8), ("split", 128, 32, 8), ("split", 128, 128, 16), ("loop", 16, 64, 4),
    ]  # fmt: skip
    start: list[Point] = [dict(zip(axes, row, strict=True)) for row in good]

    def make(builder: PlanBuilder, point: Point) -> tuple[str, list[Tensor]]:
        return {"resident": _resident, "loop": _loop, "split": _split}[str(point["algorithm"])](builder, found, point)

    def moves(point: Point) -> tuple[str, ...]:
        return {"resident": ("two-level-scan",), "loop": ("carry-loop",), "split": ("split-row", "two-level-scan")}[
            str(point["algorithm"])
        ]

    return triton_space(family, task, axes, start, make, valid, moves)


def _load(p: Params, found: _Found, names: tuple[str, str, str], mask: str) -> str:
    assert found.input is not None and found.strides is not None
    where = address(p, found.strides, names)
    held = HELD.get(found.input.dtype, "")
    if found.dtype == "int64":
        held = f"{held}.to(tl.int64)"
    return f"tl.load({p.input(found.input.index)} + {where}, mask={mask}, other={found.unit}){held}"


def _int(found: _Found) -> str:
    return ".to(tl.int64)" if found.wide else ""


def _held(found: _Found) -> str:
    return "tl.int64" if found.dtype == "int64" else "tl.float32"


def _outs(builder: PlanBuilder, found: _Found) -> list[Tensor]:
    assert found.body is not None
    return [builder.empty_output(i) for i in range(len(found.body.stores))]


def _resident(builder: PlanBuilder, found: _Found, point: Point) -> tuple[str, list[Tensor]]:
    assert found.body is not None
    p, outs = Params(builder), _outs(builder, found)
    row, inner = int(builder.next_power_of_2(found.length)), int(point["BLOCK"])
    size = p.size(found.length)
    lines = [
        f"i0 = tl.program_id(0){_int(found)}",
        "i1 = tl.arange(0, SEGMENTS)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]",
        "i2 = 0",
        f"mask = i1 < {size}",
        f"x = {_load(p, found, ('i0', 'i1', 'i2'), 'mask')}",
        f"inside = {found.scan}(x, 1)",
        f"total = {_reduce(found, 'x', 1)}",
        # Not the inclusive scan less the total: an infinity would turn into NaN before its place, a zero likewise.
        "j = tl.arange(0, SEGMENTS)",
        f"before = tl.where(j[None, :] < j[:, None], total[None, :], {found.unit})",
        f"start = {_reduce(found, 'before', 1)}",
        f"acc = inside {found.sign} start[:, None]",
        *epilogue(p, found.body, ("i0", "i1", "i2"), "mask", outs),
    ]
    text = kernel("scan_resident", p, ("SEGMENTS", "BLOCK"), lines)
    if found.sign == "*":
        text = _PRODUCT + text
    meta = {"SEGMENTS": max(1, row // inner), "BLOCK": inner, "num_warps": point["num_warps"]}
    builder.run("scan_resident", (found.outer,), p.args, **meta)
    return text, outs


_PRODUCT = "@triton.jit\ndef multiply(a, b):\n    return a * b\n\n\n"


def _reduce(found: _Found, name: str, axis: int) -> str:
    return f"tl.sum({name}, {axis})" if found.sign == "+" else f"tl.reduce({name}, {axis}, multiply)"


def _loop_lines(p: Params, found: _Found, outs: list[Tensor], first: str, last: str, carry: list[str]) -> list[str]:
    assert found.body is not None
    size, inner = p.size(found.length), p.size(found.inner)
    inside = [
        "i1 = at + tl.arange(0, BLOCK)[:, None]",
        f"mask = (i1 < {size}) & (i2 < {inner})",
        f"x = {_load(p, found, ('i0', 'i1', 'i2'), 'mask')}",
        f"acc = {found.scan}(x, 0) {found.sign} carry[None, :]",
        *epilogue(p, found.body, ("i0", "i1", "i2"), "mask", outs),
        # Not `carry += tl.sum(x)`: another use of carry in the loop trips an assertion in triton 3.6.
        "carry = tl.sum(tl.where(tl.arange(0, BLOCK)[:, None] == BLOCK - 1, acc, 0), 0)",
    ]
    return [
        f"groups = tl.cdiv({inner}, COLUMNS)",
        f"i0 = (tl.program_id(0) // groups){_int(found)}",
        f"i2 = ((tl.program_id(0) % groups){_int(found)} * COLUMNS + tl.arange(0, COLUMNS))[None, :]",
        *carry,
        f"for at in range({first}, {last}, BLOCK):",
        *(f"    {line}" for line in inside),
    ]


def _loop(builder: PlanBuilder, found: _Found, point: Point) -> tuple[str, list[Tensor]]:
    p, outs = Params(builder), _outs(builder, found)
    carry = [f"carry = tl.full([COLUMNS], {found.unit}, {_held(found)})"]
    lines = _loop_lines(p, found, outs, "0", p.size(found.length), carry)
    text = kernel("scan_loop", p, ("BLOCK", "COLUMNS"), lines)
    grid = (simplify(found.outer * builder.cdiv(found.inner, int(point["COLUMNS"]))),)
    builder.run("scan_loop", grid, p.args, BLOCK=point["BLOCK"], COLUMNS=point["COLUMNS"], num_warps=point["num_warps"])
    return text, outs


SPLITS = 64


def _split(builder: PlanBuilder, found: _Found, point: Point) -> tuple[str, list[Tensor]]:
    """Each of SPLITS programs reduces its piece, then scans it from the sum of the pieces before."""
    outs, columns = _outs(builder, found), int(point["COLUMNS"])
    held = "int64" if found.dtype == "int64" else "float32"
    totals = builder.empty((found.outer, SPLITS, found.inner), held)
    grid = (simplify(found.outer * builder.cdiv(found.inner, columns)), SPLITS)
    meta = {"BLOCK": point["BLOCK"], "COLUMNS": columns, "SPLITS": SPLITS, "num_warps": point["num_warps"]}

    p = Params(builder)
    size, inner = p.size(found.length), p.size(found.inner)
    head = [
        f"piece = tl.cdiv(tl.cdiv({size}, BLOCK), SPLITS) * BLOCK",
        "part = tl.program_id(1)",
    ]
    index = f"(i0 * SPLITS + {{}}) * {inner} + i2"
    place = [
        f"groups = tl.cdiv({inner}, COLUMNS)",
        f"i0 = (tl.program_id(0) // groups){_int(found)}",
        f"i2 = ((tl.program_id(0) % groups){_int(found)} * COLUMNS + tl.arange(0, COLUMNS))[None, :]",
    ]
    combine = f"piled = piled {found.sign} x"
    lines = [
        *head, *place,
        f"piled = tl.full([BLOCK, COLUMNS], {found.unit}, {_held(found)})",
        f"for at in range(part * piece, tl.minimum((part + 1) * piece, {size}), BLOCK):",
        "    i1 = at + tl.arange(0, BLOCK)[:, None]",
        f"    x = {_load(p, found, ('i0', 'i1', 'i2'), f'(i1 < {size}) & (i2 < {inner})')}",
        f"    {combine}",
        f"total = {_reduce(found, 'piled', 0)}[None, :]",
        f"tl.store({p.tensor(totals)} + {index.format('part')}, total, mask=i2 < {inner})",
    ]  # fmt: skip
    first = kernel("scan_totals", p, ("BLOCK", "COLUMNS", "SPLITS"), lines)
    builder.run("scan_totals", grid, p.args, **meta)

    q = Params(builder)
    size, inner = q.size(found.length), q.size(found.inner)
    carry = [
        "s = tl.arange(0, SPLITS)[:, None]",
        f"earlier = (s < part) & (i2 < {inner})",
        f"before = tl.load({q.tensor(totals)} + {index.format('s')}, mask=earlier, other={found.unit})",
        f"carry = {_reduce(found, 'before', 0)}",
    ]
    lines = [*head, *_loop_lines(q, found, outs, "part * piece", f"tl.minimum((part + 1) * piece, {size})", carry)]
    second = kernel("scan_pieces", q, ("BLOCK", "COLUMNS", "SPLITS"), lines)
    builder.run("scan_pieces", grid, q.args, **meta)
    return (_PRODUCT if found.sign == "*" else "") + first + "\n\n" + second, outs
