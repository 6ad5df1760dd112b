"""Cases: the operators of `bench ops`, by device.

Shapes are those of real networks: a 32k and a 128k vocabulary, long rows, convolutional feature maps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """One row: `make(device)` gives a module and its inputs; training runs its backward too.

    The module's first output is the loss in training mode, unless it is a tensor of more than one element: then the
    gradient that flows in is a fixed random tensor.
    """

    name: str
    make: Callable[[str], tuple[nn.Module, tuple[Tensor, ...]]]
    mode: str = "inference"


class Call(nn.Module):
    """A function as a module, so that every arm sees the same thing."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*inputs)


class LinearThen(nn.Module):
    """A linear layer and what follows it."""

    def __init__(self, k: int, n: int, then: Callable[[Tensor], Tensor], dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.linear = nn.Linear(k, n, device=device, dtype=dtype)
        self.then = then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.linear(x))


def _randn(device: str, *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, device=device) * scale).to(dtype)


def _call(
    name: str, function: Callable[..., Tensor], *shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0
) -> Case:
    return Case(name, lambda device: (Call(function), (_randn(device, *shape, dtype=dtype, scale=scale),)))


def _cross_entropy(rows: int, classes: int, dtype: torch.dtype, training: bool) -> Case:
    def make(device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
        logits = _randn(device, rows, classes, dtype=dtype, scale=2.0).requires_grad_(training)
        return Call(F.cross_entropy), (logits, torch.randint(classes, (rows,), device=device))

    kind = "fwd_bwd" if training else "fwd"
    name = f"cross_entropy_{kind}_{rows}x{classes}_{_short(dtype)}"
    return Case(name, make, "training" if training else "inference")


def _norm(name: str, build: Callable[[str], nn.Module], *shape: int, dtype: torch.dtype = torch.float32) -> Case:
    def make(device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
        module = build(device).to(dtype)
        for parameter in module.parameters():
            nn.init.normal_(parameter, 0.5, 0.3)
        return module, (_randn(device, *shape, dtype=dtype) + 0.3,)

    return Case(name, make)


def _bmm(batch: int, m: int, n: int) -> Case:
    def make(device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
        return Call(torch.bmm), (_randn(device, batch, m, n), _randn(device, batch, n, n))

    return Case(f"bmm_{batch}x{m}x{n}_fp32", make)


def _matmul(size: int) -> Case:
    def make(device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
        return Call(torch.matmul), (_randn(device, size, size), _randn(device, size, size))

    return Case(f"matmul_{size}_fp32", make)


def _linear(name: str, m: int, k: int, n: int, then: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Case:
    def make(device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
        return LinearThen(k, n, then, dtype, device), (_randn(device, m, k, dtype=dtype),)

    return Case(f"{name}_{m}x{k}x{n}_{_short(dtype)}", make)


def _logsumexp(x: Tensor) -> Tensor:
    return torch.logsumexp(x, -1)


def _embedding_bag(rows: int, dim: int, bags: int, mean_length: int) -> Case:
    """Jagged bags: lengths uniform between 0 and twice the mean."""

    def make(device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
        dice = torch.Generator().manual_seed(1)
        lengths = torch.randint(0, 2 * mean_length + 1, (bags,), generator=dice)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)[:-1]])
        indices = torch.randint(rows, (int(lengths.sum()),), generator=dice)
        table = nn.EmbeddingBag(rows, dim, mode="sum", device=device)
        return table, (indices.to(device), offsets.to(device))

    return Case(f"embedding_bag_{rows}x{dim}_{bags}x{mean_length}_fp32", make)


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


class GroupNormSiLU(nn.Module):
    """GroupNorm, then SiLU: the head of a diffusion U-Net's residual block."""

    def __init__(self, channels: int, groups: int, device: str) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(groups, channels, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.norm(x))


def _max_pool(x: Tensor) -> Tensor:
    return F.max_pool2d(x, 3, 2, 1)


def _argmax0(x: Tensor) -> Tensor:
    return torch.argmax(x, 0)


def _softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


CPU: tuple[Case, ...] = (
    _cross_entropy(2048, 32000, torch.float32, False),
    _cross_entropy(2048, 32000, torch.float32, True),
    _call("cumsum_dim0_4096x4096_fp32", lambda x: torch.cumsum(x, 0), 4096, 4096),
    _call("cumsum_last_4096x4096_fp32", lambda x: torch.cumsum(x, -1), 4096, 4096),
    _norm("group_norm_silu_16x128x64x64_fp32", lambda d: GroupNormSiLU(128, 32, d), 16, 128, 64, 64),
    _call("softmax_256x32768_bf16", _softmax, 256, 32768, dtype=torch.bfloat16, scale=3.0),
    _norm("layer_norm_8192x1024_bf16", lambda d: nn.LayerNorm(1024, device=d), 8192, 1024, dtype=torch.bfloat16),
    _call("argmax_dim0_262144x64_fp32", _argmax0, 262144, 64),
    _call("max_pool2d_3x3_s2_16x64x112x112_fp32", _max_pool, 16, 64, 112, 112),
    _linear("linear_gelu", 512, 1024, 4096, F.gelu, torch.float32),
    _linear("linear_logsumexp", 512, 1024, 32000, _logsumexp, torch.float32),
    _matmul(1024),
    _bmm(256, 64, 64),
    _call("log_softmax_2048x32000_fp32", lambda x: torch.log_softmax(x, -1), 2048, 32000),
    _norm("rms_norm_4096x2048_bf16", lambda d: nn.RMSNorm(2048, device=d), 4096, 2048, dtype=torch.bfloat16),
    _call("sum_dim0_262144x64_fp32", lambda x: x.sum(0), 262144, 64),
    _call("avg_pool2d_2x2_16x64x112x112_fp32", lambda x: F.avg_pool2d(x, 2), 16, 64, 112, 112),
    _embedding_bag(400_000, 128, 4096, 32),
)

CUDA: tuple[Case, ...] = (
    _cross_entropy(8192, 128256, torch.bfloat16, False),
    _cross_entropy(8192, 128256, torch.bfloat16, True),
    _call("softmax_4096x131072_bf16", _softmax, 4096, 131072, dtype=torch.bfloat16, scale=3.0),
    _call("softmax_4096x131072_fp32", _softmax, 4096, 131072, scale=3.0),
    _embedding_bag(1_000_000, 128, 65536, 32),
    _call("avg_pool3d_k3_s2_16x32x64x128x128_fp32", lambda x: F.avg_pool3d(x, 3, 2, 1), 16, 32, 64, 128, 128),
    _bmm(65536, 32, 32),
    _linear("linear_logsumexp", 8192, 1024, 65536, _logsumexp, torch.bfloat16),
    _matmul(4096),
    _call("cumsum_last_16384x32768_fp32", lambda x: torch.cumsum(x, -1), 16384, 32768),
    _norm("group_norm_silu_32x64x512x512_fp32", lambda d: GroupNormSiLU(64, 8, d), 32, 64, 512, 512),
    _norm("layer_norm_65536x4096_bf16", lambda d: nn.LayerNorm(4096, device=d), 65536, 4096, dtype=torch.bfloat16),
    _call("argmax_dim0_1048576x256_fp32", _argmax0, 1048576, 256),
    _call("max_pool2d_3x3_s2_64x64x224x224_fp32", _max_pool, 64, 64, 224, 224),
    _linear("linear_gelu", 8192, 1024, 4096, F.gelu, torch.float32),
    _call("log_softmax_8192x128256_bf16", lambda x: torch.log_softmax(x, -1), 8192, 128256, dtype=torch.bfloat16),
    _call("sum_dim0_1048576x256_fp32", lambda x: x.sum(0), 1048576, 256),
)

CASES: dict[str, tuple[Case, ...]] = {"cpu": CPU, "cuda": CUDA}


def scaled(case: Case, scale: float) -> Case:
    """The case with the first axis of every floating input cut to `scale` of it: for tests of the harness itself."""
    if scale >= 1.0:
        return case

    def make(device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
        module, inputs = case.make(device)
        rows = max(1, math.floor(inputs[0].shape[0] * scale))
        if case.name.startswith("embedding_bag"):
            return module, (inputs[0], inputs[1][: max(1, math.floor(inputs[1].shape[0] * scale))])
        if case.name.startswith("matmul"):
            return module, (inputs[0][:rows].contiguous(), inputs[1])
        cut = tuple(x.detach()[:rows].contiguous().requires_grad_(x.requires_grad) for x in inputs)
        return module, cut

    return Case(f"{case.name}@{scale:g}", make, case.mode)
