"""Plane matmul (Triton): fp32 products on the 16-bit tensor cores.

Each operand is split once into three bf16 planes (x = high + middle + low, 24 bits in all); six products of planes are
summed, each block of K in a fresh accumulator that is added in fp32: without that the tensor core's own truncation
costs two digits. Values that no three planes hold (NaN, inf, near the top of fp32) raise a flag on the device; then the
same plan's last kernel does the product on the fp32 units.
"""

from __future__ import annotations

from torch_kevolve.devices.base import DeviceFacts
from torch_kevolve.plan import PlanBuilder, Tensor
from torch_kevolve.sizes import Size, numel
from torch_kevolve.task import KernelTask
from torch_kevolve.templates.around import Leaf, dense
from torch_kevolve.templates.base import Point, Space
from torch_kevolve.templates.kernel_text import Params, epilogue, is_wide, kernel, triton_space
from torch_kevolve.templates.matmul_parts import TILE, Matmul, find, in_bytes
from torch_kevolve.templates.matmul_rows_triton import combine, partial, row_parts
from torch_kevolve.templates.matmul_triton import bias, bounds, tiles, whole

PLANES = 3
PRODUCTS = ((0, 2), (2, 0), (1, 1), (0, 1), (1, 0), (0, 0))
"""Smallest first, so that the small ones are not lost in the large."""

_SPLIT = """
@triton.jit
def split(x_ptr, high_ptr, middle_ptr, low_ptr, flag_ptr, n, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + o, mask=o < n, other=0)
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    tl.store(high_ptr + o, high, mask=o < n)
    tl.store(middle_ptr + o, middle, mask=o < n)
    tl.store(low_ptr + o, (rest - middle.to(tl.float32)).to(tl.bfloat16), mask=o < n)
    bad = tl.max(((tl.abs(x) < 3.0e38) == 0).to(tl.int32), 0)
    if bad > 0:
        tl.atomic_max(flag_ptr, 1)
"""


class PlaneMatmulTriton:
    """`mm` and `addmm` of dense fp32 matrices where TF32 is not allowed, with a pointwise or row-wise epilogue."""

    name = "plane_matmul_triton"
    language = "triton"

    def match(self, task: KernelTask, device: DeviceFacts) -> Space | None:
        if device.type != "cuda" or not device.arch.startswith("cuda:9"):
            return None
        found = find(task)
        if found is None or found.sizes[0] != 1 or found.dtype != "float32":
            return None
        if found.right.dtype != "float32" or not (_whole(task, found.left) and _whole(task, found.right)):
            return None
        if not all(in_bytes(max(_ints(strides)), 2) for strides in (found.first[1:], found.second[1:])):
            return None
        return _space(self.name, task, found, device)


def _whole(task: KernelTask, leaf: Leaf) -> bool:
    spec = task.graph.inputs[leaf.index]
    return dense(spec.shape, spec.strides) and 1 in leaf.strides and leaf.shape[0] != 1 and leaf.shape[1] != 1


def _ints(strides: tuple[Size, ...]) -> list[int]:
    return [s if isinstance(s, int) else 1 for s in strides]


def _space(family: str, task: KernelTask, found: Matmul, device: DeviceFacts) -> Space | None:
    axes = {
        "BLOCK_M": (64, 128), "BLOCK_N": (64, 128, 256), "BLOCK_K": (32, 64), "GROUP": (4, 8, 16),
        "num_warps": (4, 8), "num_stages": (1, 2, 3, 4),
    }  # fmt: skip
    limit = device.shared_bytes or 160 << 10

    def valid(point: Point) -> bool:
        bm, bn, bk, stages = (int(point[k]) for k in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_stages"))
        shared = (bm + bn) * bk * 2 * PLANES * stages
        if isinstance(found.sizes[3], int) and found.sizes[3] <= bk:
            # The loop over K is folded away; then the staging of the result lies beside the planes' (seen offline).
            shared += bm * bn * 4
        # Two accumulators of 64 fp32 each a thread; more spills.
        return shared <= limit and bm * bn // (32 * int(point["num_warps"])) <= 64

    good = [
        (128, 128, 32, 8, 8, 4), (128, 128, 64, 8, 8, 2), (128, 128, 32, 8, 8, 3), (128, 64, 32, 8, 4, 4),
        (64, 128, 64, 8, 4, 2), (128, 64, 64, 8, 8, 3), (64, 64, 64, 8, 4, 3),
    ]  # fmt: skip
    start: list[Point] = [dict(zip(axes, row, strict=True)) for row in good]

    def make(builder: PlanBuilder, point: Point) -> tuple[str, list[Tensor]]:
        return _render(builder, found, point, max(1, device.units))

    tail = ("reduction-in-epilogue",) if found.tail is not None else ()
    moves = ("emulated-fp32", "promoted-accumulation", "persistent", "tma", *tail)
    return triton_space(family, task, axes, start, make, valid, lambda point: moves)


def _planes(builder: PlanBuilder, leaf: Leaf) -> tuple[list[Tensor], Tensor]:
    """Planes of an operand in its own layout, and the flag; made once where the operand is frozen."""
    frozen = builder.task.graph.inputs[leaf.index].frozen

    def make(p: PlanBuilder) -> list[Tensor]:
        x = p.inputs[leaf.index]
        parts = [p.empty(x.shape, "bfloat16", x.strides) for _ in range(PLANES)]
        flag = p.zeros((1,), "int32")
        count = numel(x.shape)
        p.run("split", (p.cdiv(count, 2048),), (x, *parts, flag, count), BLOCK=2048, num_warps=4)
        return [*parts, flag]

    made = list(builder.prepare(make)) if frozen else make(builder)
    return made[:PLANES], made[PLANES]


def _descriptors(p: Params, name: str, parts: list[Tensor], strides: tuple[Size, ...], sizes: tuple[Size, ...],
                 blocks: tuple[str, str], place: tuple[str, str]) -> tuple[list[str], list[str]]:  # fmt: skip
    flip = strides[1] != 1
    order = (1, 0) if flip else (0, 1)
    setup, loads = [], []
    for i, part in enumerate(parts):
        shape = f"[{p.size(sizes[order[0]])}, {p.size(sizes[order[1]])}]"
        step = f"[{p.size(strides[order[0]])}, 1]"
        block = f"[{blocks[order[0]]}, {blocks[order[1]]}]"
        setup.append(f"{name}{i}_tiles = tl.make_tensor_descriptor({p.tensor(part)}, {shape}, {step}, {block})")
        at = f"[{place[order[0]]}, {place[order[1]]}]"
        loads.append(f"{name}{i} = {name}{i}_tiles.load({at}){'.T' if flip else ''}")
    return setup, loads


def _render(builder: PlanBuilder, found: Matmul, point: Point, programs: int) -> tuple[str, list[Tensor]]:
    _, m, n, k = found.sizes
    outs = [builder.empty_output(i) for i in range(len(builder.task.graph.outputs))]
    tiles_n = builder.cdiv(n, int(point["BLOCK_N"]))
    parts = row_parts(builder, tiles_n, m) if found.tail is not None else ()
    left, flag_a = _planes(builder, found.left)
    right, flag_b = _planes(builder, found.right) if found.right.index != found.left.index else (left, flag_a)
    p = Params(builder)
    flags = f"(tl.load({p.tensor(flag_a)}) + tl.load({p.tensor(flag_b)}))"
    set_a, load_a = _descriptors(p, "a", left, found.first[1:], (m, k), ("BLOCK_M", "BLOCK_K"), ("row0", "k0"))
    set_b, load_b = _descriptors(p, "b", right, found.second[1:], (k, n), ("BLOCK_K", "BLOCK_N"), ("k0", "column0"))
    step = [
        *load_a, *load_b, "part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)",
        *(f"part = tl.dot(a{i}, b{j}, part)" for i, j in PRODUCTS), "acc += part",
    ]  # fmt: skip
    meta = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP")
    tile = (int(point["BLOCK_M"]), int(point["BLOCK_N"]))
    lines = _walk(p, found, builder, (outs, parts), [*set_a, *set_b], step, programs, tile)
    guarded = [f"if {flags} == 0:", *(f"    {line}" for line in lines)]
    text = TILE + "\n" + _SPLIT + "\n\n" + kernel("plane_matmul", p, meta, guarded)
    options = {name: point[name] for name in (*meta, "num_warps", "num_stages")}
    builder.run("plane_matmul", (programs,), p.args, **options)

    q = Params(builder)
    flags = f"(tl.load({q.tensor(flag_a)}) + tl.load({q.tensor(flag_b)}))"
    setup, step = tiles(q, found, "pointer", ".to(tl.int64)" if is_wide(builder.task) else "")
    step[-1] = 'acc = tl.dot(a, b, acc, input_precision="ieee")'
    # As wide as the other kernel's tiles: the parts of a row are theirs too.
    lines = _walk(q, found, builder, (outs, parts), setup, step, programs, (64, tile[1]))
    text += "\n\n" + kernel("exact_matmul", q, meta, [f"if {flags} > 0:", *(f"    {x}" for x in lines)])
    blocks = {"BLOCK_M": 64, "BLOCK_N": tile[1], "BLOCK_K": 16, "GROUP": 8, "num_warps": tile[1] // 16, "num_stages": 2}
    builder.run("exact_matmul", (programs,), q.args, **blocks)
    if found.tail is not None:
        text += "\n\n" + combine(builder, found, parts, outs, tiles_n)
    return text, outs


def _walk(
    p: Params,
    found: Matmul,
    builder: PlanBuilder,
    results: tuple[list[Tensor], tuple[Tensor, ...]],
    setup: list[str],
    step: list[str],
    programs: int,
    blocks: tuple[int, int],
) -> list[str]:
    _, m, n, k = found.sizes
    mask = "" if whole(found, *blocks) else "mask"
    wide = ".to(tl.int64)" if is_wide(builder.task) else ""
    outs, parts = results
    if found.tail is None:
        finish = epilogue(p, found.body, ("i0", "i1"), mask, outs)
    else:
        finish = partial(p, found.body, parts, m, mask, [[]])
    inside = [
        "pm, pn = tile_of(t, nm, nn, GROUP)",
        "row0 = pm * BLOCK_M",
        "column0 = pn * BLOCK_N",
        "acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)",
        f"for k0 in range(0, {p.size(k)}, BLOCK_K):",
        *(f"    {line}" for line in step),
        f"i0 = (row0 + tl.arange(0, BLOCK_M))[:, None]{wide}",
        f"i1 = (column0 + tl.arange(0, BLOCK_N))[None, :]{wide}",
        *bounds(p, found, mask),
        *bias(p, found, mask),
        *finish,
    ]
    head = [f"nm = tl.cdiv({p.size(m)}, BLOCK_M)", f"nn = tl.cdiv({p.size(n)}, BLOCK_N)"]
    return [*head, *setup, f"for t in range(tl.program_id(0), nm * nn, {programs}):", *(f"    {x}" for x in inside)]
