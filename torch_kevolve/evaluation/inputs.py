"""Inputs: what a candidate is tried on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_kevolve.sizes import Symbol, evaluate
from torch_kevolve.task import KernelTask, Ref, TensorSpec

DISTRIBUTIONS = ("normal", "again", "uniform", "positive", "outlier", "large", "rows", "small")
"""The eight pooled draws. `again` is another normal one over the first one's weights: timed runs use the two by turns.
`large` stays where sums of squares of fp32 are finite; `rows` scales each row by its own power of two."""
SPECIAL = ("special", "masked", "offset")
"""Draws judged each by itself. NaN, infinities, -0.0 and denormals strewn in; whole rows of -inf; a mean far above the
spread, where E[x^2] - E[x]^2 cancels. Pooled, the last would hide what is wrong on the others (it makes eager's e of a
layer norm 16 times larger), and where few numbers carry its error, as in a loss, an equally good kernel's differs: a
cross-entropy behind a matrix product was off by 3.4e-6 where eager was by 2.1e-7."""
FEW, FEW_SPECIAL = ("normal", "again", "rows"), ("special", "offset")
"""What is drawn of a task above MANY elements, where making the fp64 reference of one draw takes seconds. `outlier`
made room for `offset`: of 16 M elements its seven hardly change a sum, and `rows` holds values as large."""
MANY = 2**24
OFFSET = 64.0
"""The mean of `offset`, of spread 1. With exact sums rounded to fp32, E[x^2] - E[x]^2 puts an error of 1.3e-4 into a
layer norm, four times what is allowed at eager's own 3.3e-6; at 32 in places 1.3 times. bf16 still tells its values
apart, a half or a quarter from each other."""
TILE = 4_194_301
"""Elements of noise behind a larger tensor: drawing 65 M normal numbers takes 0.4 s, repeating a tile 0.1 s. A prime,
so that no row length of a real model divides it."""
OFFSETS = ("aten._embedding_bag.default", "aten._embedding_bag_forward_only.default")


@dataclass(frozen=True)
class Draw:
    """One set of inputs: a distribution, a seed, a binding of the task's symbols.

    `weights`: the seed of frozen inputs, where they are another draw's. `walled`: every input ends at the last byte
    of its memory, which also means that its start is aligned to no more than an element.
    """

    distribution: str
    seed: int
    binding: tuple[tuple[str, int], ...] = ()
    weights: int | None = None
    walled: bool = False


def draws(binding: Mapping[str, int], seed: int = 0, names: Sequence[str] = DISTRIBUTIONS) -> list[Draw]:
    """The pooled draws at the real sizes. From the third on, every other one is walled."""
    at = tuple(sorted(binding.items()))
    first = seed * 1000
    return [
        Draw(name, first + place, at, first if name == "again" else None, place > 1 and place % 2 == 0)
        for place, name in enumerate(names)
    ]


def special_draws(binding: Mapping[str, int], seed: int = 0, names: Sequence[str] = SPECIAL) -> list[Draw]:
    """The draws that are judged each by itself."""
    at = tuple(sorted(binding.items()))
    return [Draw(name, seed * 1000 + 100 + place, at) for place, name in enumerate(names)]


def other_sizes(symbols: tuple[Symbol, ...], hint: Mapping[str, int]) -> list[dict[str, int]]:
    """Bindings that a kernel of symbolic sizes must be right at too: the ends, primes, neighbours of powers of two."""
    wanted = (2, 3, 7, 17, 31, 33, 127, 129)
    out: list[dict[str, int]] = []
    for place, _ in enumerate(wanted):
        sizes = {s.name: wanted[(place + 3 * number) % len(wanted)] for number, s in enumerate(symbols)}
        # No larger than the job itself: what it was opened for bounds the memory.
        out.append({s.name: max(s.lo, min(sizes[s.name], s.upper, max(hint.get(s.name, 0), 2))) for s in symbols})
    for step in (-1, 1):
        out.append({s.name: max(s.lo, min(hint.get(s.name, 64) + step, s.upper)) for s in symbols})
    return [each for place, each in enumerate(out) if each not in out[:place]] if symbols else []


def make(task: KernelTask, draw: Draw, device: str) -> tuple[Tensor, ...]:
    """The tensors of a draw, with the specs' strides. The same on every call; made on the device itself."""
    return tuple(one(task, draw, place, device) for place in range(len(task.graph.inputs)))


def one(task: KernelTask, draw: Draw, place: int, device: str) -> Tensor:
    """Input `place` of a draw."""
    spec, binding = task.graph.inputs[place], dict(draw.binding)
    seed = draw.weights if spec.frozen and draw.weights is not None else draw.seed
    dice = torch.Generator(device=device).manual_seed(seed + 1_000_003 * place)
    tensor = _tensor(spec, binding, draw.distribution, dice, device)
    if place in _offsets(task) and tensor.numel():
        tensor.copy_(tensor.sort().values)
        tensor[0] = 0
    return tensor


def sample(
    task: KernelTask, device: str, seed: int = 0, binding: Mapping[str, int] | None = None
) -> tuple[Tensor, ...]:
    """Ordinary inputs of a task, for timing."""
    return make(task, Draw("normal", seed, tuple(sorted((binding or {}).items()))), device)


def _offsets(task: KernelTask) -> set[int]:
    """Inputs that say where bags begin: they rise from 0."""
    reads = [op.args[2] for op in task.graph.ops if op.target in OFFSETS and len(op.args) > 2]
    return {ref.index for ref in reads if isinstance(ref, Ref) and ref.index < len(task.graph.inputs)}


def nbytes(task: KernelTask, binding: Mapping[str, int]) -> int:
    """Bytes of all inputs and outputs, each once."""
    specs = (*task.graph.inputs, *task.graph.output_specs)
    return sum(evaluate(spec.nbytes, binding) for spec in specs)


def _tensor(spec: TensorSpec, binding: Mapping[str, int], kind: str, dice: torch.Generator, device: str) -> Tensor:
    shape = [evaluate(s, binding) for s in spec.shape]
    strides = [evaluate(s, binding) for s in spec.strides]
    values = _values(spec, shape, binding, kind, dice, device)
    if 0 in shape:
        return torch.empty_strided(shape, strides, dtype=values.dtype, device=device)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    if all(stride > 0 or size == 1 for size, stride in zip(shape, strides, strict=True)):
        out = torch.empty(extent, dtype=values.dtype, device=device)
        view = out.as_strided(shape, strides)
        view.copy_(values)
        return view
    # An expanded input (stride 0): fill the one copy that all rows share.
    flat = torch.empty(extent, dtype=values.dtype, device=device)
    once = [1 if stride == 0 else size for size, stride in zip(shape, strides, strict=True)]
    flat.as_strided(once, strides).copy_(values[tuple(slice(0, size) for size in once)])
    return flat.as_strided(shape, strides)


def _values(
    spec: TensorSpec, shape: list[int], binding: Mapping[str, int], kind: str, dice: torch.Generator, device: str
) -> Tensor:
    dtype = getattr(torch, spec.dtype)
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=dice, device=device).bool()
    if not dtype.is_floating_point:
        low = spec.low or 0
        high = evaluate(spec.high, binding) if spec.high is not None else min(127, low + 7)
        made = torch.randint(low, max(low, high) + 1, shape, generator=dice, device=device).to(dtype)
        if spec.high is not None and made.numel():
            made.view(-1)[-1] = max(low, high)  # the last row of a table is where an off-by-one shows
        return made
    base = _noise(shape, dice, device, torch.float64 if dtype is torch.float64 else torch.float32)
    return _shape_of(kind, base, dice, device).to(dtype)


def _noise(shape: list[int], dice: torch.Generator, device: str, dtype: torch.dtype) -> Tensor:
    count = math.prod(shape)
    if count <= 2 * TILE:
        return torch.randn(shape, generator=dice, device=device, dtype=dtype)
    tile = torch.randn(TILE, generator=dice, device=device, dtype=dtype)
    return tile.repeat(-(-count // TILE))[:count].view(shape)


def _shape_of(kind: str, base: Tensor, dice: torch.Generator, device: str) -> Tensor:
    if kind == "uniform":
        return base.mul_(0.5**0.5).erf_()
    if kind == "positive":
        return base.abs_().add_(0.01)
    if kind == "small":
        return base.mul_(1e-3)
    if kind == "large":
        return base.mul_(50.0)
    if kind == "offset":
        return base.add_(OFFSET)
    if kind == "outlier" and base.numel():
        base.view(-1)[:: max(1, base.numel() // 7)] *= 100.0
    elif kind == "rows" and base.dim() > 1:
        power = torch.randint(-6, 7, base.shape[:-1], generator=dice, device=device)
        return base.mul_(torch.pow(2.0, power.to(base.dtype)).unsqueeze(-1))
    elif kind == "special" and base.numel():
        # The second half of the rows keeps ordinary numbers, every third of them none but -inf.
        if base.dim() > 1:
            base[base.shape[0] // 2 :: 3] = float("-inf")
        flat = base.view(-1)[: base.numel() // 2]
        step = max(1, math.isqrt(flat.numel()))
        for offset, value in enumerate((float("nan"), float("inf"), float("-inf"), -0.0, 1e-41, 3e38, -3e38)):
            flat[offset * 3 :: step * 5 + offset] = value
    elif kind == "masked" and base.dim() > 1:
        base[..., ::3, :] = float("-inf")
    return base
