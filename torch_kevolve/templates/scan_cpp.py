"""Scan (C++): cumulative sums and products along any dimension.

Sums are carried in double, one element after the other, as eager does. Along the last dimension L rows are scanned at
once: an L x L block is transposed in registers, so the dependent chain is one addition per L elements, and a cache line
of every row is asked for ahead, read and written at a time. Elsewhere a strip of columns walks down the dimension. A
few long rows are cut into pieces whose totals are found first.
"""

from __future__ import annotations

from torch_kevolve.devices.base import DeviceFacts
from torch_kevolve.plan import PlanBuilder, Tensor
from torch_kevolve.sizes import evaluate, numel, simplify
from torch_kevolve.task import KernelTask, Ref
from torch_kevolve.templates.anchor_cpp import Args, aligned, before, cpp_space, lanes_of
from torch_kevolve.templates.around import after, name_of
from torch_kevolve.templates.base import Point, Space
from torch_kevolve.templates.expr import HELD_FLOATS, INTS, kind_of
from torch_kevolve.templates.scan_writer import Rows, Scan, Strips
from torch_kevolve.templates.vector_text import TRANSPOSE

NAME = "scan_cpp"
SCANS = {"cumsum": ("+", "0"), "cumprod": ("*", "1")}


class ScanCpp:
    """`cumsum` and `cumprod` with pointwise work before and after."""

    name = NAME
    language = "cpp"

    def match(self, task: KernelTask, device: DeviceFacts) -> Space | None:
        if device.type != "cpu":
            return None
        found = _find(task)
        return None if found is None else _space(task, found, device)


def _find(task: KernelTask) -> Scan | None:
    graph = task.graph
    places = [i for i, op in enumerate(graph.ops) if name_of(op) in SCANS]
    if len(places) != 1:
        return None
    op = graph.ops[places[0]]
    shape, source = op.outs[0].shape, op.args[0]
    dim = op.args[1] if len(op.args) > 1 else None
    if not shape or not isinstance(dim, int) or not isinstance(source, Ref) or 0 in shape:
        return None
    dim %= len(shape)
    out, taken = op.outs[0].dtype, graph.spec(source).dtype
    if out not in (*HELD_FLOATS, *INTS) or (out in INTS and kind_of(taken) == "float"):
        return None
    domain = (simplify(numel(shape[:dim])), shape[dim], simplify(numel(shape[dim + 1 :])))
    head = before(graph, source, domain)
    tail = after(graph, {(len(graph.inputs) + places[0], 0): "acc"}, domain, "cpp")
    if head is None or tail is None:
        return None
    return Scan(domain, *SCANS[name_of(op)], head.stores[0].text, out in INTS, head, tail)


def _space(task: KernelTask, found: Scan, device: DeviceFacts) -> Space | None:
    lanes = lanes_of(device)
    last = found.lane == 1
    stream = (0, 1) if aligned(found.tail, found.lane, lanes) else (0,)
    pieces = _pieces(task, found, device.units, lanes)
    axes: dict[str, tuple[int | float | bool | str, ...]] = {
        "algorithm": ("transpose", "scalar") if last and not found.whole else ("scalar",) if last else ("strip",),
        "U": (1, 2, 4, 8) if last else (1, 2, 4, 8, 16, 32),
        "NT": stream,
        "PIECES": (1, pieces) if last and pieces > 1 else (1,),
        # Rows of 4096 on Zen 3: 4.7 ms with 32 elements, 4.95 with 256; a copy takes 4.0.
        "AHEAD": (0, 16, 32, 64, 256) if last and not found.whole else (0,),
    }

    def valid(point: Point) -> bool:
        if point["algorithm"] == "transpose":
            return point["U"] == 1 and point["AHEAD"] != 0
        return point["AHEAD"] == 0 and not (point["NT"] and point["algorithm"] == "scalar")

    far, near = stream[-1], axes["PIECES"][-1]
    if last:
        good = [
            ("transpose", 1, far, near, 32),
            ("transpose", 1, far, near, 256),
            ("transpose", 1, 0, near, 32),
            ("scalar", 8, 0, near, 0),
            ("scalar", 4, 0, 1, 0),
            ("transpose", 1, 0, 1, 32),
        ]
    else:
        good = [
            ("strip", 128 // lanes, far, 1, 0),
            ("strip", 64 // lanes, 0, 1, 0),
            ("strip", 32 // lanes, far, 1, 0),
            ("strip", 1, 0, 1, 0),
        ]
    start: list[Point] = [dict(zip(axes, row, strict=True)) for row in good if row[0] in axes["algorithm"]]

    def make(builder: PlanBuilder, args: Args, point: Point) -> tuple[str, list[Tensor]]:
        outs = [builder.empty_output(place) for place in range(len(found.tail.stores))]
        write = Rows if last else Strips
        return write(found, builder, args, outs, point).text(), outs

    def moves(point: Point) -> tuple[str, ...]:
        named = {"transpose": "transpose-in-registers", "scalar": "interleave-rows", "strip": "column-strips"}
        return (
            named[str(point["algorithm"])],
            *(["stream-stores"] if point["NT"] else []),
            *(["split-row"] if point["PIECES"] != 1 else []),
        )

    return cpp_space(NAME, task, lanes, axes, start, make, valid, moves, lambda point: TRANSPOSE)


def _pieces(task: KernelTask, found: Scan, units: int, lanes: int) -> int:
    """Pieces per row that give every thread a block of `lanes` rows; 1 where there are rows enough."""
    rows, length = (evaluate(size, task.hint) for size in found.domain[:2])
    wanted = -(-units * lanes // max(1, rows))
    return wanted if wanted > 1 and length >= 4096 * wanted // max(1, units) else 1
