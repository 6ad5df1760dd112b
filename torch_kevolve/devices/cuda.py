"""CUDA: an NVIDIA GPU, or an AMD one through torch's HIP build."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import Any

import torch

from torch_kevolve.devices.base import Ceilings, DeviceFacts
from torch_kevolve.devices.ceilings import kept, measure_cuda
from torch_kevolve.devices.cpu import triton_version
from torch_kevolve.devices.lock import device_lock, device_share
from torch_kevolve.kernel import Fingerprint


class Cuda:
    """One GPU by index. All figures come from the driver, so a sibling card has a fingerprint of its own."""

    name = "cuda"

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self._props = torch.cuda.get_device_properties(index)
        self._ceilings: Ceilings | None = None
        self._flush: torch.Tensor | None = None

    def facts(self) -> DeviceFacts:
        props = self._props
        return DeviceFacts(
            type="cuda",
            arch=self._arch(),
            units=props.multi_processor_count,
            l1_bytes=props.shared_memory_per_multiprocessor,
            l2_bytes=props.L2_cache_size,
            l3_bytes=0,
            shared_bytes=getattr(props, "shared_memory_per_block_optin", props.shared_memory_per_block),
            registers=getattr(props, "regs_per_multiprocessor", 65536),
            warp=props.warp_size,
        )

    def fingerprint(self) -> Fingerprint:
        props = self._props
        return Fingerprint.of(
            {
                "vendor": "AMD" if torch.version.hip else "NVIDIA",
                "arch": self._arch(),
                "name": props.name,
                "units": props.multi_processor_count,
                "memory": f"{round(props.total_memory / 2**30)}G",
                "isa": "",
            }
        )

    def soft(self) -> dict[str, Any]:
        driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: 0)()
        return {
            "torch": torch.__version__,
            "toolkit": torch.version.cuda or torch.version.hip or "",
            "driver": str(driver),
            "triton": triton_version(),
        }

    def ceilings(self, again: bool = False) -> Ceilings:
        if self._ceilings is None or again:
            self._ceilings = kept(self, lambda: measure_cuda(f"cuda:{self.index}", self._props.L2_cache_size), again)
        return self._ceilings

    def lock(self) -> AbstractContextManager[None]:
        return device_lock(self._lock_name)

    def share(self) -> AbstractContextManager[None]:
        return device_share(self._lock_name)

    @property
    def _lock_name(self) -> str:
        """The card's own name: its index differs between processes with their own CUDA_VISIBLE_DEVICES."""
        return f"cuda-{getattr(self._props, 'uuid', self.index)}"

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)

    def give_back(self) -> None:
        torch.cuda.empty_cache()

    def flush(self) -> None:
        """Overwrite twice the L2, so that no sample finds the last one's data there."""
        if self._flush is None:
            self._flush = torch.empty(2 * self._props.L2_cache_size // 4, device=f"cuda:{self.index}")
        self._flush.zero_()

    def load(self) -> float:
        """Share of the last sampling period that the GPU was busy, where the driver says so; else 0."""
        with contextlib.suppress(Exception):
            return float(torch.cuda.utilization(self.index)) / 100
        return 0.0

    def _arch(self) -> str:
        if torch.version.hip:
            return f"hip:{self._props.gcnArchName.split(':')[0]}"
        return f"cuda:{self._props.major}{self._props.minor}"
