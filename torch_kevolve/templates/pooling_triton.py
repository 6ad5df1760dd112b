"""Pooling (Triton): average and maximum windows in two and three dimensions.

A program walks along the first spatial dimension (depth of 3-d, height of 2-d). What a window takes from one plane of
that dimension is reduced once and kept in registers for the overlapping windows, so that every element of the input is
loaded for each plane once, not once per window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch_kevolve.devices.base import DeviceFacts
from torch_kevolve.plan import PlanBuilder, Tensor
from torch_kevolve.sizes import Size, numel, simplify
from torch_kevolve.task import Arg, KernelTask, Op, Ref
from torch_kevolve.templates.around import Body, Leaf, after, leaf, name_of
from torch_kevolve.templates.base import Point, Space
from torch_kevolve.templates.expr import HELD_FLOATS
from torch_kevolve.templates.kernel_text import HELD, Params, epilogue, is_wide, kernel, triton_space

POOLS = {
    "avg_pool2d": (2, "avg"), "avg_pool3d": (3, "avg"), "max_pool2d_with_indices": (2, "max"),
    "max_pool3d_with_indices": (3, "max"), "_low_memory_max_pool_with_offsets": (0, "max"),
}  # fmt: skip


class _Found:
    """Window, stride and padding per spatial dimension; input strides; the epilogue over (planes, spatial ...)."""

    def __init__(self, task: KernelTask, place: int) -> None:
        graph = task.graph
        op = graph.ops[place]
        rank, self.kind = POOLS[name_of(op)]
        out = op.outs[0].shape
        self.rank = rank or (len(_tuple(_at(op, 1, "kernel_size", ()), 0)) or 2)
        self.window = _tuple(_at(op, 1, "kernel_size", ()), self.rank)
        self.stride = _tuple(_at(op, 2, "stride", ()), self.rank) or self.window
        self.pad = _tuple(_at(op, 3, "padding", 0), self.rank)
        self.input: Leaf | None = leaf(graph, op.args[0]) if isinstance(op.args[0], Ref) else None
        self.fits = self._simple(op) and self.input is not None and len(out) >= self.rank
        self.divisor: int | None = None
        if self.kind == "avg":
            override = _at(op, 6, "divisor_override", None)
            whole = bool(_at(op, 5, "count_include_pad", True)) or not any(self.pad)
            if isinstance(override, int):
                self.divisor = override
            elif whole and self.window:
                self.divisor = int(numel(self.window))
        self.planes: Size = simplify(numel(out[: len(out) - self.rank]))
        self.outs = out[len(out) - self.rank :]
        self.body: Body | None = after(graph, {(len(graph.inputs) + place, 0): "acc"}, (self.planes, *self.outs))
        self.wide = is_wide(task)

    def _simple(self, op: Op) -> bool:
        dilation = _tuple(_at(op, 4, "dilation", 1), self.rank) if self.kind == "max" else (1,)
        ceil = _at(op, 5 if self.kind == "max" else 4, "ceil_mode", False)
        return len(self.window) == len(self.stride) == len(self.pad) == self.rank and set(dilation) == {1} and not ceil

    @property
    def plane_stride(self) -> Size | None:
        """One stride for batch and channels together; None where they do not collapse."""
        assert self.input is not None
        lead = len(self.input.shape) - self.rank
        shape, strides = self.input.shape[:lead], self.input.strides[:lead]
        step = strides[-1] if lead else 0
        for i in range(lead - 1, 0, -1):
            if shape[i - 1] != 1 and simplify(strides[i] * shape[i]) != strides[i - 1]:
                return None
        return step


def _at(op: Op, place: int, name: str, default: Arg) -> Arg:
    return op.args[place] if len(op.args) > place else dict(op.kwargs).get(name, default)


def _tuple(value: Arg, rank: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * rank
    if not isinstance(value, tuple) or not all(isinstance(v, int) for v in value):
        return ()
    numbers = tuple(int(v) for v in value)
    return numbers * rank if len(numbers) == 1 else numbers


class PoolingTriton:
    """`avg_pool2d/3d` and `max_pool2d/3d` without indices, floor mode, no dilation."""

    name = "pooling_triton"
    language = "triton"

    def match(self, task: KernelTask, device: DeviceFacts) -> Space | None:
        places = [i for i, op in enumerate(task.graph.ops) if name_of(op) in POOLS]
        if device.type != "cuda" or len(places) != 1:
            return None
        found = _Found(task, places[0])
        if not found.fits or found.body is None or found.input is None or found.input.dtype not in HELD_FLOATS:
            return None
        if found.plane_stride is None or numel(found.window) > 125:
            return None
        return _space(self.name, task, found)


def _space(family: str, task: KernelTask, found: _Found) -> Space | None:
    axes = {
        "WALK": (1, 2, 4, 8, 16, 32, 64),
        "HEIGHT": (1, 2, 4, 8, 16, 32, 64),
        "WIDTH": (16, 32, 64, 128, 256, 512),
        "num_warps": (1, 2, 4, 8),
    }

    def valid(point: Point) -> bool:
        held = int(point["HEIGHT"]) * int(point["WIDTH"]) / (32 * int(point["num_warps"]))
        return 1 <= held <= 16

    if found.rank == 3:
        good = [
            (32, 4, 128, 4), (16, 2, 128, 4), (16, 4, 64, 4), (32, 8, 64, 4), (8, 4, 128, 4), (16, 8, 64, 8),
            (32, 2, 64, 2), (64, 2, 64, 2), (32, 16, 32, 4), (4, 4, 32, 4),
        ]  # fmt: skip
    else:
        good = [
            (16, 4, 64, 4), (8, 4, 128, 4), (32, 4, 64, 4), (16, 8, 32, 4), (56, 4, 64, 4), (8, 1, 128, 2),
            (32, 2, 128, 4), (16, 1, 256, 4), (32, 8, 16, 4), (8, 2, 256, 4), (64, 1, 512, 4), (32, 1, 512, 4),
        ]  # fmt: skip
    start = [{"WALK": a, "HEIGHT": b, "WIDTH": c, "num_warps": w} for a, b, c, w in good if a in axes["WALK"]]

    def make(builder: PlanBuilder, point: Point) -> tuple[str, list[Tensor]]:
        return _render(builder, found, point)

    return triton_space(family, task, axes, start, make, valid, lambda point: ("sliding-window",))


def _render(builder: PlanBuilder, found: _Found, point: Point) -> tuple[str, list[Tensor]]:
    """Tile: HEIGHT x WIDTH of (height, width) in 3-d, of (planes, width) in 2-d; WALK outputs along the first."""
    assert found.body is not None and found.input is not None and found.plane_stride is not None
    p = Params(builder)
    outs = [builder.empty_output(i) for i in range(len(found.body.stores))]
    lead = len(found.input.shape) - found.rank
    sizes, strides = found.input.shape[lead:], found.input.strides[lead:]
    k, s, pad = found.window[0], found.stride[0], found.pad[0]
    kept = max(0, k - s)
    three = found.rank == 3
    wide = ".to(tl.int64)" if found.wide else ""
    width = p.size(found.outs[-1])
    blocks = f"tl.cdiv({width}, WIDTH)"
    tile = "tl.program_id(1)"
    rows = f"({tile} // {blocks} * HEIGHT + tl.arange(0, HEIGHT))[:, None]"
    lines = [
        f"c = ({tile} % {blocks} * WIDTH + tl.arange(0, WIDTH))[None, :]",
        f"walk = tl.program_id({2 if three else 0}) * WALK",
    ]
    if three:
        limit = p.size(found.outs[1])
        lines += [f"i0 = tl.program_id(0){wide}", f"r = {rows}", f"inside = (r < {limit}) & (c < {width})"]
        names: tuple[str, ...] = ("i0", "i1", "r", "c")
    else:
        planes = p.size(found.planes)
        lines += [f"i0 = {rows}{wide}", f"inside = (i0 < {planes}) & (c < {width})"]
        names = ("i0", "i1", "c")
    base = f"{p.input(found.input.index)} + i0 * {p.size(found.plane_stride)}"
    plane, helper = _plane(p, found, base, sizes, strides)
    lines += [f"w{j} = {plane(f'walk * {s} + {j - pad}')}" for j in range(kept)]
    step = [f"w{j} = {plane(f'i1 * {s} + {j - pad}')}" for j in range(kept, k)]
    join = _join(found, [f"w{j}" for j in range(k)])
    inner = ["i1 = walk + j", *step, f"acc = {join}", *_average(p, found, sizes)]
    inner += epilogue(p, found.body, names, f"inside & (c * 0 + i1 < {p.size(found.outs[0])})", outs)
    inner += [f"w{j} = w{j + s}" for j in range(kept)]
    lines += ["for j in range(WALK):", *(f"    {line}" for line in inner)]
    meta = ("WALK", "HEIGHT", "WIDTH")
    text = helper + kernel("pooling", p, meta, lines)
    walk, height, wide_tile = (int(point[name]) for name in meta)
    tiles_r = builder.cdiv(found.outs[1] if three else found.planes, height)
    tiles = simplify(tiles_r * builder.cdiv(found.outs[-1], wide_tile))
    walks = builder.cdiv(found.outs[0], walk)
    grid = (found.planes, tiles, walks) if three else (walks, tiles)
    builder.run("pooling", grid, p.args, **{name: point[name] for name in (*meta, "num_warps")})
    return text, outs


def _plane(
    p: Params, found: _Found, base: str, sizes: Sequence[Size], strides: Sequence[Size]
) -> tuple[Callable[[str], str], str]:
    """What a window takes from one plane: (text of the call for a place along the walk, text of the function)."""
    assert found.input is not None
    three = found.rank == 3
    low = "0.0" if found.kind == "avg" else 'float("-inf")'
    limits, steps = [p.size(size) for size in sizes], [p.size(step) for step in strides]
    symbols = "".join(f", {t}" for t in sorted({*limits, *steps}) if t.isidentifier())
    body = [f"ok = inside & {_both('at', limits[0])}", f"row = base + at * {steps[0]}"]
    for b in range(found.window[-1]):
        body.append(f"x{b} = c * {found.stride[-1]} + {b - found.pad[-1]}")
    names = []
    for a in range(found.window[1] if three else 1):
        ok, row = "ok", "row"
        if three:
            body.append(f"h{a} = r * {found.stride[1]} + {a - found.pad[1]}")
            body.append(f"ok{a} = ok & (h{a} >= 0) & (h{a} < {limits[1]})")
            body.append(f"row{a} = row + h{a} * {steps[1]}")
            ok, row = f"ok{a}", f"row{a}"
        for b in range(found.window[-1]):
            mask = f"{ok} & (x{b} >= 0) & (x{b} < {limits[-1]})"
            load = f"tl.load({row} + x{b} * {steps[-1]}, mask={mask}, other={low})"
            body.append(f"v{a}_{b} = {load}{HELD.get(found.input.dtype, '')}")
            names.append(f"v{a}_{b}")
    body.append(f"return {_join(found, names)}")
    head = "r, c" if three else "c"
    lines = "".join(f"    {line}\n" for line in body)
    text = f"@triton.jit\ndef plane(base, at, {head}, inside{symbols}):\n{lines}\n\n"
    return lambda at: f"plane({base}, {at}, {head}, inside{symbols})", text


def _both(place: str, limit: str) -> str:
    # As a tensor: Triton's interpreter cannot join a scalar condition to a mask.
    return f"(c * 0 + {place} >= 0) & (c * 0 + {place} < {limit})"


def _join(found: _Found, names: Sequence[str]) -> str:
    total = names[0]
    for name in names[1:]:
        total = f"kv_max({total}, {name})" if found.kind == "max" else f"{total} + {name}"
    return total


def _average(p: Params, found: _Found, sizes: tuple[Size, ...]) -> list[str]:
    if found.kind != "avg":
        return []
    if found.divisor is not None:
        return [f"acc = acc * {1.0 / found.divisor!r}"]
    places = ("i1", "r", "c") if found.rank == 3 else ("i1", "c")
    counts = []
    for i, (place, size) in enumerate(zip(places, sizes, strict=True)):
        low = f"({place} * {found.stride[i]} - {found.pad[i]})"
        counts.append(f"(tl.minimum({low} + {found.window[i]}, {p.size(size)}) - tl.maximum({low}, 0))")
    return [f"acc = acc / ({' * '.join(counts)}).to(tl.float32)"]
