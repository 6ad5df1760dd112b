"""CPU: the cores, caches and vector units that we may use."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from torch_kevolve.devices.base import Ceilings, DeviceFacts
from torch_kevolve.devices.ceilings import kept, measure_cpu
from torch_kevolve.devices.lock import device_lock, device_share
from torch_kevolve.kernel import Fingerprint

ISA = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16", "amx_bf16", "asimd", "sve")


class Cpu:
    """This machine's processor. `units` is the number of threads torch uses."""

    name = "cpu"

    def __init__(self, index: int = 0) -> None:
        self._info = _cpuinfo()
        self._ceilings: Ceilings | None = None

    def facts(self) -> DeviceFacts:
        caches = _caches()
        flags = self._info["flags"]
        vector = 64 if "avx512f" in flags else 32 if "avx2" in flags else 16
        return DeviceFacts(
            type="cpu",
            arch="cpu:native",
            units=torch.get_num_threads(),
            l1_bytes=caches.get(1, 32 * 1024),
            l2_bytes=caches.get(2, 1024 * 1024),
            l3_bytes=caches.get(3, 8 * 1024 * 1024),
            vector_bytes=vector,
        )

    def fingerprint(self) -> Fingerprint:
        return Fingerprint.of(
            {
                "vendor": f"{self._info['vendor']} CPU",
                "arch": f"{platform.machine()}-{self._info['family']}-{self._info['model']}",
                "name": self._info["name"],
                "units": torch.get_num_threads(),
                "memory": f"L3-{_caches().get(3, 0) // 2**20}M",
                "isa": " ".join(flag for flag in ISA if flag in self._info["flags"]),
            }
        )

    def soft(self) -> dict[str, Any]:
        return {"torch": torch.__version__, "compiler": _compiler(), "triton": triton_version()}

    def ceilings(self, again: bool = False) -> Ceilings:
        if self._ceilings is None or again:
            self._ceilings = kept(self, lambda: measure_cpu(_last_level_bytes() or self.facts().l3_bytes), again)
        return self._ceilings

    def lock(self) -> AbstractContextManager[None]:
        return device_lock("cpu")

    def share(self) -> AbstractContextManager[None]:
        return device_share("cpu")

    def synchronize(self) -> None:
        """Calls on a CPU have ended when they return."""

    def give_back(self) -> None:
        """Free memory of a CPU is its allocator's, and all arms run under one setting of it."""

    def flush(self) -> None:
        """No flush: a CPU's caches hold what the last operator wrote, in the model as here."""

    def load(self) -> float:
        """Share of all cores that other processes used during the last 50 ms."""
        import psutil

        mine = psutil.Process()
        used = mine.cpu_times()
        total = psutil.cpu_percent(interval=0.05) / 100
        after = mine.cpu_times()
        own = (after.user + after.system - used.user - used.system) / 0.05 / (psutil.cpu_count() or 1)
        return max(0.0, total - own)


def triton_version() -> str:
    try:
        import triton
    except ImportError:
        return ""
    return str(triton.__version__)


def _cpuinfo() -> dict[str, Any]:
    fields: dict[str, str] = {}
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, colon, value = line.partition(":")
            if colon:
                fields.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    vendor = {"AuthenticAMD": "AMD", "GenuineIntel": "Intel"}.get(fields.get("vendor_id", ""), "ARM")
    return {
        "vendor": vendor,
        "family": fields.get("cpu family", fields.get("CPU implementer", "")),
        "model": fields.get("model", fields.get("CPU part", "")),
        "name": fields.get("model name", platform.processor() or platform.machine()),
        "flags": set(fields.get("flags", fields.get("Features", "")).split()),
    }


def _caches() -> dict[int, int]:
    """Bytes per level of data cache, of the first core."""
    sizes: dict[int, int] = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            if (index / "type").read_text().strip() == "Instruction":
                continue
            sizes[int((index / "level").read_text())] = _bytes((index / "size").read_text())
        except (OSError, ValueError):
            continue
    return sizes


def _last_level_bytes() -> int:
    """Bytes of all last-level caches that the cores we may use share, each counted once; 0 if it cannot be read."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    found: dict[str, int] = {}
    for core in usable:
        levels = sorted(Path(f"/sys/devices/system/cpu/cpu{core}/cache").glob("index*"))
        try:
            found[(levels[-1] / "shared_cpu_list").read_text()] = _bytes((levels[-1] / "size").read_text())
        except (OSError, ValueError, IndexError):
            continue
    return sum(found.values())


def _bytes(text: str) -> int:
    text = text.strip()
    return int(text.rstrip("KMG")) * {"K": 1024, "M": 2**20, "G": 2**30}.get(text[-1:], 1)


def _compiler() -> str:
    """Name and version of the compiler that Inductor calls, as `g++ 12.2.0`."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        command = get_cpp_compiler()
        done = subprocess.run([command, "-dumpfullversion", "-dumpversion"], capture_output=True, text=True, timeout=20)
    except Exception as error:  # no compiler at all: said in the evidence, doctor says the cure
        return f"none ({type(error).__name__})"
    return f"{Path(command).name} {done.stdout.strip()}"
