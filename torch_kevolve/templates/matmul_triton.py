"""Matmul (Triton): half-precision products with what follows them.

Persistent programs walk over tiles. Operands come through TMA descriptors made on the device, or through pointers where
strides or sizes forbid that. A row logsumexp becomes a maximum and a sum per tile: the product is never written.
"""

from __future__ import annotations

from torch_kevolve.devices.base import DeviceFacts
from torch_kevolve.plan import PlanBuilder, Tensor
from torch_kevolve.sizes import upper_bound
from torch_kevolve.task import KernelTask
from torch_kevolve.templates.base import Point, Space
from torch_kevolve.templates.kernel_text import HELD, Params, address, epilogue, is_wide, kernel, triton_space
from torch_kevolve.templates.matmul_parts import TILE, Matmul, find, in_bytes
from torch_kevolve.templates.matmul_rows_triton import combine, partial, row_parts


class MatmulTriton:
    """`mm`, `addmm` in fp16 and bf16 (fp32 where TF32 is allowed) with a pointwise or row-logsumexp epilogue."""

    name = "matmul_triton"
    language = "triton"

    def match(self, task: KernelTask, device: DeviceFacts) -> Space | None:
        found = find(task) if device.type == "cuda" else None
        if found is None or found.sizes[0] != 1 or found.left.dtype != found.right.dtype:
            return None
        tf32 = dict(task.flags).get("tf32") in ("1", "True", "true")
        if found.dtype not in ("bfloat16", "float16") and not (found.dtype == "float32" and tf32):
            return None
        return _space(self.name, task, found, device)


def can_describe(found: Matmul) -> bool:
    """Whether both operands can be TMA descriptors: one unit stride, the other a multiple of 16 bytes."""
    width = 4 if found.dtype == "float32" else 2
    for _, one, other in (found.first, found.second):
        unit, long = (one, other) if one == 1 else (other, one)
        if unit != 1 or not in_bytes(long, width):
            return False
    return True


def _space(family: str, task: KernelTask, found: Matmul, device: DeviceFacts) -> Space | None:
    tma = can_describe(found) and device.arch.startswith("cuda:9")
    axes = {
        "BLOCK_M": (16, 32, 64, 128, 256), "BLOCK_N": (32, 64, 128, 256), "BLOCK_K": (32, 64, 128),
        "GROUP": (1, 4, 8, 16, 32), "load": ("tma", "pointer"), "num_warps": (4, 8), "num_stages": (2, 3, 4, 5),
        "flatten": (False, True), "per_unit": (1, 2), "halves": (False, True),
    }  # fmt: skip
    width = 4 if found.dtype == "float32" else 2
    rows = upper_bound(found.sizes[1], task.symbols)
    limit = device.shared_bytes or 160 << 10

    def valid(point: Point) -> bool:
        bm, bn, bk, stages = (int(point[k]) for k in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_stages"))
        per_unit, threads = int(point["per_unit"]), 32 * int(point["num_warps"])
        shared = (bm + bn) * bk * width * stages
        per_thread = bm * bn // threads
        if (point["load"] == "tma" and not tma) or (rows is not None and bm > 16 and bm > 2 * rows):
            return False
        # About 64 registers a thread beside the tile's own; 1 KiB of shared memory a block is the system's.
        if per_unit > 1 and (per_thread + 64) * threads * per_unit > device.registers:
            return False
        return (shared + 1024) * per_unit <= limit + 1024 and 4 <= per_thread <= 128

    load = "tma" if tma else "pointer"
    good = [
        (128, 256, 64, 32, load, 8, 3, False), (128, 256, 64, 16, load, 8, 4, False),
        (128, 256, 64, 8, load, 8, 3, False), (128, 256, 64, 8, load, 8, 3, True), (128, 256, 64, 8, load, 8, 4, False),
        (128, 256, 64, 8, load, 8, 4, True), (128, 128, 64, 8, load, 4, 4, False), (128, 128, 64, 8, load, 8, 4, False),
        (256, 128, 64, 8, load, 8, 3, False), (64, 128, 64, 8, load, 4, 4, False), (64, 64, 64, 8, load, 4, 4, False),
        (32, 64, 128, 8, load, 4, 4, False), (16, 64, 128, 8, load, 4, 5, False), (16, 32, 128, 8, load, 4, 5, False),
        (128, 128, 32, 8, "pointer", 4, 3, False), (64, 64, 32, 8, "pointer", 4, 3, False),
        (128, 256, 64, 8, "pointer", 8, 3, False),
    ]  # fmt: skip
    points = [(*row, 1, False) for row in good]
    # Two programs a unit: one multiplies while the other reduces its tile.
    points[2:2] = [(128, 128, 64, 8, load, 4, 3, False, 2, halves) for halves in (True, False)]
    start: list[Point] = [dict(zip(axes, row, strict=True)) for row in points]

    def make(builder: PlanBuilder, point: Point) -> tuple[str, list[Tensor]]:
        return _render(builder, found, point, max(1, device.units) * int(point["per_unit"]))

    def moves(point: Point) -> tuple[str, ...]:
        names = ["persistent", "tma"] if point["load"] == "tma" else ["persistent"]
        names += ["reduction-in-epilogue"] if found.tail else []
        names += ["epilogue-subtiling"] if point["halves"] else []
        return (*names, *(["epilogue-overlap"] if point["per_unit"] != 1 else []))

    return triton_space(family, task, axes, start, make, valid, moves)


def _render(builder: PlanBuilder, found: Matmul, point: Point, programs: int) -> tuple[str, list[Tensor]]:
    _, m, n, k = found.sizes
    p = Params(builder)
    blocks = [int(point[name]) for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K")]
    tiles_n = builder.cdiv(n, blocks[1])
    outs = [builder.empty_output(i) for i in range(len(builder.task.graph.outputs))]
    wide = ".to(tl.int64)" if is_wide(builder.task) else ""
    head = [f"nm = tl.cdiv({p.size(m)}, BLOCK_M)", f"nn = tl.cdiv({p.size(n)}, BLOCK_N)"]
    setup, step = tiles(p, found, str(point["load"]), wide)
    mask = "" if whole(found, blocks[0], blocks[1]) else "mask"
    row = f"i0 = (row0 + tl.arange(0, BLOCK_M))[:, None]{wide}"
    place = [row, f"i1 = (column0 + tl.arange(0, BLOCK_N))[None, :]{wide}", *bounds(p, found, mask)]
    # The bias comes first: loaded behind the loop it takes 64 registers beside the 128 of the tile, and they spill (456
    # bytes a thread at 128 x 256 with 8 warps; 0 this way). A row of it is loaded one tile ahead: 1.73 ms without, 1.69
    # with, for a logsumexp of 8192 x 1024 x 65536.
    first, early, later = [], [], []
    if found.bias is not None and found.bias_strides[1] == 0 and found.bias_strides[2] != 0:
        early = next_bias(p, found, "tl.program_id(0)", wide)
        later = next_bias(p, found, f"t + {programs}", wide)
        first = [f"acc += next_bias{HELD.get(found.bias.dtype, '')}[None, :]"]
    elif found.bias is not None:
        first = [*place, *bias(p, found, mask)]
    finish, pieces = [], [place]
    if point["halves"]:
        finish = ["left, right = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()"]
        pieces = [
            [f"acc = {side}", row, f"i1 = ({start} + tl.arange(0, BLOCK_N // 2))[None, :]{wide}", *place[2:]]
            for side, start in (("left", "column0"), ("right", "column0 + BLOCK_N // 2"))
        ]
    parts: tuple[Tensor, ...] = ()
    if found.tail is None:
        for piece in pieces:
            finish += [*piece, *epilogue(p, found.body, ("i0", "i1"), mask, outs)]
    else:
        parts = row_parts(builder, tiles_n, m)
        finish += partial(p, found.body, parts, m, mask, pieces)
    inside = [
        "pm, pn = tile_of(t, nm, nn, GROUP)",
        "row0 = pm * BLOCK_M",
        "column0 = pn * BLOCK_N",
        "acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)",
        *first,
        *later,
        f"for k0 in range(0, {p.size(k)}, BLOCK_K):",
        *(f"    {line}" for line in step),
        *finish,
    ]
    flat = ", flatten=True" if point["flatten"] else ""
    walk = f"for t in tl.range(tl.program_id(0), nm * nn, {programs}{flat}):"
    lines = [*head, *setup, *early, walk, *(f"    {line}" for line in inside)]
    meta = ("BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP")
    text = TILE + "\n\n" + kernel("matmul", p, meta, lines)
    options = {name: point[name] for name in (*meta, "num_warps", "num_stages")}
    builder.run("matmul", (programs,), p.args, **options)
    if found.tail is not None:
        text += "\n\n" + combine(builder, found, parts, outs, tiles_n)
    return text, outs


def tiles(p: Params, found: Matmul, load: str, wide: str) -> tuple[list[str], list[str]]:
    """(statements before the loops, statements of one step over K that end in the dot)."""
    _, m, n, k = found.sizes
    left, right = p.input(found.left.index), p.input(found.right.index)
    precision = ', input_precision="tf32"' if found.dtype == "float32" else ""
    if load == "tma":
        setup, loads = [], []
        rows = (("a", left, found.first, m, k, "BLOCK_M", "BLOCK_K", "row0", "k0"),
                ("b", right, found.second, k, n, "BLOCK_K", "BLOCK_N", "k0", "column0"))  # fmt: skip
        for name, pointer, (_, one, other), high, across, tall, broad, at, along in rows:
            if other == 1:
                shape, block, place, flip = (high, across, one), (tall, broad), (at, along), ""
            else:
                shape, block, place, flip = (across, high, other), (broad, tall), (along, at), ".T"
            setup.append(
                f"{name}_tiles = tl.make_tensor_descriptor({pointer}, [{p.size(shape[0])}, {p.size(shape[1])}], "
                f"[{p.size(shape[2])}, 1], [{block[0]}, {block[1]}])"
            )
            loads.append(f"{name} = {name}_tiles.load([{place[0]}, {place[1]}]){flip}")
        return setup, [*loads, f"acc = tl.dot(a, b, acc{precision})"]
    a = address(p, found.first[1:], ("rm[:, None]", "rk[None, :]"))
    b = address(p, found.second[1:], ("rk[:, None]", "rn[None, :]"))
    step = [
        f"rm = (row0 + tl.arange(0, BLOCK_M)){wide}",
        f"rn = (column0 + tl.arange(0, BLOCK_N)){wide}",
        f"rk = (k0 + tl.arange(0, BLOCK_K)){wide}",
        f"a = tl.load({left} + {a}, mask=(rm[:, None] < {p.size(m)}) & (rk[None, :] < {p.size(k)}), other=0)",
        f"b = tl.load({right} + {b}, mask=(rk[:, None] < {p.size(k)}) & (rn[None, :] < {p.size(n)}), other=0)",
        f"acc = tl.dot(a, b, acc{precision})",
    ]
    return [], step


def whole(found: Matmul, tall: int, broad: int) -> bool:
    """Whether tiles fill the result exactly, so that nothing needs a mask (which costs registers in an epilogue)."""
    m, n = found.sizes[1], found.sizes[2]
    return isinstance(m, int) and isinstance(n, int) and m % tall == 0 and n % broad == 0


def bounds(p: Params, found: Matmul, mask: str) -> list[str]:
    return [f"mask = (i0 < {p.size(found.sizes[1])}) & (i1 < {p.size(found.sizes[2])})"] if mask else []


def next_bias(p: Params, found: Matmul, tile: str, wide: str) -> list[str]:
    """Statements that load the row bias of a tile by its number, or of the last tile."""
    assert found.bias is not None
    n, step = found.sizes[2], found.bias_strides[2]
    where = "columns" if step == 1 else f"columns * {p.size(step)}"
    return [
        f"_, next_n = tile_of(tl.minimum({tile}, nm * nn - 1), nm, nn, GROUP)",
        f"columns = (next_n * BLOCK_N + tl.arange(0, BLOCK_N)){wide}",
        f"next_bias = tl.load({p.input(found.bias.index)} + {where}, mask=columns < {p.size(n)}, other=0)",
    ]


def bias(p: Params, found: Matmul, mask: str) -> list[str]:
    """Adds the bias to `acc`; index names are i0, i1."""
    if found.bias is None:
        return []
    where = address(p, found.bias_strides[1:], ("i0", "i1"))
    pointer = p.input(found.bias.index)
    if where == "0":
        return [f"acc += tl.load({pointer}){HELD.get(found.bias.dtype, '')}"]
    if not mask:
        return [f"acc += tl.load({pointer} + {where}){HELD.get(found.bias.dtype, '')}"]
    limits = [f"(i{d} < {p.size(found.sizes[d + 1])})" for d in (0, 1) if found.bias_strides[d + 1] != 0]
    return [f"acc += tl.load({pointer} + {where}, mask={' & '.join(limits)}, other=0){HELD.get(found.bias.dtype, '')}"]
