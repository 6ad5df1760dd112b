"""Rowwise (Triton): softmax, norms, cross-entropy, reductions: any row program.

`resident`: the row in one block; every input is read once. `loop`: passes over a long row, the maximum and the sum of
exponentials in one of them, each next pass in the reverse order, so that it starts with what is still in L2. `split`:
the reductions of few long rows (or of columns) spread over programs, then combined. `cooperative`: a long row in
pieces that stay on chip while their programs exchange what they found.

Not here: pieces of long rows finished by whichever program is free while they lie in L2. On an H200 a softmax of
4096 x 131072 in fp32 took 2.28 to 2.36 ms that way, against 1.34 ms for `loop` and 1.17 ms for `cooperative`.
"""

from __future__ import annotations

from torch_kevolve.devices.base import DeviceFacts
from torch_kevolve.plan import PlanBuilder, Tensor
from torch_kevolve.sizes import next_power_of_2, simplify, upper_bound
from torch_kevolve.task import KernelTask
from torch_kevolve.templates.base import Point, Space
from torch_kevolve.templates.kernel_text import is_wide, triton_space
from torch_kevolve.templates.row_cooperative import Cooperative, most_pieces
from torch_kevolve.templates.row_levels import levels
from torch_kevolve.templates.row_passes import Render
from torch_kevolve.templates.rows import RowProgram, analyse


class RowwiseTriton:
    """Everything that `rows.analyse` accepts, in fp32, fp16, bf16, integers and bool."""

    name = "rowwise_triton"
    language = "triton"

    def match(self, task: KernelTask, device: DeviceFacts) -> Space | None:
        if device.type != "cuda":
            return None
        program = analyse(task)
        if isinstance(program, str) or _finals_feed_rows(program):
            return None
        return _space(self.name, task, program, device)


def _finals_feed_rows(program: RowProgram) -> bool:
    """Whether a per-row value needs a number that is made over all rows: that takes two launches over the data."""
    base = len(program.graph.inputs)
    tainted = {base + reduce.op for reduce in program.reduces if reduce.final}
    for number, op in enumerate(program.graph.ops):
        if any(ref.index in tainted for ref in op.refs()):
            if program.level(base + number) != "scalar":
                return True
            tainted.add(base + number)
    return False


def _space(family: str, task: KernelTask, program: RowProgram, device: DeviceFacts) -> Space | None:
    bound = upper_bound(program.row_size, task.symbols)
    row = 0 if bound is None else next_power_of_2(bound)
    whole = any(program.level(out.ref.index) == "element" for out in program.outputs)
    hard = any(r.kind in ("var", "var_mean", "prod") for r in program.reduces)
    simple = not whole and not hard and levels(program) == 1
    inner = _inner(program)
    # A piece that waited in vain sums the row in another order: right, but not to the last bit.
    steady = "deterministic" not in dict(task.flags)
    axes = {
        "algorithm": ("resident", "loop", "split", "cooperative"),
        "BLOCK": tuple(2**i for i in range(4, 18)),
        "ROWS": (1, 2, 4, 8, 16, 32, 64, 128),
        "num_warps": (1, 2, 4, 8, 16, 32),
        "order": ("reverse", "forward"),
    }

    def valid(point: Point) -> bool:
        block, rows, warps = int(point["BLOCK"]), int(point["ROWS"]), int(point["num_warps"])
        held = block * rows / (32 * warps)
        if not 1 <= held <= 128 or (inner and rows < 8):
            return False
        if point["algorithm"] == "resident":
            return block == row and point["order"] == "reverse"
        if point["algorithm"] == "cooperative":
            fits = isinstance(program.row_size, int) and 2 <= -(-program.row_size // block) <= most_pieces(device)
            return whole and steady and fits and rows == 1 and point["order"] == "reverse"
        if point["algorithm"] == "split":
            return simple and point["order"] == "reverse" and (row == 0 or block * 8 <= row)
        return (row == 0 or block * 2 <= row) and held <= 64

    rows = int(numel_hint(program))
    good: list[tuple[str, int, int, int, str]] = []
    if inner:
        for width, block, warps in ((64, 32, 4), (128, 64, 8), (64, 64, 8), (128, 32, 8), (32, 64, 4), (128, 16, 4)):
            kind = "split" if simple and rows < 132 * width * 8 else "loop"
            good.append((kind, block, width, warps, "reverse"))
        good += [("loop", 32, 64, 4, "reverse"), ("loop", 16, 16, 4, "reverse"), ("resident", row, 32, 8, "reverse")]
        good += [("resident", row, per, warps, "reverse") for per, warps in ((8, 4), (16, 4), (64, 8))]
    else:
        for warps, per in ((4, 1), (8, 1), (16, 1), (32, 1), (4, 4), (4, 16), (1, 1), (2, 1), (1, 16), (4, 64)):
            if 0 < row <= 65536 and 4 <= row * per / (32 * warps) <= 64:
                good.append(("resident", row, per, warps, "reverse"))
        if row > 65536:  # fastest on an H200 for softmax and log-softmax of 128k columns, in fp32 and in bf16
            good += [("cooperative", row // 8, 1, 8, "reverse"), ("loop", 32768, 1, 32, "reverse")]
            good += [("cooperative", row // 16, 1, 4, "reverse"), ("loop", 32768, 1, 16, "reverse")]
            good += [("cooperative", row // 16, 1, 8, "reverse"), ("cooperative", row // 8, 1, 4, "reverse")]
            longer = ((16384, 4), (16384, 8), (32768, 8), (32768, 16), (8192, 4))
            good += [("cooperative", block, 1, warps, "reverse") for block, warps in longer if row // block > 16]
        for block, warps in ((8192, 4), (8192, 8), (4096, 4), (16384, 16), (4096, 8), (16384, 8), (1024, 4)):
            good.append(("loop", block, 1, warps, "reverse"))
        good.append(("split", 4096, 1, 8, "reverse"))
        good += [("resident", row, 1, 1, "reverse"), ("resident", row, 32, 1, "reverse")]
    start: list[Point] = [dict(zip(axes, each, strict=True)) for each in good if each[1] in axes["BLOCK"]]

    def make(builder: PlanBuilder, point: Point) -> tuple[str, list[Tensor]]:
        algorithm = Cooperative if point["algorithm"] == "cooperative" else Render
        # Offsets of 64 bits fold into the addresses of a piece: 96 registers instead of 125 for a softmax's of 8192.
        return algorithm(builder, program, point, is_wide(task) or algorithm is Cooperative).done()

    def moves(point: Point) -> tuple[str, ...]:
        return {
            "resident": ("row-on-chip",),
            "loop": ("online-softmax", "reverse-second-pass") if point["order"] == "reverse" else ("online-softmax",),
            "split": ("split-row",),
            "cooperative": ("row-on-chip", "cooperative-programs"),
        }[str(point["algorithm"])]

    return triton_space(family, task, axes, start, make, valid, moves)


def numel_hint(program: RowProgram) -> int:
    rows = simplify(program.rows)
    return rows if isinstance(rows, int) else 1 << 20


def _inner(program: RowProgram) -> bool:
    """Whether neighbouring rows, not neighbouring columns, lie side by side in the largest input."""
    wide = [load for i, load in program.loads.items() if program.level(i) == "element" and load.strides]
    full = [load for load in wide if len(program.varies[load.input]) == max(len(program.varies[w.input]) for w in wide)]
    ones = [any(load.strides[a] == 1 for a in program.reduced) for load in full]
    return bool(ones) and not any(ones)
