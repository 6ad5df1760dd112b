"""Ceilings: how fast memory and arithmetic are here, measured once."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from torch_kevolve.devices.base import Ceilings
from torch_kevolve.kernel import Fingerprint
from torch_kevolve.settings import Settings

log = logging.getLogger(__name__)


def kept(fingerprint: Fingerprint, measure: Callable[[], Ceilings]) -> Ceilings:
    """The ceilings on file for this fingerprint; measured and filed where there are none."""
    path = Settings.make().home_path / "devices" / f"{fingerprint.key[:16]}.json"
    try:
        return Ceilings(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        pass
    ceilings = measure()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, scratch = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(asdict(ceilings), file)
        os.replace(scratch, path)
    except OSError as error:
        log.info("ceilings are not kept: %s", error)
    return ceilings


def measure_cpu(cache_bytes: int) -> Ceilings:
    """About 1 s. Copy of 128 MB, sum over a quarter of the last-level cache, matmul of 768^3."""
    big = torch.ones(32 * 2**20)
    other = torch.empty_like(big)
    copy_s = best(lambda: other.copy_(big), 5)
    small = torch.ones(max(2**16, cache_bytes // 16))
    cache_s = best(small.sum, 30)
    return Ceilings(
        copy_bytes_s=2 * big.nbytes / copy_s,
        cache_bytes_s=small.nbytes / cache_s,
        fp32_flops=_matmul(torch.float32, 768, "cpu", 5),
        bf16_flops=_matmul(torch.bfloat16, 768, "cpu", 5),
        cache_bytes=cache_bytes,
    )


def measure_cuda(device: str, cache_bytes: int) -> Ceilings:
    """About 1 s. Copy of 1 GB, copy inside L2, matmul of 4096^3."""
    big = torch.ones(2**28, device=device)
    other = torch.empty_like(big)
    small = torch.ones(max(2**16, cache_bytes // 16), device=device)
    small_other = torch.empty_like(small)
    return Ceilings(
        copy_bytes_s=2 * big.nbytes / _cuda_best(lambda: other.copy_(big), 10),
        cache_bytes_s=2 * small.nbytes / _cuda_best(lambda: small_other.copy_(small), 50),
        fp32_flops=_matmul(torch.float32, 4096, device, 5),
        bf16_flops=_matmul(torch.bfloat16, 4096, device, 10),
        cache_bytes=cache_bytes,
    )


def best(call: Callable[[], object], rounds: int) -> float:
    """Least seconds of several calls: a ceiling is what the device can do, not what it does on average."""
    least = float("inf")
    for _ in range(rounds + 1):
        started = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - started)
    return least


def _cuda_best(call: Callable[[], object], rounds: int) -> float:
    least = float("inf")
    call()
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        least = min(least, start.elapsed_time(end) / 1e3)
    return least


def _matmul(dtype: torch.dtype, size: int, device: str, rounds: int) -> float:
    a = torch.ones(size, size, device=device, dtype=dtype)
    timer = best if device == "cpu" else _cuda_best
    return 2 * size**3 / timer(lambda: a @ a, rounds)
