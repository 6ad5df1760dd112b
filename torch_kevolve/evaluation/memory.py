"""Memory: tensors that the judge owns and a worker maps.

On a CPU a file in shared memory, on CUDA an IPC handle. What crosses the pipe is plain JSON; nothing is unpickled.
"""

from __future__ import annotations

import base64
import ctypes
import mmap
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_kevolve.errors import EvaluationError
from torch_kevolve.sizes import Json


class Arena:
    """Makes shared blocks for one job and frees them together."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        base = "/dev/shm" if Path("/dev/shm").is_dir() else None
        self._folder = tempfile.TemporaryDirectory(prefix="kevolve-mem-", dir=base)
        self._count = 0
        self._kept: list[Tensor] = []

    def block(self, nbytes: int, walled: bool = False) -> tuple[Tensor, Json]:
        """A new block as uint8 and its handle. Rounded up to 64 bytes (`walled`: to whole pages), never empty."""
        unit = mmap.PAGESIZE if walled else 64
        size = max(unit, -(-nbytes // unit) * unit)
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
        return tensor, {"file": str(path), "bytes": size, "walled": walled}

    def close(self) -> None:
        self._kept.clear()
        self._folder.cleanup()


def attach(handle: Mapping[str, Any]) -> Tensor:
    """Map a block of another process. Reading past the end of a walled one is a fault, not luck."""
    if "file" in handle:
        if handle.get("walled") and sys.platform == "linux":
            return _before_a_wall(handle["file"], int(handle["bytes"]))
        return torch.from_file(handle["file"], shared=True, size=int(handle["bytes"]), dtype=torch.uint8)
    device, ipc, size, offset, counter, counter_offset, event, sync = handle["cuda"]
    # Opening a handle before CUDA is initialised is a segmentation fault (torch 2.11), not an error.
    torch.cuda.init()
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


def _before_a_wall(path: str, size: int) -> Tensor:
    """The file mapped so that the page after it may not be touched. Stays mapped as long as the process lives."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int], ctypes.c_long]
    nothing, fixed = 0, 0x10
    base = libc.mmap(None, size + mmap.PAGESIZE, nothing, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    file = os.open(path, os.O_RDWR)
    try:
        access = mmap.PROT_READ | mmap.PROT_WRITE
        home = libc.mmap(base, size, access, mmap.MAP_SHARED | fixed, file, 0)
    finally:
        os.close(file)
    if home is None or home == ctypes.c_void_p(-1).value or home != base:
        raise EvaluationError(detail=f"a block of {size} bytes cannot be mapped (errno {ctypes.get_errno()})")
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(home), dtype=torch.uint8)


def extent(tensor: Tensor) -> int:
    """Elements from the first to the last that a strided tensor touches."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def place(block: Tensor, like: Mapping[str, Any]) -> Tensor:
    """A tensor of a given dtype, shape and strides in a block, `offset` bytes from its start."""
    dtype = getattr(torch, like["dtype"])
    shape, strides = list(like["shape"]), list(like["strides"])
    if 0 in shape:
        return torch.empty_strided(shape, strides, dtype=dtype, device=block.device)
    count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    bytes_ = count * torch.empty(0, dtype=dtype).element_size()
    start = int(like.get("offset", 0))
    return block[start : start + bytes_].view(dtype)[:count].as_strided(shape, strides)


def describe(tensor: Tensor) -> Json:
    """What `place` needs."""
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "strides": list(tensor.stride()),
    }


def checksum(block: Tensor) -> tuple[int, ...]:
    """Sums over the columns and over eighths of a block: any changed byte changes them, and so do most exchanges."""
    words = block.view(torch.int64)
    return (*words.view(-1, 8).sum(0).tolist(), *words.view(8, -1).sum(1).tolist())
