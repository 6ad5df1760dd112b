"""Memory: tensors that the judge owns and a worker maps.

On a CPU a file in shared memory, on CUDA an IPC handle. What crosses the pipe is plain JSON; nothing is unpickled.
"""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_kevolve.sizes import Json


class Arena:
    """Makes shared blocks for one job and frees them together."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        base = "/dev/shm" if Path("/dev/shm").is_dir() else None
        self._folder = tempfile.TemporaryDirectory(prefix="kevolve-mem-", dir=base)
        self._count = 0
        self._kept: list[Tensor] = []

    def block(self, nbytes: int) -> tuple[Tensor, Json]:
        """A new block as uint8 and its handle. Rounded up to 64 bytes, never empty."""
        size = max(64, -(-nbytes // 64) * 64)
        if self.device.type == "cuda":
            tensor = torch.empty(size, dtype=torch.uint8, device=self.device)
            torch.cuda.synchronize(self.device)
            handle = [
                base64.b64encode(part).decode() if isinstance(part, bytes) else part
                for part in tensor.untyped_storage()._share_cuda_()
            ]
            self._kept.append(tensor)
            return tensor, {"cuda": handle, "bytes": size}
        path = Path(self._folder.name, f"b{self._count}")
        self._count += 1
        with path.open("wb") as file:
            file.truncate(size)
        tensor = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        return tensor, {"file": str(path), "bytes": size}

    def close(self) -> None:
        self._kept.clear()
        self._folder.cleanup()


def attach(handle: Mapping[str, Any]) -> Tensor:
    """Map a block of another process."""
    if "file" in handle:
        return torch.from_file(handle["file"], shared=True, size=int(handle["bytes"]), dtype=torch.uint8)
    device, ipc, size, offset, counter, counter_offset, event, sync = handle["cuda"]
    storage = torch.UntypedStorage._new_shared_cuda(
        device,
        base64.b64decode(ipc),
        size,
        offset,
        base64.b64decode(counter),
        counter_offset,
        base64.b64decode(event),
        sync,
    )
    return torch.empty(0, dtype=torch.uint8, device=f"cuda:{device}").set_(storage, 0, (int(handle["bytes"]),), (1,))


def extent(tensor: Tensor) -> int:
    """Elements from the first to the last that a strided tensor touches."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def place(block: Tensor, like: Mapping[str, Any]) -> Tensor:
    """A tensor of a given dtype, shape and strides at the start of a block."""
    dtype = getattr(torch, like["dtype"])
    shape, strides = list(like["shape"]), list(like["strides"])
    if 0 in shape:
        return torch.empty_strided(shape, strides, dtype=dtype, device=block.device)
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    bytes_ = count * torch.empty(0, dtype=dtype).element_size()
    return block[:bytes_].view(dtype).as_strided(shape, strides)


def describe(tensor: Tensor) -> Json:
    """What `place` needs."""
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
    }


def checksum(tensor: Tensor) -> int:
    """A sum over all bytes of a block that any single changed byte changes."""
    words = tensor.view(torch.int64)
    return int(words.sum()) ^ int((words >> 17).sum())
