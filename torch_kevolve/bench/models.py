"""Models: the small network of `kevolve demo`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the demo network. `side`: pixels of the square image; one token per 8 x 8 pixels."""

    batch: int
    side: int
    width: int
    hidden: int
    heads: int
    classes: int
    blocks: int


CPU_SHAPE = Shape(batch=2, side=128, width=512, hidden=1408, heads=8, classes=8192, blocks=1)
CUDA_SHAPE = Shape(batch=8, side=256, width=1024, hidden=2816, heads=16, classes=32768, blocks=2)


class Stem(nn.Module):
    """Image to feature map: two convolutions, each with GroupNorm and SiLU, 1/8 of the resolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3, stride=2, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(16, 64)
        self.second = nn.Conv2d(64, width, 4, stride=4, bias=False)
        self.second_norm = nn.GroupNorm(16, width)

    def forward(self, image: Tensor) -> Tensor:
        x = F.silu(self.first_norm(self.first(image)))
        return F.silu(self.second_norm(self.second(x)))


class Block(nn.Module):
    """A decoder block as in Llama: RMSNorm, causal attention, RMSNorm, SwiGLU."""

    def __init__(self, width: int, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class ImageDecoder(nn.Module):
    """Predicts a token per image patch; returns the cross-entropy against the targets (mean over patches)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.stem = Stem(shape.width)
        self.blocks = nn.ModuleList(Block(shape.width, shape.hidden, shape.heads) for _ in range(shape.blocks))
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.classes, bias=False)

    def forward(self, image: Tensor, target: Tensor) -> Tensor:
        x = self.stem(image).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), target.flatten())


def image_decoder(device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The demo network in fp32 and one batch for it."""
    shape = CUDA_SHAPE if device.startswith("cuda") else CPU_SHAPE
    torch.manual_seed(0)
    model = ImageDecoder(shape).to(device).eval().requires_grad_(False)
    image = torch.randn(shape.batch, 3, shape.side, shape.side, device=device)
    target = torch.randint(shape.classes, (shape.batch, (shape.side // 8) ** 2), device=device)
    return model, (image, target)
