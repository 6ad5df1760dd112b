"""torch_kevolve: a torch.compile backend that evolves kernels."""

from __future__ import annotations

from typing import Any

__all__ = ["explain", "metrics"]


def __getattr__(name: str) -> Any:
    """The public names, imported when they are first asked for: `import torch_kevolve` itself loads nothing."""
    if name in __all__:
        from torch_kevolve import backend

        return getattr(backend, name)
    if name == "__version__":
        from torch_kevolve.settings import VERSION

        return VERSION
    raise AttributeError(f"module 'torch_kevolve' has no attribute {name!r}")
