"""Rowwise C++: one pass per reduction over a row that stays in cache.

A row's inputs come from memory in the first pass and from L1 or L2 in the others; the last pass asks for the next
row's. A maximum and the sum of exponentials below it can share one pass, block by block. Each pass is unrolled into
independent accumulators; sums are flushed to double every BLOCK vectors (without it the error of a 32000-long sum is
2.4x eager's, with it 0.2x, for no measurable time). The value that the last reduction sums can be stashed per row, so
that an exp is computed once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch_kevolve.candidate import Candidate, Provenance
from torch_kevolve.devices.base import DeviceFacts
from torch_kevolve.plan import PlanBuilder, Tensor, build
from torch_kevolve.sizes import symbol
from torch_kevolve.task import KernelTask
from torch_kevolve.templates.anchor_cpp import lanes_of
from torch_kevolve.templates.base import Point, Space
from torch_kevolve.templates.cpp_text import signature, symbols_of
from torch_kevolve.templates.prelude import text
from torch_kevolve.templates.row_writer import RowWriter
from torch_kevolve.templates.rows import RowProgram, analyse, places_fit

NAME = "rowwise_cpp"
EXP = re.compile(r"kv::(exp|exp_low|sigmoid)\(")
"""What the prelude's exp of a chosen degree stands in."""


class RowwiseCpp:
    """Softmax, norms, cross-entropy and their like, with the reduced axes innermost in memory."""

    name = NAME
    language = "cpp"

    def match(self, task: KernelTask, device: DeviceFacts) -> Space | None:
        if device.type != "cpu":
            return None
        program = analyse(task)
        if isinstance(program, str) or not fits(program) or not places_fit(program):
            return None
        lanes = lanes_of(device)
        half = all(o.dtype in ("bfloat16", "float16") for o in program.outputs)
        plain = {"U": 4, "DEGREE": 7, "STASH": 0, "NT": 0, "BLOCK": 32, "ONLINE": 0, "PF": 0, "WIDEN": 0}
        body = RowWriter.source(program, lanes, plain)
        if body is None:
            return None
        # Degree 5 is right to 1e-7: enough in a sum along the row and for half types, too little for fp32 results.
        # Degree 4 (3e-6) rounds one value in many to bfloat16's other neighbour, which the judge rightly refuses.
        degrees = (7, 6) if RowWriter.shows_exp(program) and not half else (7, 6, 5)
        axes: dict[str, tuple[int, ...]] = {
            "U": (1, 2, 4),
            "DEGREE": degrees if EXP.search(body) else (7,),
            "STASH": (0, 1) if RowWriter.can_stash(program) else (0,),
            "NT": (0, 1) if any(program.level(o.ref.index) == "element" for o in program.outputs) else (0,),
            "BLOCK": (32, 128),
            "ONLINE": (0, 1) if RowWriter.online(program) else (0,),
            "PF": (0, 1),
            "WIDEN": (0, 1) if RowWriter.shared_halves(program) else (0,),
        }
        return Space(
            family=NAME,
            language="cpp",
            axes=axes,
            render=lambda point: render(program, point, lanes),
            start=tuple(_start(axes, half)),
            strategies=lambda point: strategies(point),
        )


def _start(axes: Mapping[str, tuple[int, ...]], half: bool) -> list[dict[str, int]]:
    """Good points, best first; those that differ only where the task leaves no choice come once."""
    most = {name: choices[-1] for name, choices in axes.items()}
    # A stash saves the second exp of a softmax; without one, maximum and sum are made in one walk.
    # Half results are written 16 bytes at a time, at which streaming gains nothing.
    stream = 0 if half else most["NT"]
    first = {**most, "U": 4, "BLOCK": 32, "NT": stream, "ONLINE": 0 if most["STASH"] else most["ONLINE"]}
    points = [
        first,
        {**first, "NT": most["NT"] - stream},
        {**first, "DEGREE": axes["DEGREE"][min(1, len(axes["DEGREE"]) - 1)]},
        {**first, "ONLINE": most["ONLINE"], "STASH": 0},
        {**first, "U": 2},
        {**first, "WIDEN": 0},
        {**first, "STASH": 0},
        {**first, "PF": 0},
        {**first, "DEGREE": 7, "NT": 0, "PF": 0},
    ]
    return [point for place, point in enumerate(points) if point not in points[:place]]


def fits(program: RowProgram) -> bool:
    """The last reduced axis is the one that every tensor of full size walks by single steps."""
    last = program.reduced[-1]
    wide = [load.strides for i, load in program.loads.items() if last in program.varies[i]]
    wide += [o.strides for o in program.outputs if last in program.varies[o.ref.index]]
    return bool(wide) and all(strides[last] in (0, 1) for strides in wide) and last == len(program.axes) - 1


def strategies(point: Point) -> tuple[str, ...]:
    moves = [f"unroll-{point['U']}", f"exp-degree-{point['DEGREE']}"]
    moves += ["stash-row"] if point["STASH"] else []
    moves += ["stream-stores"] if point["NT"] else []
    moves += ["online-softmax"] if point["ONLINE"] else []
    moves += ["prefetch"] if point["PF"] else []
    moves += ["widen-weights"] if point["WIDEN"] else []
    return tuple(moves)


def render(program: RowProgram, point: Mapping[str, int | float | bool | str], lanes: int) -> Candidate:
    body = RowWriter.source(program, lanes, point)
    assert body is not None
    task = program.task
    symbols = symbols_of([*program.axes, *(s for load in program.loads.values() for s in load.strides),
                          *(s for o in program.outputs for s in o.strides)])  # fmt: skip
    finals = [r for r in program.reduces if r.final]
    extra = [f"double* __restrict__ f{r.op}" for r in finals] + [f"int64_t {name}" for name in symbols]
    head = signature("rows", task.graph.inputs, task.graph.output_specs, extra)
    source = text(lanes, int(point["DEGREE"])) + f"\n{head} {{\n{body}}}\n"

    def launch(p: PlanBuilder, *inputs: Tensor) -> list[Tensor]:
        outs = [p.empty_output(place) for place in range(len(program.outputs))]
        parts = [p.empty((program.rows,), "float64") for _ in finals]
        p.run("rows", args=(*inputs, *outs, *parts, *(symbol(name) for name in symbols)))
        return outs

    provenance = Provenance("template", NAME, tuple(sorted(point.items())), strategies=strategies(point))
    return Candidate("cpp", source, build(task, launch), provenance)
