"""Measure: how fast is each arm, fairly.

Rounds in which every arm runs once, the order reversed in every other round; medians; a bootstrap interval on the
ratio of medians over paired rounds. A GPU's last-level cache is emptied before each sample; a CPU's is not.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from torch_kevolve.devices.base import Device
from torch_kevolve.evidence import Timing

LEAST_SAMPLE_S = 2e-3
"""A CPU sample lasts at least this long: below 1 ms the timer and the OpenMP wake-up are most of it."""
LEAST_ROUNDS = 7
MOST_ROUNDS = 101
BOOTSTRAP = 1000


def interleave(
    arms: Mapping[str, Callable[[], object]],
    device: Device,
    seconds: float,
    least: int = LEAST_ROUNDS,
    lock: bool = True,
) -> dict[str, list[float]]:
    """Milliseconds per call of each arm, one sample per round; at least `least` rounds.

    Holds the device's lock, unless the caller does (`lock` False).
    """
    with device.lock() if lock else contextlib.nullcontext():
        if device.name == "cuda":
            waits = {name: _host_seconds(call, device) for name, call in arms.items()}
            return _rounds(arms, device, seconds, least, waits, _cuda_sample)
        calls = {name: _calls_per_sample(call) for name, call in arms.items()}
        return _rounds(arms, device, seconds, least, calls, _cpu_sample)


Sample = Callable[[Callable[[], object], float, Device], float]


def _rounds(
    arms: Mapping[str, Callable[[], object]],
    device: Device,
    seconds: float,
    least: int,
    hints: Mapping[str, float],
    sample: Sample,
) -> dict[str, list[float]]:
    out: dict[str, list[float]] = {name: [] for name in arms}
    started = time.perf_counter()
    done = 0
    while done < least or (time.perf_counter() - started < seconds and done < MOST_ROUNDS):
        order = list(arms)
        if done % 2:
            order.reverse()
        for name in order:
            out[name].append(sample(arms[name], hints[name], device))
        done += 1
        if time.perf_counter() - started > 4 * max(seconds, 1.0) and done >= 3:
            break
    return out


def _calls_per_sample(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    once = time.perf_counter() - started
    if once > 10 * LEAST_SAMPLE_S:
        return 1
    started = time.perf_counter()
    call()
    once = time.perf_counter() - started
    if once < LEAST_SAMPLE_S / 4:
        started = time.perf_counter()
        for _ in range(5):
            call()
        once = (time.perf_counter() - started) / 5
    return max(1, int(LEAST_SAMPLE_S / max(once, 1e-7)))


def _host_seconds(call: Callable[[], object], device: Device) -> float:
    """How long the host is busy with one call: launches, allocations, Python."""
    for _ in range(2):
        call()
        device.synchronize()
    started = time.perf_counter()
    call()
    taken = time.perf_counter() - started
    device.synchronize()
    return taken


def _cpu_sample(call: Callable[[], object], calls: float, device: Device) -> float:
    started = time.perf_counter()
    for _ in range(int(calls)):
        call()
    return (time.perf_counter() - started) * 1e3 / calls


def _cuda_sample(call: Callable[[], object], host_s: float, device: Device) -> float:
    """Time on the device. It first sleeps until the host has queued the whole call: without it a kernel of 20 us would
    be timed as the 100 us that Python needs to launch it. 2 cycles per ns is above the clock of any GPU now sold."""
    device.flush()
    torch.cuda._sleep(int(2e9 * min(1e-2, 2 * host_s + 5e-5)))
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    device.synchronize()
    return start.elapsed_time(end)


def timing(samples: Sequence[float]) -> Timing:
    """Median and quartiles."""
    low, middle, high = np.quantile(np.asarray(samples), [0.25, 0.5, 0.75])
    return Timing(float(middle), float(low), float(high), len(samples))


def ratio_interval(base: Sequence[float], mine: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """95 % bootstrap interval of that ratio: rounds are drawn with replacement, both arms of a round together."""
    count = min(len(base), len(mine))
    a, b = np.asarray(base[:count]), np.asarray(mine[:count])
    picks = np.random.default_rng(seed).integers(0, count, (BOOTSTRAP, count))
    ratios = np.median(a[picks], axis=1) / np.median(b[picks], axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


def malloc_setting() -> str:
    """Which allocator behaviour this process has: `arena` (freed pages are kept), a preloaded one's name, `default`."""
    preload = os.environ.get("LD_PRELOAD", "")
    for name in ("jemalloc", "tcmalloc", "mimalloc"):
        if name in preload:
            return name
    if os.environ.get("MALLOC_MMAP_MAX_") == "0":
        return "arena"
    return "default"
