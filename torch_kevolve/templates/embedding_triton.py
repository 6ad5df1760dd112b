"""Embedding (Triton): gathers of table rows, one by one or summed by bag."""

from __future__ import annotations

from torch_kevolve.devices.base import DeviceFacts
from torch_kevolve.plan import PlanBuilder, Tensor
from torch_kevolve.sizes import Size, next_power_of_2, numel, simplify, upper_bound
from torch_kevolve.task import KernelTask, Op, Ref
from torch_kevolve.templates.around import Body, Leaf, after, leaf, name_of, spread
from torch_kevolve.templates.base import Point, Space
from torch_kevolve.templates.expr import HELD_FLOATS
from torch_kevolve.templates.kernel_text import Params, address, epilogue, kernel, triton_space

BAGS = ("_embedding_bag", "_embedding_bag_forward_only")


class EmbeddingTriton:
    """`embedding`, and `_embedding_bag` in sum and mean, with what is done to their rows."""

    name = "embedding_triton"
    language = "triton"

    def match(self, task: KernelTask, device: DeviceFacts) -> Space | None:
        if device.type != "cuda":
            return None
        found = _read(task)
        return None if found is None else _space(self.name, task, found)


class _Found:
    """The anchor, its table and indices as seen through views, and the epilogue over (rows, columns)."""

    def __init__(self, task: KernelTask, place: int) -> None:
        graph = task.graph
        self.op = graph.ops[place]
        self.is_bag = name_of(self.op) in BAGS
        out = self.op.outs[0]
        self.columns = out.shape[-1]
        self.rows: Size = simplify(numel(out.shape[:-1]))
        domain = (self.rows, self.columns)
        self.body: Body | None = after(graph, {(len(graph.inputs) + place, 0): "acc"}, domain)
        self.table = _leaf(task, self.op, 0)
        self.indices = _leaf(task, self.op, 1)
        self.offsets = _leaf(task, self.op, 2) if self.is_bag else None
        self.weights = _leaf(task, self.op, 6) if self.is_bag else None
        self.mode = _arg(self.op, 4, "mode", 0) if self.is_bag else 0
        self.padding = _arg(self.op, 8, "padding_idx", -1) if self.is_bag else -1
        self.last = bool(_arg(self.op, 7, "include_last_offset", False)) if self.is_bag else False


def _arg(op: Op, place: int, name: str, default: object) -> object:
    return op.args[place] if len(op.args) > place else dict(op.kwargs).get(name, default)


def _leaf(task: KernelTask, op: Op, place: int) -> Leaf | None:
    ref = op.args[place] if len(op.args) > place else None
    return leaf(task.graph, ref) if isinstance(ref, Ref) else None


def _read(task: KernelTask) -> _Found | None:
    places = [i for i, op in enumerate(task.graph.ops) if name_of(op) in ("embedding", *BAGS)]
    if len(places) != 1:
        return None
    found = _Found(task, places[0])
    table, indices = found.table, found.indices
    if found.body is None or table is None or indices is None or table.dtype not in HELD_FLOATS:
        return None
    if indices.dtype not in ("int64", "int32") or upper_bound(found.columns, task.symbols) is None:
        return None
    if found.is_bag:
        has_weights = len(found.op.args) > 6 and found.op.args[6] is not None
        fits = found.mode in (0, 1) and found.offsets is not None and (found.weights is not None or not has_weights)
        return found if fits and len(indices.shape) == 1 else None
    flat = spread((*indices.shape, 1), (*indices.strides, 0), (found.rows, 1))
    return None if flat is None else found


def _space(family: str, task: KernelTask, found: _Found) -> Space | None:
    def make(builder: PlanBuilder, point: Point) -> tuple[str, list[Tensor]]:
        return _bag(builder, found, point) if found.is_bag else _rows(builder, found, point)

    def moves(point: Point) -> tuple[str, ...]:
        return ("unrolled-gather", "warp-per-bag") if found.is_bag and point["num_warps"] == 1 else ("unrolled-gather",)

    block = min(next_power_of_2(upper_bound(found.columns, task.symbols) or 1), 1024)

    def valid(point: Point) -> bool:
        held = int(point["UNROLL"]) * block / (32 * int(point["num_warps"]))
        return 1 <= held <= 64 and (found.is_bag or point["BAGS"] == 1)

    axes = {"UNROLL": (1, 2, 4, 8, 16, 32), "BAGS": (1, 2, 4), "num_warps": (1, 2, 4, 8)}
    good = [(8, 1, 1), (16, 1, 2), (8, 1, 2), (4, 1, 1), (16, 1, 4), (8, 4, 1), (32, 1, 4), (4, 1, 4), (1, 1, 1)]
    start = [{"UNROLL": u, "BAGS": b, "num_warps": w} for u, b, w in good]
    return triton_space(family, task, axes, start, make, valid, moves)


def _rows(builder: PlanBuilder, found: _Found, point: Point) -> tuple[str, list[Tensor]]:
    assert found.body is not None and found.table is not None and found.indices is not None
    p = Params(builder)
    outs = [builder.empty_output(i) for i in range(len(found.body.stores))]
    flat = spread((*found.indices.shape, 1), (*found.indices.strides, 0), (found.rows, 1))
    assert flat is not None
    rows, columns = p.size(found.rows), p.size(found.columns)
    table = address(p, found.table.strides, ("ix[:, None]", "i1"))
    index = f"{p.input(found.indices.index)} + {address(p, flat[:1], ('r',))}"
    lines = [
        "r = tl.program_id(0).to(tl.int64) * UNROLL + tl.arange(0, UNROLL)",
        "i1 = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]",
        "i0 = r[:, None]",
        f"ix = tl.load({index}, mask=r < {rows}, other=0).to(tl.int64)",
        f"mask = (i0 < {rows}) & (i1 < {columns})",
        f"acc = tl.load({p.input(found.table.index)} + {table}, mask=mask, other=0).to(tl.float32)",
        *epilogue(p, found.body, ("i0", "i1"), "mask", outs),
    ]
    block = min(int(builder.next_power_of_2(found.columns)), 1024)
    grid = (builder.cdiv(found.rows, int(point["UNROLL"])), builder.cdiv(found.columns, block))
    text = kernel("embedding_rows", p, ("UNROLL", "BLOCK"), lines)
    builder.run("embedding_rows", grid, p.args, UNROLL=point["UNROLL"], BLOCK=block, num_warps=point["num_warps"])
    return text, outs


def _bag(builder: PlanBuilder, found: _Found, point: Point) -> tuple[str, list[Tensor]]:
    assert found.body is not None and found.table is not None
    assert found.indices is not None and found.offsets is not None
    p = Params(builder)
    outs = [builder.empty_output(i) for i in range(len(found.body.stores))]
    rows, columns = p.size(found.rows), p.size(found.columns)
    total = p.size(found.indices.shape[0])
    offsets = p.input(found.offsets.index)
    step = p.size(found.offsets.strides[0])
    end = f"tl.load({offsets} + (bag + 1) * {step}, mask=bag < {rows}, other=0)"
    if not found.last:
        end = f"tl.load({offsets} + (bag + 1) * {step}, mask=bag + 1 < {rows}, other={total})"
    index = address(p, found.indices.strides, ("at",))
    table = f"{p.input(found.table.index)} + {address(p, found.table.strides, ('ix[:, None]', 'i1'))}"
    live = "(at < last)" + ("" if found.padding == -1 else f" & (ix != {found.padding})")
    gather = [
        "at = k + tl.arange(0, UNROLL)",
        f"ix = tl.load({p.input(found.indices.index)} + {index}, mask=at < last, other=0).to(tl.int64)",
        f"live = {live}",
        f"row = tl.load({table}, mask=live[:, None] & (i1 < {columns}), other=0).to(tl.float32)",
    ]
    if found.weights is not None:
        scale = address(p, found.weights.strides, ("at",))
        scales = f"tl.load({p.input(found.weights.index)} + {scale}, mask=at < last, other=0)"
        gather.append(f"row *= {scales}.to(tl.float32)[:, None]")
    gather.append("total += row")
    if found.mode == 1:
        gather.append("count += live.to(tl.float32)")
    one = _one_row(p, found, columns)
    inside = [
        "bag = tl.program_id(0).to(tl.int64) * BAGS + j",
        f"first = tl.load({offsets} + bag * {step}, mask=bag < {rows}, other=0).to(tl.int64)",
        f"last = {end}.to(tl.int64)",
        f"last = tl.where(bag < {rows}, last, first)",
        "total = tl.zeros([UNROLL, BLOCK], tl.float32)",
        *(["count = tl.zeros([UNROLL], tl.float32)"] if found.mode == 1 else []),
        "for k in range(first, last, UNROLL):",
        *(f"    {line}" for line in gather),
        "acc = tl.sum(total, 0)[None, :]",
        # Sums of their own per lane may overflow where the whole does not: then once more, row by row in double.
        'if tl.max((tl.abs(acc) < float("inf")).to(tl.int32) == 0) > 0:',
        "    exact = tl.zeros([1, BLOCK], tl.float64)",
        "    for at in range(first, last):",
        *(f"        {line}" for line in one),
        '    acc = tl.where(tl.abs(acc) < float("inf"), acc, exact.to(tl.float32))',
        *(["acc = acc / tl.maximum(tl.sum(count, 0), 1.0)"] if found.mode == 1 else []),
        "i0 = bag",
        f"mask = (i1 < {columns}) & (i1 * 0 + bag < {rows})",
        *epilogue(p, found.body, ("i0", "i1"), "mask", outs),
    ]
    lines = [
        "i1 = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK))[None, :]",
        "for j in range(BAGS):",
        *(f"    {line}" for line in inside),
    ]
    block = min(int(builder.next_power_of_2(found.columns)), 1024)
    grid = (builder.cdiv(found.rows, int(point["BAGS"])), builder.cdiv(found.columns, block))
    text = kernel("embedding_bag", p, ("UNROLL", "BAGS", "BLOCK"), lines)
    meta = {"UNROLL": point["UNROLL"], "BAGS": point["BAGS"], "BLOCK": block, "num_warps": point["num_warps"]}
    builder.run("embedding_bag", grid, p.args, **meta)
    return text, outs


def _one_row(p: Params, found: _Found, columns: str) -> list[str]:
    """Statements that add the row of place `at` to `exact`."""
    assert found.table is not None and found.indices is not None
    index = address(p, found.indices.strides, ("at",))
    table = address(p, found.table.strides, ("ix", "i1"))
    live = f"(i1 < {columns})" + ("" if found.padding == -1 else f" & (ix != {found.padding})")
    lines = [
        f"ix = tl.load({p.input(found.indices.index)} + {index}).to(tl.int64)",
        f"row = tl.load({p.input(found.table.index)} + {table}, mask={live}, other=0).to(tl.float64)",
    ]
    if found.weights is not None:
        scale = address(p, found.weights.strides, ("at",))
        lines.append(f"row *= tl.load({p.input(found.weights.index)} + {scale}).to(tl.float64)")
    return [*lines, "exact += row"]
