"""Pooling (C++): average and maximum windows in one to three dimensions.

`planes`: a window is separable, so its rows are reduced first, over whole input rows into a padded buffer that stays in
L1, then the buffer along the width. `channels`: where channels are innermost, vectors run over them. `offsets`: where
the place of the maximum is asked for, windows are walked in eager's order.
"""

from __future__ import annotations

from torch_kevolve.devices.base import DeviceFacts
from torch_kevolve.plan import PlanBuilder, Tensor
from torch_kevolve.sizes import numel
from torch_kevolve.task import Arg, KernelTask, Op, Ref
from torch_kevolve.templates.anchor_cpp import Args, aligned, cpp_space, lanes_of
from torch_kevolve.templates.around import after, leaf, name_of
from torch_kevolve.templates.base import Point, Space
from torch_kevolve.templates.expr import HELD_FLOATS
from torch_kevolve.templates.pooling_text import HELPERS
from torch_kevolve.templates.pooling_writer import Pool, PoolWriter

NAME = "pooling_cpp"
POOLS = {
    "avg_pool1d": (1, "avg"), "avg_pool2d": (2, "avg"), "avg_pool3d": (3, "avg"), "max_pool2d_with_indices": (2, "max"),
    "max_pool3d_with_indices": (3, "max"), "_low_memory_max_pool_with_offsets": (0, "max"),
}  # fmt: skip


class PoolingCpp:
    """Average and maximum pools of any window, stride, padding and rounding, and what follows them."""

    name = NAME
    language = "cpp"

    def match(self, task: KernelTask, device: DeviceFacts) -> Space | None:
        places = [i for i, op in enumerate(task.graph.ops) if name_of(op) in POOLS]
        if device.type != "cpu" or len(places) != 1:
            return None
        found = _find(task, places[0])
        return None if found is None else _space(task, found, lanes_of(device))


def _find(task: KernelTask, place: int) -> Pool | None:
    graph = task.graph
    op = graph.ops[place]
    rank, kind = POOLS[name_of(op)]
    rank = rank or len(_tuple(_at(op, 1, "kernel_size", ()), 0)) or 2
    window = _tuple(_at(op, 1, "kernel_size", ()), rank)
    stride = _tuple(_at(op, 2, "stride", ()), rank) or window
    pad = _tuple(_at(op, 3, "padding", 0), rank)
    dilation = _tuple(_at(op, 4, "dilation", 1), rank) if kind == "max" else (1,) * rank
    source = leaf(graph, op.args[0]) if isinstance(op.args[0], Ref) else None
    shape = op.outs[0].shape
    index = len(graph.inputs) + place
    used = {ref.item for each in graph.ops for ref in each.refs() if ref.index == index}
    used |= {ref.item for ref in graph.outputs if ref.index == index}
    offsets = 1 in used
    if source is None or source.dtype not in HELD_FLOATS or 0 in shape or len(shape) < rank:
        return None
    if {len(window), len(stride), len(pad), len(dilation)} != {rank} or (offsets and rank != 2):
        return None
    if offsets and (name_of(op) != "_low_memory_max_pool_with_offsets" or numel(window) > 127):
        return None
    lead, outs = shape[: len(shape) - rank], shape[len(shape) - rank :]
    values = {(index, 0): "acc", (index, 1): "off"} if offsets else {(index, 0): "acc"}
    body = after(graph, values, (*lead, *outs), "cpp")
    if body is None:
        return None
    override = _at(op, 6, "divisor_override", None)
    whole = bool(_at(op, 5, "count_include_pad", True)) if kind == "avg" else True
    rounded = bool(_at(op, 5 if kind == "max" else 4, "ceil_mode", False))
    divisor = override if isinstance(override, int) and kind == "avg" else None
    if kind == "avg" and divisor is None and not rounded and (whole or not any(pad)):
        divisor = int(numel(window))
    return Pool(kind, rank, window, stride, pad, dilation, whole, divisor, offsets, rounded, source, lead, outs, body)


def _at(op: Op, place: int, name: str, default: Arg) -> Arg:
    return op.args[place] if len(op.args) > place else dict(op.kwargs).get(name, default)


def _tuple(value: Arg, rank: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * rank
    if not isinstance(value, tuple) or not all(isinstance(v, int) for v in value):
        return ()
    numbers = tuple(int(v) for v in value if isinstance(v, int))
    return numbers * rank if len(numbers) == 1 else numbers


def _space(task: KernelTask, found: Pool, lanes: int) -> Space | None:
    form = "offsets" if found.offsets else "channels" if found.channels else "planes"
    lane = len(found.lead) - 1 if found.channels else len(found.lead) + found.rank - 1
    stream = (0, 1) if aligned(found.body, lane, lanes) else (0,)
    # A row without padding needs no buffer: windows are read from the input itself.
    bare = form == "planes" and not found.pad[-1] and found.steps[-1] == 1 and not found.rounded
    axes = {"ROWS": (1, 2, 4, 8, 16), "NT": stream, "BUFFER": (1, 0) if bare else (1,)}
    near = axes["BUFFER"][-1]
    rows = [(16, 0, near), (4, 0, near), (1, 0, near), (16, stream[-1], near), (16, 0, 1)]
    if form != "planes":
        axes, rows = {"ROWS": (1,), "NT": stream, "BUFFER": (1,)}, [(1, s, 1) for s in stream]
    start: list[Point] = [dict(zip(axes, row, strict=True)) for row in rows]

    def make(builder: PlanBuilder, args: Args, point: Point) -> tuple[str, list[Tensor]]:
        outs = [builder.empty_output(place) for place in range(len(found.body.stores))]
        writer = PoolWriter(found, args, outs, point, lane)
        return {"planes": writer.planes, "channels": writer.channels, "offsets": writer.offsets}[form](), outs

    def moves(point: Point) -> tuple[str, ...]:
        named = {"planes": "separable-window", "channels": "vector-channels", "offsets": "phase-rows"}
        return (named[form], *(["stream-stores"] if point["NT"] else []))

    return cpp_space(
        NAME,
        task,
        lanes,
        axes,
        list({str(p): p for p in start}.values()),
        make,
        moves=moves,
        helpers=lambda point: HELPERS,
    )
