"""Guard: buffers with poison inside and bands at both ends."""

from __future__ import annotations

import torch
from torch import Tensor

BAND = 512
"""Bytes of guard before and after a buffer: more than a vector register or a warp's store past the end."""
MARK = 0xA5


class GuardedBuffers:
    """Allocates a plan's buffers. Uninitialised memory is filled with `poison`; bands hold MARK."""

    def __init__(self, poison: int | None = None) -> None:
        self.poison = poison
        self._all: list[tuple[Tensor, int]] = []

    def __call__(self, shape: list[int], strides: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        if self.poison is None:
            return torch.empty_strided(shape, strides, dtype=dtype, device=device)
        size = torch.empty(0, dtype=dtype).element_size()
        count = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        inner = -(-count * size // 64) * 64
        # Bytes between the end of the data and the next multiple of 64 belong to the rear band.
        raw = torch.full((2 * BAND + inner,), MARK, dtype=torch.uint8, device=device)
        raw[BAND : BAND + count * size] = self.poison
        self._all.append((raw, count * size))
        return raw[BAND : BAND + inner].view(dtype).as_strided(shape, strides)

    def damaged(self) -> str:
        """Empty, or which buffer was written outside."""
        for place, (raw, used) in enumerate(self._all):
            if not bool((raw[:BAND] == MARK).all()):
                return f"buffer {place} was written before its start"
            if not bool((raw[BAND + used :] == MARK).all()):
                return f"buffer {place} was written past its end"
        return ""
