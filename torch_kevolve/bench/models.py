"""Models: the small network of `kevolve demo`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """Sizes of the demo network. `side`: pixels of the square image; one token per 16 x 16 pixels.

    `classes`: image tokens, as many as in the larger code book of VQGAN at that resolution (Esser et al. 2021).
    """

    batch: int
    side: int
    width: int
    hidden: int
    heads: int
    classes: int
    blocks: int


CPU_SHAPE = Shape(batch=4, side=256, width=256, hidden=704, heads=4, classes=16384, blocks=1)
CUDA_SHAPE = Shape(batch=32, side=256, width=1024, hidden=2816, heads=16, classes=16384, blocks=2)


class Stem(nn.Module):
    """Image to feature map at 1/16 of the resolution: three convolutions, each with GroupNorm and SiLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(
            [
                nn.Conv2d(3, 32, 3, stride=2, padding=1, bias=False),
                nn.Conv2d(32, 64, 3, stride=2, padding=1, bias=False),
                nn.Conv2d(64, width, 4, stride=4, bias=False),
            ]
        )
        self.norms = nn.ModuleList(nn.GroupNorm(16, channels) for channels in (32, 64, width))

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.silu(norm(convolution(x)))
        return x


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
    target = torch.randint(shape.classes, (shape.batch, (shape.side // 16) ** 2), device=device)
    return model, (image, target)
