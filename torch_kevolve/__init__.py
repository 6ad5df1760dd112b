"""torch_kevolve: a torch.compile backend that evolves kernels."""

from __future__ import annotations

__version__ = "0.1.0"
