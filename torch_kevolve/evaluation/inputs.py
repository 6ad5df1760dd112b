"""Inputs: what a candidate is tried on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_kevolve.sizes import Symbol, evaluate
from torch_kevolve.task import KernelTask, TensorSpec

DISTRIBUTIONS = ("normal", "uniform", "positive", "outlier", "large", "rows", "normal", "small")
"""The eight pooled draws. `large` stays where sums of squares of fp32 are finite; `rows` scales each row by its own power."""
SPECIAL = ("special", "masked")
"""NaN, infinities, -0.0 and denormals strewn in; whole rows of -inf. Judged by pattern, apart from the pooled draws."""


@dataclass(frozen=True)
class Draw:
    """One set of inputs: a distribution, a seed and a binding of the task's symbols."""

    distribution: str
    seed: int
    binding: tuple[tuple[str, int], ...] = ()


def draws(binding: Mapping[str, int], seed: int = 0) -> list[Draw]:
    """The pooled draws at the real sizes."""
    at = tuple(sorted(binding.items()))
    return [Draw(name, seed * 1000 + place, at) for place, name in enumerate(DISTRIBUTIONS)]


def special_draws(binding: Mapping[str, int], seed: int = 0) -> list[Draw]:
    at = tuple(sorted(binding.items()))
    return [Draw(name, seed * 1000 + 100 + place, at) for place, name in enumerate(SPECIAL)]


def other_sizes(symbols: tuple[Symbol, ...], hint: Mapping[str, int]) -> list[dict[str, int]]:
    """Bindings that a kernel of symbolic sizes must be right at too: the ends, primes, neighbours of powers of two."""
    wanted = (2, 3, 7, 17, 31, 33, 127, 129)
    out: list[dict[str, int]] = []
    for number in wanted:
        binding = {}
        for place, symbol in enumerate(symbols):
            size = wanted[(wanted.index(number) + 3 * place) % len(wanted)]
            binding[symbol.name] = min(max(size, symbol.lo), min(symbol.upper, max(hint.get(symbol.name, size), size)))
        if binding not in out:
            out.append(binding)
    return out if symbols else []


def make(task: KernelTask, draw: Draw, device: str) -> tuple[Tensor, ...]:
    """The tensors of a draw, with the specs' strides. The same on every call; made on the device itself."""
    binding = dict(draw.binding)
    dice = torch.Generator(device=device).manual_seed(draw.seed)
    return tuple(_tensor(spec, binding, draw.distribution, dice, device) for spec in task.graph.inputs)


def sample(task: KernelTask, device: str, seed: int = 0, binding: Mapping[str, int] | None = None) -> tuple[Tensor, ...]:
    """Ordinary inputs of a task, for timing."""
    return make(task, Draw("normal", seed, tuple(sorted((binding or {}).items()))), device)


def nbytes(task: KernelTask, binding: Mapping[str, int]) -> int:
    """Bytes of all inputs and outputs."""
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
        high = evaluate(spec.high, binding) if spec.high is not None else min(127, low + 8)
        return torch.randint(low, max(low + 1, high), shape, generator=dice, device=device).to(dtype)
    base = torch.randn(shape, generator=dice, device=device)
    return _shape_of(kind, base, dice, device).to(dtype)


def _shape_of(kind: str, base: Tensor, dice: torch.Generator, device: str) -> Tensor:
    if kind == "uniform":
        return torch.rand(base.shape, generator=dice, device=device) * 2 - 1
    if kind == "positive":
        return base.abs() + 0.01
    if kind == "small":
        return base * 1e-3
    if kind == "large":
        return base * 50.0
    if kind == "outlier" and base.numel():
        base.view(-1)[:: max(1, base.numel() // 7)] *= 100.0
    elif kind == "rows" and base.dim() > 1:
        power = torch.randint(-6, 7, base.shape[:-1], generator=dice, device=device)
        return base * torch.pow(2.0, power.float()).unsqueeze(-1)
    elif kind == "special" and base.numel():
        flat = base.view(-1)
        step = max(1, math.isqrt(flat.numel()))
        for offset, value in enumerate((float("nan"), float("inf"), float("-inf"), -0.0, 1e-41, 3e38, -3e38)):
            flat[offset * 3 :: step * 5 + offset] = value
    elif kind == "masked" and base.dim() > 1:
        base[..., ::3, :] = float("-inf")
    return base
