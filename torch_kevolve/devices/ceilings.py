"""Ceilings: how fast memory and arithmetic are here, measured once."""

from __future__ import annotations

import json
import logging
import math
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from torch_kevolve.devices.base import Ceilings, Device
from torch_kevolve.settings import Settings

log = logging.getLogger(__name__)

QUIET = 0.25
"""Share of the device that others may use for a measurement to count as undisturbed."""
TRIES = 4
"""Disturbed measurements that are merged before the figures are taken as they are."""


def kept(device: Device, measure: Callable[[], Ceilings], again: bool = False) -> Ceilings:
    """The ceilings on file for this device's fingerprint; measured, under the device's lock, where there are none.
    `again`: measured in any case, and merged with what is on file.

    A ceiling is what the device can do: the highest of several measurements. With five other processes on two cores
    one of them saw 0.4 GB/s where the cache gives 86, so a disturbed one is filed as such, and merged with the next.
    """
    path = Settings.make().home_path / "devices" / f"{device.fingerprint().key[:16]}.json"
    found, tries = _read(path)
    if found is not None and tries >= TRIES and not again:
        return found
    with device.lock():
        found, tries = _read(path)  # another process may have measured while we waited
        if found is not None and tries >= TRIES and not again:
            return found
        before = device.load()
        # Not the fake tensors of a compilation that happens to call: those take no time at all.
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            ceilings = _highest(measure(), found)
        quiet = max(before, device.load()) <= QUIET
        _write(path, ceilings, TRIES if quiet else tries + 1)
        return ceilings


def _highest(new: Ceilings, old: Ceilings | None) -> Ceilings:
    if old is None or old.cache_bytes != new.cache_bytes:
        return new
    return Ceilings(**{f.name: max(getattr(new, f.name), getattr(old, f.name)) for f in fields(Ceilings)})


def _read(path: Path) -> tuple[Ceilings | None, int]:
    """The filed ceilings and how many tries they rest on; None for anything that is not five positive numbers."""
    try:
        data: Any = json.loads(path.read_text())
        figures = {f.name: data["ceilings"][f.name] for f in fields(Ceilings)}
        good = all(type(v) in (int, float) and math.isfinite(v) and v > 0 for v in figures.values())
        return (Ceilings(**figures), int(data["tries"])) if good else (None, 0)
    except (OSError, ValueError, KeyError, TypeError):
        return None, 0


def _write(path: Path, ceilings: Ceilings, tries: int) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(prefix=".new-", dir=path.parent)
        with os.fdopen(handle, "w") as file:
            json.dump({"ceilings": asdict(ceilings), "tries": tries}, file)
        os.replace(scratch, path)
    except OSError as error:
        log.info("ceilings are not kept: %s", error)


def measure_cpu(cache_bytes: int) -> Ceilings:
    """About 2 s on two quiet cores. Copy and sum of 128 MB, sum over a quarter of the last cache, matmuls of some 5 ms.

    A sum only reads, so it is nearer to what memory can do than a copy, whose stores fetch their lines first: 29 to
    36 GB/s beside 26 to 28.
    """
    big = torch.ones(32 * 2**20, dtype=torch.float32, device="cpu")
    other = torch.empty_like(big)
    copy_s = best(lambda: other.copy_(big), 0.4)
    read_s = best(big.sum, 0.4)
    small = torch.ones(max(2**16, cache_bytes // 16), dtype=torch.float32, device="cpu")
    cache_s = best(small.sum, 0.2)
    copy = max(2 * big.nbytes / copy_s, big.nbytes / read_s)
    return Ceilings(
        copy_bytes_s=copy,
        cache_bytes_s=max(copy, small.nbytes / cache_s),
        fp32_flops=_cpu_matmul(torch.float32),
        bf16_flops=_cpu_matmul(torch.bfloat16),
        cache_bytes=cache_bytes,
    )


def measure_cuda(device: str, cache_bytes: int) -> Ceilings:
    """Under 1 s. Copy of 1 GB (less on a full card), copies inside L2, matmul of 4096^3."""
    free, _ = torch.cuda.mem_get_info(device)
    big = torch.ones(min(2**28, free // 32), dtype=torch.float32, device=device)
    other = torch.empty_like(big)
    small = torch.ones(max(2**16, cache_bytes // 16), dtype=torch.float32, device=device)
    small_other = torch.empty_like(small)
    copy = 2 * big.nbytes / _cuda_best(lambda: other.copy_(big), 10)

    def copies() -> None:
        # Several in a row: one copy of a quarter of the L2 is little more than its launch.
        for _ in range(20):
            small_other.copy_(small)

    size = 4096 if free > 2**31 else 1024
    return Ceilings(
        copy_bytes_s=copy,
        cache_bytes_s=max(copy, 20 * 2 * small.nbytes / _cuda_best(copies, 10)),
        fp32_flops=_cuda_matmul(torch.float32, size, device),
        bf16_flops=_cuda_matmul(torch.bfloat16, size, device),
        cache_bytes=cache_bytes,
    )


def best(call: Callable[[], object], seconds: float) -> float:
    """Least seconds of the calls that fit into `seconds`, at least two after one to warm up."""
    call()
    least, ended, rounds = float("inf"), time.perf_counter() + seconds, 0
    while rounds < 2 or time.perf_counter() < ended:
        started = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - started)
        rounds += 1
    return least


def _cpu_matmul(dtype: torch.dtype) -> float:
    """FLOP/s, the best of sizes that grow until a call takes 5 ms.

    A fixed size does not do: 768^3 in bf16 took 2.4 s on a CPU without bf16 units, and 64^3 is all overhead.
    """
    size, highest = 256, 0.0
    while True:
        a = torch.ones(size, size, dtype=dtype, device="cpu")
        seconds = best(partial(torch.mm, a, a), 0.15)
        highest = max(highest, 2 * size**3 / seconds)
        if seconds > 5e-3 or size >= 4096:
            return highest
        size *= 2


def _cuda_matmul(dtype: torch.dtype, size: int, device: str) -> float:
    a = torch.ones(size, size, device=device, dtype=dtype)
    return 2 * size**3 / _cuda_best(lambda: a @ a, 10)


def _cuda_best(call: Callable[[], object], rounds: int) -> float:
    least = float("inf")
    call()
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        least = min(least, start.elapsed_time(end) / 1e3)
    return least
