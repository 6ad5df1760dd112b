"""Small matmul (Triton): batches of small products, whole matrices per program.

A matrix of up to 128 x 128 is one tile, so nothing is loaded twice. fp32 is multiplied on the tensor cores as a sum of
tf32 or bf16 products that is as exact as fp32 arithmetic; `ieee` stays on the fp32 units, and so do matrices with
values that are not finite (an infinity less its own high part is NaN) or near the top of fp32.
"""

from __future__ import annotations

from torch_kevolve.devices.base import DeviceFacts
from torch_kevolve.plan import PlanBuilder, Tensor
from torch_kevolve.sizes import next_power_of_2, simplify, upper_bound
from torch_kevolve.task import KernelTask
from torch_kevolve.templates.base import Point, Space
from torch_kevolve.templates.expr import HELD_FLOATS
from torch_kevolve.templates.kernel_text import HELD, Params, address, epilogue, kernel, triton_space
from torch_kevolve.templates.matmul_parts import Matmul, find


class SmallMatmulTriton:
    """`bmm` and `baddbmm` with M, N and K up to 128."""

    name = "small_matmul_triton"
    language = "triton"

    def match(self, task: KernelTask, device: DeviceFacts) -> Space | None:
        found = find(task) if device.type == "cuda" else None
        if found is None or found.tail is not None or len(found.left.shape) != 3:
            return None
        bounds = [upper_bound(size, task.symbols) for size in found.sizes[1:]]
        if any(b is None or b > 128 for b in bounds) or found.dtype not in HELD_FLOATS:
            return None
        m, n, k = (max(16, next_power_of_2(b or 1)) for b in bounds)
        return _space(self.name, task, found, (m, n, k), device)


def _space(
    family: str, task: KernelTask, found: Matmul, blocks: tuple[int, int, int], device: DeviceFacts
) -> Space | None:
    m, n, _ = blocks
    full = found.dtype == "float32"
    # The bf16 sums exist on NVIDIA alone.
    sums = ("tf32x3", "bf16x6", "ieee") if device.arch.startswith("cuda") else ("ieee",)
    axes = {
        "MATRICES": (1, 2, 4, 8, 16),
        "precision": sums if full else ("plain",),
        "num_warps": (1, 2, 4, 8),
        "num_stages": (1, 2, 3),
    }

    def valid(point: Point) -> bool:
        warps = int(point["num_warps"])
        if (point["MATRICES"] == 1) != (point["num_stages"] == 1):
            return False
        return m * n // (32 * warps) <= 128 and (m // 16) * (n // 8) >= warps

    first = "ieee" if full else "plain"
    rows = [(1, first, 4, 1), (2, first, 1, 3), (1, first, 2, 1), (2, first, 1, 2), (1, first, 1, 1), (4, first, 1, 2)]
    if full:
        rows += [
            (1, "tf32x3", 1, 1),
            (1, "tf32x3", 4, 1),
            (2, "tf32x3", 1, 2),
            (1, "tf32x3", 8, 1),
            (1, "bf16x6", 1, 1),
        ]
    rows += [(4, first, 4, 2), (8, first, 4, 3), (1, first, 8, 1)]
    start: list[Point] = [dict(zip(axes, row, strict=True)) for row in rows if row[1] in axes["precision"]]

    def make(builder: PlanBuilder, point: Point) -> tuple[str, list[Tensor]]:
        return _render(builder, found, blocks, point)

    def moves(point: Point) -> tuple[str, ...]:
        return ("matrix-per-program", *(["emulated-fp32"] if point["precision"] in ("tf32x3", "bf16x6") else []))

    return triton_space(family, task, axes, start, make, valid, moves)


def _render(
    builder: PlanBuilder, found: Matmul, blocks: tuple[int, int, int], point: Point
) -> tuple[str, list[Tensor]]:
    p = Params(builder)
    outs = [builder.empty_output(i) for i in range(len(found.body.stores))]
    batch, m, n, k = (p.size(size) for size in found.sizes)
    a = address(p, found.first, ("i0", "rm[:, None]", "rk[None, :]"))
    b = address(p, found.second, ("i0", "rk[:, None]", "rn[None, :]"))
    exact = found.sizes[1:] == blocks
    keep_a = "" if exact else f", mask=(rm[:, None] < {m}) & (rk[None, :] < {k}), other=0"
    keep_b = "" if exact else f", mask=(rk[:, None] < {k}) & (rn[None, :] < {n}), other=0"
    inside = [
        "i0 = start + j",
        f"a = tl.load({p.input(found.left.index)} + {a}{keep_a})",
        f"b = tl.load({p.input(found.right.index)} + {b}{keep_b})",
        *_product(str(point["precision"])),
    ]
    if found.bias is not None:
        where = address(p, found.bias_strides, ("i0", "i1", "i2"))
        held = HELD.get(found.bias.dtype, "")
        inside.append(
            f"acc += tl.load({p.input(found.bias.index)} + {where} + i1 * 0 + i2 * 0, mask=mask, other=0){held}"
        )
    inside += epilogue(p, found.body, ("i0", "i1", "i2"), "mask" if not exact else "", outs)
    lines = [
        "rm = tl.arange(0, BLOCK_M)",
        "rn = tl.arange(0, BLOCK_N)",
        "rk = tl.arange(0, BLOCK_K)",
        "i1 = rm[:, None]",
        "i2 = rn[None, :]",
        f"mask = (i1 < {m}) & (i2 < {n})",
        "start = tl.program_id(0).to(tl.int64) * MATRICES",
        f"for j in range(0, tl.minimum(MATRICES, {batch} - start)):",
        *(f"    {line}" for line in inside),
    ]
    if point["MATRICES"] == 1:
        lines[-len(inside) - 1 :] = ["j = 0", *inside]
    text = kernel("small_matmul", p, ("MATRICES", "BLOCK_M", "BLOCK_N", "BLOCK_K"), lines)
    grid = (simplify(builder.cdiv(found.sizes[0], int(point["MATRICES"]))),)
    meta = {"MATRICES": point["MATRICES"], "BLOCK_M": blocks[0], "BLOCK_N": blocks[1], "BLOCK_K": blocks[2]}
    builder.run("small_matmul", grid, p.args, **meta, num_warps=point["num_warps"], num_stages=point["num_stages"])
    return text, outs


def _product(precision: str) -> list[str]:
    """Statements from tiles `a` and `b` to `acc`."""
    if precision == "plain":
        return ["acc = tl.dot(a, b)"]
    if precision == "ieee":
        return ['acc = tl.dot(a, b, input_precision="ieee")']
    return [
        "low = tl.min((tl.abs(a) < 1.0e38).to(tl.int32)) + tl.min((tl.abs(b) < 1.0e38).to(tl.int32))",
        "if low == 2:",
        f'    acc = tl.dot(a, b, input_precision="{precision}")',
        "else:",
        '    acc = tl.dot(a, b, input_precision="ieee")',
    ]
