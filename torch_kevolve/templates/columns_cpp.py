"""Columns C++: reductions over an axis that is not innermost.

Sums over a batch, argmax along dimension 0, softmax over channels: the lanes of a vector are neighbouring columns, so
no lane is ever combined with another. A strip of columns is narrow enough to be read again from cache by later stages.
"""

from __future__ import annotations

from torch_kevolve.devices.base import DeviceFacts
from torch_kevolve.plan import PlanBuilder, Tensor
from torch_kevolve.sizes import Size
from torch_kevolve.task import KernelTask
from torch_kevolve.templates.anchor_cpp import Args, cpp_space, lanes_of
from torch_kevolve.templates.base import Choice, Point, Space
from torch_kevolve.templates.column_writer import ColumnWriter
from torch_kevolve.templates.cpp_text import Unwritable
from torch_kevolve.templates.rows import RowProgram, analyse, places_fit

NAME = "columns_cpp"


class ColumnsCpp:
    """Row programs whose innermost axis is not reduced."""

    name = NAME
    language = "cpp"

    def match(self, task: KernelTask, device: DeviceFacts) -> Space | None:
        if device.type != "cpu":
            return None
        program = analyse(task)
        if isinstance(program, str) or not fits(program) or not places_fit(program):
            return None
        return _space(task, program, lanes_of(device), device.units)


def fits(program: RowProgram) -> bool:
    """The innermost axis is parallel, every result varies over it, and nothing is reduced to one number."""
    lane = len(program.axes) - 1
    if lane in program.reduced or program.axes[lane] == 1 or any(reduce.final for reduce in program.reduces):
        return False
    return bool(program.reduces) and all(lane in program.varies[out.ref.index] for out in program.outputs)


def _space(task: KernelTask, program: RowProgram, lanes: int, threads: int) -> Space | None:
    lane = len(program.axes) - 1
    inner: Size = program.axes[lane]
    elements = [out for out in program.outputs if program.level(out.ref.index) == "element"]
    stream = any(out.dtype == "float32" and out.strides[lane] == 1 for out in elements)
    axes: dict[str, tuple[Choice, ...]] = {
        "U": (1, 2, 4, 8, 16),
        "BLOCK": (16, 32),
        "DEGREE": (7, 6, 5) if all(out.dtype in ("bfloat16", "float16") for out in program.outputs) else (7, 6),
        "NT": (0, 1) if stream else (0,),
        "PIECES": (1, threads, 2 * threads) if threads > 1 and ColumnWriter.splits(program) else (1,),
    }
    shared = axes["PIECES"][min(1, len(axes["PIECES"]) - 1)]

    def valid(point: Point) -> bool:
        return point["U"] == 1 or not isinstance(inner, int) or int(point["U"]) * lanes <= inner

    exact = axes["DEGREE"][1]
    good = [
        (8, 32, exact, 0, shared),
        (4, 32, exact, 0, 1),
        (8, 32, exact, 0, 1),
        (4, 32, exact, 0, shared),
        (2, 32, exact, 0, shared),
        (1, 32, exact, 0, shared),
        (2, 32, 7, 0, 1),
        (8, 32, exact, axes["NT"][-1], 1),
        (16, 32, exact, 0, shared),
        (16, 32, exact, 0, 1),
        (1, 16, 7, 0, 1),
    ]
    start: list[Point] = [dict(zip(axes, row, strict=True)) for row in dict.fromkeys(good)]

    def make(builder: PlanBuilder, args: Args, point: Point) -> tuple[str, list[Tensor]]:
        outs = [builder.empty_output(place) for place in range(len(program.outputs))]
        try:
            body = ColumnWriter(program, lanes, point).text()
        except Unwritable:
            raise ValueError("a value has no text") from None
        names = [args.input(place) for place in range(len(task.graph.inputs))]
        results = [args.tensor(out) for out in outs]
        for symbol in _sizes(program):
            args.size(symbol)
        aliases = [f"auto* __restrict__ y{place} = {name};" for place, name in enumerate(results)]
        assert names == [f"x{place}" for place in range(len(names))]
        return "\n".join([*aliases, body]), outs

    def moves(point: Point) -> tuple[str, ...]:
        moves = [f"column-strips-{point['U']}", *(["stream-stores"] if point["NT"] else [])]
        return (*moves, *(["shared-rows"] if point["PIECES"] != 1 else []))

    return cpp_space(NAME, task, lanes, axes, start, make, valid, moves)


def _sizes(program: RowProgram) -> list[Size]:
    """Every size that the body may write."""
    strides = [s for load in program.loads.values() for s in load.strides]
    return [
        *program.axes,
        *strides,
        *(s for out in program.outputs for s in out.strides),
        *(r.count for r in program.reduces),
    ]
