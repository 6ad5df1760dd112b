"""Device: what kernels run on, what it is called, how fast it can be."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from torch_kevolve.kernel import Fingerprint


@dataclass(frozen=True)
class DeviceFacts:
    """What a template needs to know. Sizes in bytes; `units`: CPU threads or SMs; `arch`: `cuda:90`, `cpu:native`.

    `vector_bytes`: width of a CPU vector register (64 for AVX-512), 0 on a GPU. `shared_bytes`: shared memory a block.
    """

    type: str
    arch: str
    units: int
    l1_bytes: int
    l2_bytes: int
    l3_bytes: int
    vector_bytes: int = 0
    shared_bytes: int = 0
    registers: int = 0
    warp: int = 32


@dataclass(frozen=True)
class Ceilings:
    """Measured roofs: bytes/s of a large copy (on a CPU also of a large read) and of reads from the last-level cache,
    FLOP/s of fp32 and bf16 matmul.

    `cache_bytes`: all last-level caches of the cores that we may use. None of the figures is below what was seen once.
    """

    copy_bytes_s: float
    cache_bytes_s: float
    fp32_flops: float
    bf16_flops: float
    cache_bytes: int


class Device(Protocol):
    """A member of the device axis."""

    name: str

    def facts(self) -> DeviceFacts: ...

    def fingerprint(self) -> Fingerprint:
        """The hard part, in every kernel's key."""
        ...

    def soft(self) -> dict[str, Any]:
        """Driver, toolkit, torch and triton versions, for the evidence."""
        ...

    def ceilings(self, again: bool = False) -> Ceilings:
        """Measured once per fingerprint and kept under KEVOLVE_HOME. `again`: measured now; what is higher counts."""
        ...

    def lock(self) -> AbstractContextManager[None]:
        """Held around every measurement: only one runs on a device at a time, over all processes."""
        ...

    def share(self) -> AbstractContextManager[None]:
        """Held around other work on the device: it waits while a process measures there."""
        ...

    def synchronize(self) -> None: ...

    def give_back(self) -> None:
        """Return memory that is cached and free: what one process keeps is missing in the others."""
        ...

    def flush(self) -> None:
        """Empty the last-level cache before a sample (GPU); nothing on a CPU."""
        ...

    def load(self) -> float:
        """Share of the device that others use now, 0 to 1, as far as it can be read."""
        ...
